"""`ShareConsumer` reads records as a member of a share group.

    with ShareConsumer(bootstrap_servers="localhost:9092", group_id="jobs") as consumer:
        consumer.subscribe(["jobs"])
        while True:
            for records in consumer.poll(1000).values():
                for record in records:
                    do(record)

Unlike in a consumer group, several members read one partition; a record is with one
member at a time. A record that a member gets is locked for
share.record.lock.duration.ms, and is delivered again unless the member acknowledges it
in this time:

- share.acknowledgement.mode=implicit: the next `poll`, or a commit, accepts all records
  that the last `poll` returned.
- share.acknowledgement.mode=explicit: `acknowledge` says of each record whether it is
  accepted, released to be delivered again, or rejected; `poll` refuses to go on before.

`close` sends the acknowledgements that were made, and gives all other records back. The
group's config share.auto.offset.reset ("latest") says where a group begins to read;
`mpbroker config` changes it. One thread uses a share consumer, in the process that made
it; another may call `wakeup`.

Source: the API of Apache Kafka's KafkaShareConsumer; KIP-932, KIP-1222.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.backoff import hurry_if_interrupted
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.consumer_record import ConsumerRecord
from mpbroker.client.errors import (
    BrokerUnavailableError,
    ClientError,
    RequestTimeoutError,
    WakeupError,
)
from mpbroker.client.ownership import Ownership
from mpbroker.client.selector import monotonic_ms
from mpbroker.client.settings import settings_together
from mpbroker.client.share.share_consumer_config import ShareConsumerSettings
from mpbroker.client.share.share_fetcher import SharedRecords, ShareFetcher
from mpbroker.client.share.share_member import ShareMember
from mpbroker.client.share.share_session import SharePlace, ShareSession
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.share_acknowledge import AcknowledgeType

_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms
_MISSING_S: Final = 1.0  # before looking again for partitions without a leader
CLOSE_S: Final = 30.0  # Kafka's default timeout of close()

Acknowledged = Callable[[dict[TopicPartition, set[int]], MpbrokerError | None], None]
"""Called with the offsets whose acknowledgement has ended, and why if that failed."""


class ShareConsumer:
    """Reads and acknowledges records as a member of a share group.

    One thread uses a share consumer; any thread may call `wakeup`.
    """

    def __init__(
        self, config: Mapping[str, object] | None = None, **settings: object
    ) -> None:
        """Make a share consumer; it connects when a call needs a broker.

        Args:
            config: Kafka's settings by name, with dots or underscores.
            settings: more settings, as keyword arguments.

        Raises:
            ConfigError: a setting is wrong or missing; the text says which, and what to
                do.
            AddressError: bootstrap.servers cannot be read.
        """
        self._settings = ShareConsumerSettings.parse(
            settings_together(config, settings)
        )
        client = self._settings.client
        timeout_s = client.request_timeout_ms / 1000
        self._cluster = Cluster(client.bootstrap, timeout_s, client)
        self._member = ShareMember(
            client, self._settings.group, self._cluster.client.wakeup
        )
        self._wakeup = threading.Event()
        self._fetcher = ShareFetcher(
            self._cluster,
            self._settings.group.group_id,
            self._member.member_id,
            self._settings.fetch,
            self._check_wakeup,
        )
        self._topics: list[str] = []
        # The assignment whose leaders were looked up last, and the time (by the
        # monotonic clock, in s) to look them up again.
        self._followed: Mapping[bytes, object] = {}
        self._look_at = float("inf")
        # The records that poll() has returned and that are not acknowledged yet, by
        # partition and offset.
        self._held: dict[
            TopicPartition, dict[int, tuple[ShareSession, SharePlace]]
        ] = {}
        # The same for records whose lock is being renewed.
        self._renewed: dict[
            TopicPartition, dict[int, tuple[ShareSession, SharePlace]]
        ] = {}
        self._callback: Acknowledged | None = None
        self._ownership = Ownership("share consumer")

    # -- the group ---------------------------------------------------------------------

    def subscribe(self, topics: Iterable[str]) -> None:
        """Read topics together with the other members of the group.

        Args:
            topics: the topics to read, instead of those before.
        """
        self._ownership.check()
        names = [topics] if isinstance(topics, str) else list(dict.fromkeys(topics))
        if not names:
            self.unsubscribe()
            return
        self._topics = names
        self._member.subscribe(names)

    def subscription(self) -> set[str]:
        """Return the topics that this consumer has subscribed to."""
        return set(self._topics)

    def unsubscribe(self) -> None:
        """Leave the group; give back the records that are not acknowledged."""
        self._ownership.check()
        self._topics = []
        self._give_back(CLOSE_S)
        self._member.leave()

    def _give_back(self, timeout_s: float) -> None:
        """Send the acknowledgements that were made, and end all share sessions.

        The brokers then release all other records that this consumer has.
        """
        try:
            deadline_ms = monotonic_ms() + timeout_s * 1000
            self._fetcher.end_sessions(min(deadline_ms, self._cluster.end_by_ms))
        finally:
            self._held.clear()
            self._renewed.clear()
            self._fetcher.lead({})
            self._followed = {}
            self._tell()

    def _follow(self) -> None:
        """Fetch the partitions that the group assigns now, from their leaders."""
        assignment = self._member.assignment
        if (
            assignment is self._followed
            and not self._fetcher.is_outdated
            and time.monotonic() < self._look_at
        ):
            return
        leaders: dict[int, list[SharePlace]] = {}
        found = 0
        for topic in self._cluster.metadata(self._topics).topics if assignment else ():
            topic_id = bytes(topic.topic_id)
            wanted = set(assignment.get(topic_id, ()))
            for row in topic.partitions:
                if row.partition_index in wanted and self._cluster.is_named(
                    row.leader_id
                ):
                    where = TopicPartition(topic.name or "", row.partition_index)
                    place = SharePlace(topic_id, where)
                    leaders.setdefault(row.leader_id, []).append(place)
                    found += 1
        self._fetcher.lead(leaders)
        self._followed = assignment
        is_whole = found == sum(map(len, assignment.values()))
        max_age_s = self._settings.client.metadata_max_age_ms / 1000
        wait_s = max_age_s if is_whole else min(_MISSING_S, max_age_s)
        self._look_at = time.monotonic() + wait_s

    # -- reading -----------------------------------------------------------------------

    def poll(self, timeout_ms: float = 0) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Return records by partition, as soon as there are some.

        With share.acknowledgement.mode=implicit this accepts the records of the last
        `poll`.

        Args:
            timeout_ms: return without records after this time. It may take longer: up
                to request.timeout.ms while the group's coordinator does not answer.

        Raises:
            ClientError: no topic is subscribed to; or records of the last `poll` are
                not acknowledged, and share.acknowledgement.mode=explicit.
            WakeupError: another thread has called `wakeup`.
            ApiError: a broker refused; the text says why.
            ProtocolError: records cannot be read; they are rejected.
            UnsupportedVersionError: the broker has no share groups.
            AuthenticationError: a login or a certificate was refused.
            BrokerUnavailableError: no broker answers; the next poll tries again.
        """
        self._ownership.check()
        if not self._topics:
            raise ClientError("no topic is subscribed to; call subscribe()")
        if self._settings.is_explicit:
            self._check_acknowledged()
        else:
            self._accept_all()
        deadline = time.monotonic() + timeout_ms / 1000
        try:
            while True:
                found = self._turn(deadline)
                if found or time.monotonic() >= deadline:
                    return found
        finally:
            self._tell()

    def _turn(self, deadline: float) -> dict[TopicPartition, list[ConsumerRecord]]:
        self._check_wakeup()
        try:
            self._member.keep()
            self._follow()
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            return self._hold(self._fetcher.fetch(monotonic_ms() + left_ms))
        except BrokerUnavailableError:
            left_s = deadline - time.monotonic()
            if left_s < _RETRY_INTERVAL_S:  # there is no time to try again
                raise
        except ApiError as error:
            left_s = deadline - time.monotonic()
            if not error.error_code.retriable:
                raise
        self._wakeup.wait(max(0.0, min(left_s, _RETRY_INTERVAL_S)))
        return {}

    def _hold(
        self, found: list[SharedRecords]
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        returned: dict[TopicPartition, list[ConsumerRecord]] = {}
        for session, place, records in found:
            if session.is_lost:
                continue  # the broker delivers them again
            held = self._held.setdefault(place.where, {})
            owner = session, place
            held.update((record.offset, owner) for record in records)
            returned.setdefault(place.where, []).extend(records)
        return returned

    def wakeup(self) -> None:
        """End the `poll` or commit that runs now, or the next one, with WakeupError.

        Any thread may call.
        """
        self._wakeup.set()
        self._cluster.client.wakeup()

    def _check_wakeup(self) -> None:
        if self._wakeup.is_set():
            self._wakeup.clear()
            raise WakeupError("woken up by wakeup()")

    # -- acknowledgements --------------------------------------------------------------

    def acknowledge(
        self,
        record: ConsumerRecord | tuple[str, int, int],
        type: AcknowledgeType = AcknowledgeType.ACCEPT,
    ) -> None:
        """Say what becomes of a record that `poll` returned; the last call counts.

        The acknowledgement is sent with the next `poll` or commit.

        Args:
            record: the record, or its topic, partition and offset.
            type: ACCEPT: the record is done. RELEASE: deliver it again, to any member.
                REJECT: do not deliver it any more. RENEW: this consumer keeps the
                record, and its lock begins anew when the broker has the
                acknowledgement. Acknowledge it again later; `poll` may be called before
                that.

        Raises:
            ClientError: share.acknowledgement.mode is implicit, or this consumer does
                not have the record (any more).
        """
        self._ownership.check()
        if not self._settings.is_explicit:
            raise ClientError(
                "records are accepted implicitly; set"
                " share.acknowledgement.mode=explicit to acknowledge each"
            )
        kind = AcknowledgeType(type)
        if kind == AcknowledgeType.GAP:
            raise ClientError("GAP is not for records; use ACCEPT, RELEASE or REJECT")
        topic, partition, offset = record[:3]
        where = TopicPartition(topic, partition)
        owner = self._held.get(where, {}).get(offset)
        owner = owner or self._renewed.get(where, {}).get(offset)
        if owner is None:
            raise ClientError(
                f"offset {offset} of {where} is not this consumer's: it was not"
                " returned by poll(), or its acknowledgement was sent"
            )
        session, place = owner
        if kind == AcknowledgeType.RENEW:
            self._renewed.setdefault(where, {})[offset] = owner
            self._held.get(where, {}).pop(offset, None)
        self._fetcher.give(session, place, offset, kind)

    def _check_acknowledged(self) -> None:
        self._drop_given()
        for where, held in self._held.items():
            # The records of a lost session are delivered again, acknowledged or not.
            left = [offset for offset, (session, _) in held.items() if session.is_open]
            if left:
                raise ClientError(
                    f"{len(left)} records of {where} are not acknowledged, the first"
                    f" at offset {min(left)}; acknowledge all before the next poll()"
                )
        self._held.clear()

    def _drop_given(self) -> None:
        """Forget the records that the user has acknowledged, except by RENEW."""
        for owners in (self._held, self._renewed):
            for where, held in list(owners.items()):
                for offset, (session, place) in list(held.items()):
                    kind = session.given.get(place, {}).get(offset)
                    if kind is not None and kind != AcknowledgeType.RENEW:
                        del held[offset]
                if not held:
                    del owners[where]

    def _accept_all(self) -> None:
        held, self._held = self._held, {}
        for offsets in held.values():
            for offset, (session, place) in offsets.items():
                self._fetcher.give(session, place, offset, AcknowledgeType.ACCEPT)

    def commit_sync(
        self, timeout_ms: float | None = None
    ) -> dict[TopicPartition, MpbrokerError | None]:
        """Send the acknowledgements, and wait until the broker has written them.

        With share.acknowledgement.mode=implicit this accepts the records of the last
        `poll`.

        Args:
            timeout_ms: the longest wait, in ms; None: request.timeout.ms.

        Returns:
            For each partition None, or the error with which its acknowledgements have
            failed; then their records are delivered again.

        Raises:
            RequestTimeoutError: brokers have not answered in time.
            WakeupError: another thread has called `wakeup`.
        """
        self._ownership.check()
        if timeout_ms is None:
            timeout_ms = self._settings.client.request_timeout_ms
        self._prepare_commit()
        is_done = False
        try:
            is_done = self._fetcher.commit(monotonic_ms() + timeout_ms)
        finally:
            results = self._tell()
        if not is_done:
            raise RequestTimeoutError(
                f"acknowledgements were not answered in {timeout_ms:g} ms"
            )
        return results

    def commit_async(self) -> None:
        """Send the acknowledgements without waiting for the responses.

        The function of `set_acknowledgement_commit_callback` gets the results. An
        acknowledgement that cannot be sent at once goes with the next `poll`.
        """
        self._ownership.check()
        self._prepare_commit()
        try:
            self._fetcher.commit(monotonic_ms())
        finally:
            self._tell()

    def _prepare_commit(self) -> None:
        if self._settings.is_explicit:
            self._drop_given()
        else:
            self._accept_all()

    def set_acknowledgement_commit_callback(
        self, callback: Acknowledged | None
    ) -> None:
        """Set the callback for acknowledgements that have succeeded or failed.

        `poll`, commits and `close` call it.

        Args:
            callback: a function that gets the acknowledged offsets by partition, and
                their error or None; None: no callback.
        """
        self._callback = callback

    def _tell(self) -> dict[TopicPartition, MpbrokerError | None]:
        """Call the callback for acknowledgements that have ended; return their errors.

        The result has None for a partition whose acknowledgements have all succeeded.
        """
        results: dict[TopicPartition, MpbrokerError | None] = {}
        for where, offsets, error in self._fetcher.take_outcomes():
            results[where] = results.get(where) or error
            if self._callback is not None:
                self._callback({where: set(offsets)}, error)
        return results

    def acquisition_lock_timeout_ms(self) -> int | None:
        """Return how long records stay locked, in ms; None before the first record."""
        return self._fetcher.lock_timeout_ms

    def close(self, timeout: float = CLOSE_S) -> None:
        """Send the acknowledgements, give back other records, and leave the group.

        With share.acknowledgement.mode=implicit, the records of the last `poll` are
        given back, too; to accept them, call `commit_sync` before. A second call does
        nothing, and neither does a call in a forked child. After a KeyboardInterrupt
        meanwhile nothing is waited for any more.

        Args:
            timeout: the longest wait for brokers, in seconds, for all of this together.
        """
        if not self._ownership.close():
            return
        self._wakeup.clear()
        self._end_by(time.monotonic() + timeout)
        hurry = hurry_if_interrupted(self._end_by)
        with ExitStack() as stack:
            stack.callback(self._cluster.close)
            stack.callback(self._member.close)
            stack.push(hurry)
            self._give_back(min(timeout, self._cluster.timeout_s))

    def _end_by(self, end_s: float) -> None:
        self._cluster.end_by(end_s)
        self._member.end_by(end_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


__all__ = ["AcknowledgeType", "ShareConsumer"]
