"""ShareFetcher: the share sessions of one member with all brokers, and their requests.

Acknowledgements travel with the next fetch to their broker, or by themselves if a
caller waits for them. Each ends in an `Outcome`: the broker has written it, or it has
failed with the broker's error, or with the error that ended the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.cluster import Broker, Cluster, Pending, TopicPartition
from mpbroker.client.consumer.consumer_record import ConsumerRecord
from mpbroker.client.errors import (
    BrokerUnavailableError,
    UnsupportedVersionError,
    describe_error,
    error_code_of,
)
from mpbroker.client.selector import monotonic_ms
from mpbroker.client.share.share_session import (
    Given,
    ShareFetchSettings,
    SharePlace,
    ShareSession,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.protocol.messages.share_acknowledge import (
    AcknowledgeType,
    ShareAcknowledgeRequest,
    ShareAcknowledgeResponse,
)
from mpbroker.protocol.messages.share_fetch import (
    PartitionData,
    ShareFetchRequest,
    ShareFetchResponse,
)
from mpbroker.protocol.records.record_batch import (
    compute_crc,
    iter_batches,
    iter_records,
)

_RETRY_INTERVAL_MS: Final = 100.0  # Kafka's retry.backoff.ms
_RENEWS_SINCE: Final = 2  # version of ShareAcknowledge


class Outcome(NamedTuple):
    """The result of acknowledging some offsets of a partition.

    Attributes:
        error: None if the acknowledgement succeeded.
    """

    where: TopicPartition
    offsets: frozenset[int]
    error: MpbrokerError | None


class SharedRecords(NamedTuple):
    """Records that a member has acquired, in one partition."""

    session: ShareSession
    place: SharePlace
    records: list[ConsumerRecord]


class _Asked:
    """A ShareFetch or ShareAcknowledge request in flight, with its acknowledgements."""

    __slots__ = ("broker", "deadline_ms", "fetches", "given", "pending", "places")

    def __init__(
        self,
        broker: Broker,
        pending: Pending,
        given: Given,
        places: Mapping[tuple[bytes, int], SharePlace],
        deadline_ms: float,
        fetches: bool,
    ) -> None:
        self.broker = broker
        self.pending = pending
        self.given = given
        self.places = places
        self.deadline_ms = deadline_ms
        self.fetches = fetches


class _Node:
    """One broker: the partitions to fetch there, and the session with it."""

    def __init__(self, session: ShareSession) -> None:
        self.session = session
        self.places: list[SharePlace] = []
        self.asked: _Asked | None = None
        self.retry_at_ms = 0.0  # after an error
        # While the broker is being connected: how often connecting had failed before.
        self.failures: int | None = None


class ShareFetcher:
    """Fetches from all brokers for a share group's member, and sends acknowledgements.

    One thread uses it.

    Attributes:
        is_outdated: whether the leaders must be looked up again, after an error.
        lock_timeout_ms: how long records stay acquired, in ms; None until a broker has
            told it.
    """

    def __init__(
        self,
        cluster: Cluster,
        group_id: str,
        member_id: str,
        settings: ShareFetchSettings,
        check: Callable[[], None],
    ) -> None:
        """Make a fetcher; no request is sent yet.

        Args:
            cluster: the brokers.
            group_id: the share group's id.
            member_id: the id of the group's member.
            settings: the limits of the requests.
            check: called before and after each wait; may raise an error to end it.
        """
        self.is_outdated = False
        self.lock_timeout_ms: int | None = None
        self._cluster = cluster
        self._group_id = group_id
        self._member_id = member_id
        self._settings = settings
        self._check = check
        self._nodes: dict[int, _Node] = {}
        self._found: list[SharedRecords] = []
        self._outcomes: list[Outcome] = []
        self._error: MpbrokerError | None = None

    def lead(self, leaders: Mapping[int, list[SharePlace]]) -> None:
        """Fetch these partitions, and no others, from now on.

        Args:
            leaders: the partitions, by the node id of their leader.
        """
        self.is_outdated = False
        for node_id, places in leaders.items():
            self._node(node_id).places = places
        for node_id, node in self._nodes.items():
            if node_id not in leaders:
                node.places = []

    def _node(self, node_id: int) -> _Node:
        node = self._nodes.get(node_id)
        if node is None:
            session = ShareSession(self._group_id, self._member_id)
            node = self._nodes[node_id] = _Node(session)
        return node

    def take_outcomes(self) -> list[Outcome]:
        """Return the outcomes of acknowledgements that ended since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def give(
        self,
        session: ShareSession,
        place: SharePlace,
        offset: int,
        kind: AcknowledgeType,
    ) -> None:
        """Store an acknowledgement of an offset that was acquired in a session.

        If the session is lost, the acknowledgement fails at once.
        """
        session.give(place, offset, kind)
        if session.is_lost:
            self._fail(session.take_given(), _lost_error())

    # -- requests ----------------------------------------------------------------------

    def fetch(self, deadline_ms: float) -> list[SharedRecords]:
        """Send due fetches to all brokers, wait for an event, and return records.

        If records have come before this call, they are returned, and no fetch is sent.

        Args:
            deadline_ms: the end of the wait, here and at the brokers, in ms of the
                client's clock.

        Raises:
            ApiError: a broker refused the group, or a topic.
            ProtocolError: a batch is corrupt; its records are rejected.
            BrokerUnavailableError: a leader cannot be reached, or answers too late.
            AuthenticationError: a login or a certificate was refused.
        """
        self._turn(lambda node: self._send_fetch(node, deadline_ms))
        if not self._found and self._error is None:
            now_ms = monotonic_ms()
            retries = [
                node.retry_at_ms
                for node in self._nodes.values()
                if node.places and node.retry_at_ms > now_ms
            ]
            self._wait(min([deadline_ms, *retries]))
            self._take_answers()
        if self._found:
            found, self._found = self._found, []
            return found
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return []

    def commit(self, deadline_ms: float) -> bool:
        """Send all acknowledgements; return whether all have ended by a deadline.

        Records that come meanwhile are kept for `fetch`.

        Args:
            deadline_ms: the deadline, in ms of the client's clock.
        """
        while True:
            self._turn(self._send_acknowledgements)
            if not any(
                node.session.given or (node.asked is not None and node.asked.given)
                for node in self._nodes.values()
            ):
                return True
            if monotonic_ms() >= deadline_ms:
                return False
            self._wait(deadline_ms)

    def end_sessions(self, deadline_ms: float) -> None:
        """Send all acknowledgements, and end all sessions, by a deadline.

        Brokers release the records that the member still has.

        Args:
            deadline_ms: the deadline, in ms of the client's clock.
        """
        while True:
            self._turn(self._send_last)
            if not any(
                node.asked is not None or node.session.is_open
                for node in self._nodes.values()
            ):
                return
            if monotonic_ms() >= deadline_ms:
                return
            self._wait(deadline_ms)

    def _turn(self, send: Callable[[_Node], None]) -> None:
        """Take the responses that have come; call ``send`` for each idle broker.

        An idle broker has no request of this member to answer.
        """
        self._cluster.poll(0)  # a connection may have been closed long ago
        self._take_answers()
        for node in list(self._nodes.values()):
            if node.asked is None:
                try:
                    send(node)
                except BrokerUnavailableError as error:
                    self._lose(node, error)

    def _wait(self, deadline_ms: float) -> None:
        """Wait for an event of a connection, up to a deadline."""
        self._check()
        now_ms = monotonic_ms()
        for node in self._nodes.values():
            if node.asked is not None:
                if node.asked.deadline_ms <= now_ms:
                    node.asked.broker.give_up()  # its request has failed now
                    return
                deadline_ms = min(deadline_ms, node.asked.deadline_ms)
            elif node.failures is not None:
                deadline_ms = min(deadline_ms, now_ms + _RETRY_INTERVAL_MS)
        if deadline_ms > now_ms:
            self._cluster.poll(deadline_ms - now_ms)
        self._check()

    def _ready_broker(self, node: _Node) -> Broker | None:
        """Return a node's broker if it is ready; None while it is being connected.

        Raises:
            BrokerUnavailableError: connecting has failed.
            AuthenticationError: a login or a certificate was refused.
        """
        node_id = next(key for key, each in self._nodes.items() if each is node)
        broker = self._cluster.named(node_id)
        if broker.is_ready():
            node.failures = None
            return broker
        if node.failures is None:
            node.failures = broker.failures
        elif broker.failures > node.failures and broker.delay_ms > 0:
            node.failures = None
            raise broker.failure
        return None

    def _send_fetch(self, node: _Node, deadline_ms: float) -> None:
        session = node.session
        # A fetch must not carry renewals. While records wait for the caller, no others
        # are acquired: their lock would run before anyone reads them.
        if session.renews or not node.places or self._found:
            self._send_acknowledgements(node)
            return
        now_ms = monotonic_ms()
        if node.retry_at_ms > now_ms:
            return
        broker = self._ready_broker(node)
        if broker is None:
            return
        wait_ms = max(0.0, min(self._settings.fetch_max_wait_ms, deadline_ms - now_ms))
        given = session.take_given()
        request = session.fetch(node.places, given, self._settings, int(wait_ms))
        self._send(node, broker, request, given, wait_ms)

    def _send_acknowledgements(self, node: _Node) -> None:
        if node.session.given:
            broker = self._ready_broker(node)
            if broker is not None:
                given = self._without_renewals(broker, node.session.take_given())
                if given:
                    request = node.session.acknowledge(given, ends=False)
                    self._send(node, broker, request, given, 0.0)

    def _send_last(self, node: _Node) -> None:
        if not node.session.is_open:
            return
        broker = self._ready_broker(node)
        if broker is not None:
            given = self._without_renewals(broker, node.session.take_given())
            request = node.session.acknowledge(given, ends=True)
            node.session.is_lost = True
            self._send(node, broker, request, given, 0.0)

    def _without_renewals(self, broker: Broker, given: Given) -> Given:
        """Return those acknowledgements that a broker's version can take.

        If the broker is too old to renew locks, those of type RENEW fail and are left
        out.
        """
        if not any(AcknowledgeType.RENEW in types.values() for types in given.values()):
            return given
        if broker.version_for(ShareAcknowledgeRequest) >= _RENEWS_SINCE:
            return given
        error = UnsupportedVersionError(
            f"{broker.address} cannot renew acquisition locks (ShareAcknowledge 2)"
        )
        left: dict[SharePlace, dict[int, AcknowledgeType]] = {}
        for place, types in given.items():
            renewed = {o for o, kind in types.items() if kind == AcknowledgeType.RENEW}
            if renewed:
                self._outcomes.append(Outcome(place.where, frozenset(renewed), error))
            rest = {o: kind for o, kind in types.items() if o not in renewed}
            if rest:
                left[place] = rest
        return left

    def _send(
        self,
        node: _Node,
        broker: Broker,
        request: ShareFetchRequest | ShareAcknowledgeRequest,
        given: Given,
        wait_ms: float,
    ) -> None:
        fetches = isinstance(request, ShareFetchRequest)
        places = {
            (place.topic_id, place.where.partition): place
            for place in (*node.places, *given)
        }
        try:
            pending = broker.send(
                request, ShareFetchResponse if fetches else ShareAcknowledgeResponse
            )
        except MpbrokerError as error:
            self._fail(given, error)
            raise
        limit_ms = monotonic_ms() + wait_ms + self._cluster.timeout_s * 1000
        node.asked = _Asked(broker, pending, given, places, limit_ms, fetches)

    # -- answers -----------------------------------------------------------------------

    def _take_answers(self) -> None:
        for node in self._nodes.values():
            asked = node.asked
            if asked is None or asked.pending.answer is None:
                continue
            node.asked = None
            answer = asked.pending.answer
            if answer.error is not None:
                self._fail(asked.given, answer.error)
                self._lose(node, answer.error)
                continue
            response = answer.response
            assert isinstance(response, (ShareFetchResponse, ShareAcknowledgeResponse))
            self._take(node, asked, response)

    def _take(
        self,
        node: _Node,
        asked: _Asked,
        response: ShareFetchResponse | ShareAcknowledgeResponse,
    ) -> None:
        if response.error_code:
            error = _api_error(
                f"share group {self._group_id!r} at {asked.broker.address}",
                response.error_code,
                response.error_message,
            )
            self._fail(asked.given, error)
            self._lose(node, error)
            return
        if response.acquisition_lock_timeout_ms > 0:
            self.lock_timeout_ms = response.acquisition_lock_timeout_ms
        node.session.answered()
        if isinstance(response, ShareAcknowledgeResponse):
            errors = {
                (bytes(topic.topic_id), row.partition_index): (
                    row.error_code,
                    row.error_message,
                )
                for topic in response.responses
                for row in topic.partitions
            }
        else:
            errors = {
                (bytes(topic.topic_id), row.partition_index): (
                    row.acknowledge_error_code,
                    row.acknowledge_error_message,
                )
                for topic in response.responses
                for row in topic.partitions
            }
            for topic in response.responses:
                for row in topic.partitions:
                    key = bytes(topic.topic_id), row.partition_index
                    place = asked.places.get(key)
                    if place is not None:
                        self._take_partition(node, place, row)
        for place, types in asked.given.items():
            code, message = errors.get((place.topic_id, place.where.partition), (0, ""))
            self._outcomes.append(
                Outcome(
                    place.where,
                    frozenset(types),
                    _api_error(str(place.where), code, message) if code else None,
                )
            )

    def _take_partition(
        self, node: _Node, place: SharePlace, data: PartitionData
    ) -> None:
        if data.error_code:
            error = _api_error(str(place.where), data.error_code, data.error_message)
            self.is_outdated = True
            node.retry_at_ms = monotonic_ms() + _RETRY_INTERVAL_MS
            if not error.error_code.retriable:
                self._error = self._error or error
            return
        records: list[ConsumerRecord] = []
        delivered: set[int] = set()
        try:
            for record in _records_of(place.where, data):
                records.append(record)
                delivered.add(record.offset)
        except MpbrokerError as error:
            # No other member can read these either.
            self._error = self._error or error
            missing = AcknowledgeType.REJECT
        else:
            missing = AcknowledgeType.GAP  # compacted, or a transaction's marker
        for acquired in data.acquired_records:
            for offset in range(acquired.first_offset, acquired.last_offset + 1):
                if offset not in delivered:
                    node.session.give(place, offset, missing)
        if records:
            self._found.append(SharedRecords(node.session, place, records))

    def _fail(self, given: Given, error: MpbrokerError) -> None:
        for place, types in given.items():
            self._outcomes.append(Outcome(place.where, frozenset(types), error))

    def _lose(self, node: _Node, error: MpbrokerError) -> None:
        """Replace a node's share session, which has ended because of an error.

        Its unsent acknowledgements fail with the error.
        """
        self._fail(node.session.take_given(), error)
        node.session.is_lost = True
        node.session = ShareSession(self._group_id, self._member_id)
        node.retry_at_ms = monotonic_ms() + _RETRY_INTERVAL_MS
        self.is_outdated = True
        if not (isinstance(error, ApiError) and error.error_code.retriable):
            self._error = self._error or error


def _api_error(what: str, number: int, message: str | None) -> ApiError:
    text = f"{what}: {describe_error(number, message)}"
    return ApiError(error_code_of(number), text)


def _lost_error() -> ApiError:
    return ApiError(
        ErrorCode.SHARE_SESSION_NOT_FOUND,
        "the session in which the record was acquired has ended; the record is"
        " delivered again",
    )


def _records_of(where: TopicPartition, data: PartitionData) -> Iterator[ConsumerRecord]:
    """Yield the records of a ShareFetch response that the member has acquired.

    Raises:
        ProtocolError: the CRC of a batch is wrong, or its records cannot be decoded.
    """
    acquired = sorted(
        (each.first_offset, each.last_offset, each.delivery_count)
        for each in data.acquired_records
    )
    if not acquired or not isinstance(data.records, (bytes, bytearray, memoryview)):
        return
    at = 0
    topic, partition = where
    for header, batch in iter_batches(data.records):
        if header.is_control or header.last_offset < acquired[at][0]:
            continue
        if compute_crc(batch) != header.crc:
            raise ProtocolError(
                f"{where}: the batch at offset {header.base_offset} is corrupt: its CRC"
                f" is not {header.crc:#010x}"
            )
        timestamp_type = header.timestamp_type
        for offset, timestamp, key, value, headers in iter_records(batch):
            while offset > acquired[at][1]:
                at += 1
                if at == len(acquired):
                    return
            first, _, delivery_count = acquired[at]
            if offset >= first:
                yield ConsumerRecord(
                    topic,
                    partition,
                    offset,
                    timestamp,
                    key,
                    value,
                    headers,
                    timestamp_type,
                    delivery_count,
                )
