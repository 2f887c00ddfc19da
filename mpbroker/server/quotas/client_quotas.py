"""Charge requests to client quotas, and throttle clients that exceed them.

    quota                      amount charged                    when
    producer_byte_rate         bytes of the request              after its execution
    consumer_byte_rate         bytes of the answer               before it is made
    request_percentage         ns that the handler or the        after its execution
                               coordinator and the processor
                               spent on the request
    controller_mutation_rate   partitions created or deleted     before the change

A client above a quota is answered at once, with the time that it should wait. For this
time its connection is muted (network/throttles.py, KIP-219). A fetch above a quota gets
no records, and is not charged for bytes. If several quotas are exceeded, the longest
time counts. request_percentage is relative to the time of one process; its throttle
time is never longer than one window.

The limits are in the metadata log, whose new records each handler reads before it
executes a request. The usage is in a table that all processes share. The processor's
time for one request is an estimated share of its total (network_costs.py). If a
handler is killed after it charged a request, the request is executed again and charged
twice.

Source: Kafka's ClientQuotaManager, ClientRequestQuotaManager, RequestHandlerHelper;
KIP-13, 55, 124, 219, 599.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.counters.network_costs import network_ns
from mpbroker.ipc.layout import (
    CONNECTION_MUTED_UNTIL,
    CONNECTION_PRINCIPAL,
    CONNECTION_SLOT,
    SLOT_DEQUEUED,
    SLOT_PARKED,
    SLOT_REQUEST_LENGTH,
    connection_row,
    is_request_of,
    slot_row,
)
from mpbroker.ipc.tables.quota_table import GONE, QuotaKind, QuotaRow, QuotaTable
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.server.request import CLOSE, FORWARDED, NO_RESPONSE, Deferred, Request

if TYPE_CHECKING:
    from mpbroker.ipc.response_parts import FilePart
    from mpbroker.metadata.topics import TopicRegistry

_LOG = get_logger(__name__)

KEYS: Final = {
    QuotaKind.PRODUCE: "producer_byte_rate",
    QuotaKind.FETCH: "consumer_byte_rate",
    QuotaKind.REQUEST: "request_percentage",
    QuotaKind.CONTROLLER_MUTATION: "controller_mutation_rate",
}
_OF_ANY_REQUEST: Final = (QuotaKind.PRODUCE, QuotaKind.FETCH, QuotaKind.REQUEST)
_PRODUCE: Final = int(ApiKey.PRODUCE)
_FETCH: Final = int(ApiKey.FETCH)
# Requests between brokers, and those that authenticate the client.
_EXEMPT: Final = frozenset(
    {
        int(ApiKey.WRITE_TXN_MARKERS),
        int(ApiKey.SASL_HANDSHAKE),
        int(ApiKey.SASL_AUTHENTICATE),
    }
)
_NUMBER: Final = Struct("=q")
_NS_PER_PERCENT: Final = 10_000_000  # of a process's second
_NS_PER_MS: Final = 1_000_000
_MAX_KNOWN: Final = 10_000
_NO_PRINCIPAL: Final = -1
_COMPLAIN_EVERY_NS: Final = 60_000_000_000

Limit = tuple[QuotaRow, float]


class ClientQuotas:
    """Charges requests to client quotas, and throttles clients, in one process.

    Args:
        table: the usage that all processes have counted.
        registry: has the limits.
        words: the control segment (shared memory of all processes), in 64-bit words.
        name: returns the principal that has a number (ipc/tables/principals.py).
        mutation_burst_s: a client may use controller_mutation_rate for this many
            seconds at once.
        now_ns: returns the time (CLOCK_MONOTONIC).
    """

    def __init__(
        self,
        table: QuotaTable,
        registry: TopicRegistry,
        words: memoryview,
        name: Callable[[int], str],
        *,
        mutation_burst_s: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._table = table
        self._image = registry.client_quotas
        self._words = words
        self._name = name
        self._burst_s = mutation_burst_s
        self._now_ns = now_ns
        self._changes = -1
        self._set: frozenset[QuotaKind] = frozenset()
        self._known: dict[tuple[QuotaKind, int, str | None], Limit | None] = {}
        self._complain_at = 0

    def is_set(self, kind: QuotaKind) -> bool:
        """Return whether any client has a quota of this kind."""
        if self._image.changes != self._changes:
            self._read_again()
        return kind in self._set

    @property
    def count_requests(self) -> bool:
        """Whether any client has a quota of bytes or of request time."""
        if self._image.changes != self._changes:
            self._read_again()
        return not self._set.isdisjoint(_OF_ANY_REQUEST)

    @property
    def limit_fetches(self) -> bool:
        """Whether any client has a quota that a fetch is charged to."""
        return self.is_set(QuotaKind.FETCH) or self.is_set(QuotaKind.REQUEST)

    # -- the short cut ---------------------------------------------------------------

    @property
    def table(self) -> tuple[memoryview, int, int]:
        """The memory of the table of clients' usage; its samples; a sample's ns."""
        return self._table.view, self._table.samples, self._table.window_ns

    def client_key(self, request: Request) -> bytes | None:
        """Return the key by which the compiled core (C code) knows a request's client.

        Returns:
            The principal's number (8 bytes, native-endian) and the client id in UTF-8.
            None if the client has disconnected.
        """
        number = self._principal(request)
        if number == _NO_PRINCIPAL:
            return None
        return _NUMBER.pack(number) + (request.client_id or "").encode()

    def limits(
        self, key: bytes, client_id: str | None
    ) -> tuple[int, int, float, int, int, float]:
        """Return where in the usage table a client's Produce requests are charged.

        Args:
            key: the client's `client_key`.
            client_id: the client id in that key.

        Returns:
            Row, generation and bound for producer_byte_rate (bytes/s), then for
            request_percentage (ns/s). A row of -1: the client has no such quota.
        """
        (number,) = _NUMBER.unpack_from(key)
        return *self._place(QuotaKind.PRODUCE, number, client_id), *self._place(
            QuotaKind.REQUEST, number, client_id
        )

    def _place(
        self, kind: QuotaKind, number: int, client_id: str | None
    ) -> tuple[int, int, float]:
        limit = self._limit_of(kind, number, client_id) if self.is_set(kind) else None
        if limit is None:
            return -1, 0, 0.0
        return limit[0].row, limit[0].generation, limit[1]

    def _read_again(self) -> None:
        self._changes = self._image.changes
        self._known.clear()
        keys = {key for values in self._image.entities.values() for key in values}
        self._set = frozenset(kind for kind, key in KEYS.items() if key in keys)

    # -- what a request costs ------------------------------------------------------

    def settle(
        self, request: Request, answer: bytes | list[bytes | FilePart] | Deferred
    ) -> bytes | list[bytes | FilePart] | Deferred:
        """Charge an executed request, and return its answer with the throttle time.

        A fetch has been charged before, and the coordinator charges a forwarded
        request. If the answer is CLOSE, nothing is charged.
        """
        if self._image.changes != self._changes:
            self._read_again()
        if (
            self._set
            and answer is not CLOSE
            and answer is not FORWARDED
            and request.api_key != _FETCH  # charged by charge_fetch()
        ):
            if request.api_key == _PRODUCE:
                length = self._words[slot_row(request.slot) + SLOT_REQUEST_LENGTH]
                self._charge_and_mute(QuotaKind.PRODUCE, request, length)
            if request.api_key not in _EXEMPT and answer is not NO_RESPONSE:
                length = len(answer) if isinstance(answer, bytes) else 0
                self._charge_and_mute(
                    QuotaKind.REQUEST, request, self._time(request, length)
                )
        if request.throttle_ms and isinstance(answer, bytes):
            return with_throttle(request, answer)
        return answer

    def charge_time(self, request: Request, spent_ns: int) -> None:
        """Charge a request for time; mute its client if that is above the quota.

        To be called in the coordinator, before the request is answered.

        Args:
            request: the request.
            spent_ns: the coordinator's time. The processor's time is added.
        """
        if self.is_set(QuotaKind.REQUEST) and request.api_key not in _EXEMPT:
            spent_ns += self._network_time(request, 0)
            self._charge_and_mute(QuotaKind.REQUEST, request, spent_ns)

    def _network_time(self, request: Request, answer_length: int) -> int:
        length = self._words[slot_row(request.slot) + SLOT_REQUEST_LENGTH]
        return network_ns(self._words, request.slot, length + answer_length)

    def _time(self, request: Request, answer_length: int) -> int:
        """Return the ns that this process and the network process spend on a request.

        The time in which a request is parked does not count.
        """
        row = slot_row(request.slot)
        begun, parked = self._words[row + SLOT_DEQUEUED], self._words[row + SLOT_PARKED]
        end = parked if parked > begun else self._now_ns()
        return max(0, end - begun) + self._network_time(request, answer_length)

    def _charge_and_mute(self, kind: QuotaKind, request: Request, amount: int) -> None:
        throttle_ms = self.charge(kind, request, amount)
        if throttle_ms > request.throttle_ms:
            self.mute(request, throttle_ms)

    def charge(self, kind: QuotaKind, request: Request, amount: int) -> int:
        """Charge an amount to a client; return its throttle time in ms.

        Return 0 if the client is within its quota, or has none.

        Args:
            kind: the quota.
            request: a request of the client.
            amount: bytes or ns; negative to give a charge back.
        """
        limit = self._limit(kind, request) if self.is_set(kind) else None
        if limit is None:
            return 0
        throttle_ms = limit[0].charge(amount, limit[1], self._now_ns())
        if throttle_ms == GONE:
            self._known.clear()
            limit = self._limit(kind, request)
            if limit is None:
                return 0
            throttle_ms = limit[0].charge(amount, limit[1], self._now_ns())
        if kind == QuotaKind.REQUEST:
            throttle_ms = min(throttle_ms, self._table.window_ns // _NS_PER_MS)
        return max(0, throttle_ms)

    def mute(self, request: Request, throttle_ms: int) -> None:
        """Mute the connection of a request's client for a time.

        To be called before the request is answered. Do nothing to the connection if the
        client has disconnected.
        """
        request.throttle_ms = throttle_ms
        row = connection_row(request.connection)
        if not is_request_of(self._words, row, request.slot):
            return  # disconnected: the row may belong to another client by now
        until = self._now_ns() + throttle_ms * _NS_PER_MS
        self._words[row + CONNECTION_MUTED_UNTIL] = until

    # -- fetches -------------------------------------------------------------------

    def fetch_window(self, request: Request) -> int | None:
        """Return how many bytes a client may fetch in all full windows together.

        Return None if the client has no consumer_byte_rate.
        """
        if not self.is_set(QuotaKind.FETCH):
            return None
        limit = self._limit(QuotaKind.FETCH, request)
        if limit is None:
            return None
        full_windows_s = (self._table.samples - 1) * self._table.window_ns / 1e9
        return int(min(limit[1] * full_windows_s, 2**31 - 1))

    def charge_fetch(self, request: Request, records_bytes: int) -> bool:
        """Charge a fetch before it is answered; return whether it may have its records.

        If it may not, the charge for the bytes is given back, and the client is muted.

        Args:
            request: the fetch.
            records_bytes: the bytes of the records that were found.
        """
        if self._image.changes != self._changes:
            self._read_again()
        if not self._set:
            return True
        bytes_ms = self.charge(QuotaKind.FETCH, request, records_bytes)
        spent_ns = self._time(request, records_bytes)
        time_ms = self.charge(QuotaKind.REQUEST, request, spent_ns)
        throttle_ms = max(bytes_ms, time_ms)
        if not throttle_ms:
            return True
        self.charge(QuotaKind.FETCH, request, -records_bytes)
        self.mute(request, throttle_ms)
        return False

    def charge_rest_of_fetch(
        self, request: Request, parts: Sequence[bytes | FilePart], charged: int
    ) -> None:
        """Charge the bytes of a fetch's answer that were not charged before.

        These are headers and field lengths. To charge them never throttles the request.

        Args:
            request: the fetch.
            parts: the answer.
            charged: the bytes that were charged before.
        """
        if QuotaKind.FETCH in self._set:
            length = sum(
                len(part) if isinstance(part, bytes) else part.length for part in parts
            )
            self.charge(QuotaKind.FETCH, request, length - charged)

    # -- changes of topics ---------------------------------------------------------

    def permit(
        self, request: Request, strict_since: int
    ) -> Callable[[int], None] | None:
        """Return a function to call before a request changes topics.

        The function takes the number of partitions to be created or deleted. It raises
        ApiError (THROTTLING_QUOTA_EXCEEDED) if the quota does not allow them now.

        Args:
            strict_since: the first version of the API that has this error. For older
                versions the function never raises: the change is made, and the
                connection is muted.

        Returns:
            The function; None: the client has no controller_mutation_rate.
        """
        kind = QuotaKind.CONTROLLER_MUTATION
        limit = self._limit(kind, request) if self.is_set(kind) else None
        if limit is None:
            return None

        return partial(
            self._take_partitions, request, request.api_version >= strict_since
        )

    def _take_partitions(self, request: Request, strict: bool, partitions: int) -> None:
        """Charge partitions that a request is about to create or delete.

        Args:
            request: the request.
            strict: whether to refuse the change while the client is above its quota. If
                False, the change is charged, and the throttle time grows.
            partitions: how many partitions are to be created or deleted.

        Raises:
            ApiError: THROTTLING_QUOTA_EXCEEDED: the change must not be made now.

        Source: Kafka's StrictControllerMutationQuota and
        PermissiveControllerMutationQuota.
        """
        taken, throttle_ms = True, GONE
        for _ in range(2):
            limit = self._limit(QuotaKind.CONTROLLER_MUTATION, request)
            if limit is None:
                return  # the table has no room for the client
            row, bound = limit
            taken, throttle_ms = row.mutate(
                partitions, bound, bound * self._burst_s, self._now_ns(), strict=strict
            )
            if throttle_ms != GONE:
                break
            self._known.clear()  # the row is another client's now: find the new one
        if throttle_ms > request.throttle_ms:
            self.mute(request, throttle_ms)
        if not taken:
            raise ApiError(
                ErrorCode.THROTTLING_QUOTA_EXCEEDED,
                "The throttling quota has been exceeded.",
            )

    # -- the client of a request and its quota --------------------------------------

    def _principal(self, request: Request) -> int:
        """Return the number of the sender's principal; _NO_PRINCIPAL if not known.

        If a connection closes while its request is executed, its row (entry in shared
        memory) keeps the number until another connection takes the row. The row then
        has the request's slot as a negative number.
        """
        words, row = self._words, connection_row(request.connection)
        number: int = words[row + CONNECTION_PRINCIPAL]
        # Read the slot after the number: the slot is cleared before the row gets the
        # number of another connection, so the number is the sender's if the slot is.
        if words[row + CONNECTION_SLOT] == -(request.slot + 1):
            return number
        if is_request_of(words, row, request.slot):
            return number
        return _NO_PRINCIPAL

    def _limit(self, kind: QuotaKind, request: Request) -> Limit | None:
        number = self._principal(request)
        if number == _NO_PRINCIPAL:
            return None
        return self._limit_of(kind, number, request.client_id)

    def _limit_of(
        self, kind: QuotaKind, number: int, client_id: str | None
    ) -> Limit | None:
        place = (kind, number, client_id)
        try:
            limit = self._known[place]
        except KeyError:
            limit = self._find(kind, number, client_id or "")
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[place] = limit
        return limit

    def _find(self, kind: QuotaKind, number: int, client_id: str) -> Limit | None:
        # Imported here, since most brokers have no quotas.
        from mpbroker.server.quotas.quota_policy import quota_of

        user = self._name(number).partition(":")[2]
        quota = quota_of(self._image, KEYS[kind], user, client_id)
        if quota is None:
            return None
        now = self._now_ns()
        row = self._table.find(kind, quota.user, quota.client_id, now)
        if row is None:
            if now >= self._complain_at:
                self._complain_at = now + _COMPLAIN_EVERY_NS
                _LOG.warning(
                    "user %r, client id %r: its %s is not enforced, since too many"
                    " clients have a quota of their own at once; give quotas to users"
                    " rather than to client ids",
                    user,
                    client_id,
                    KEYS[kind],
                )
            return None
        bound = quota.bound
        if kind == QuotaKind.REQUEST:
            bound *= _NS_PER_PERCENT
        return row, bound


def with_throttle(request: Request, body: bytes) -> bytes:
    """Return an answer's body with the request's throttle time.

    Return the body unchanged if the time is 0, or the version has no field for it.
    """
    if not request.throttle_ms:
        return body
    # Decodes and encodes the answer once more; only throttled requests come here.
    from mpbroker.server.api_messages import with_throttle_time

    return with_throttle_time(
        request.api_key, request.api_version, body, request.throttle_ms
    )
