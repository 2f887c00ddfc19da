"""Request metrics: times and sizes by API, in words that outlive the counting process.

When a processor has sent the last byte of an answer, all time stamps of the request are
in its slot, its entry in shared memory. The processor adds the times between them to
histograms of its own, and its successors continue with these; a reader adds up the
histograms of all processors. So no counter decreases when a process dies, retires or is
replaced. A request whose answer was not sent completely is not counted.

    received  dequeued    parked     completed       taken     sent
       |--queue--|--local--|--remote--|--response--queue--|--send--|
       |---------------------------- total ----------------------|

A request that did not have to wait has no remote time. A histogram has one word for
each bucket, and one for the sum. Bucket n has the times below 2**(HISTOGRAM_SHIFT + n)
ns; the last bucket has no upper bound. The sum is the last store: if the processor is
killed before it, counts and sum differ by one request.

The C code that does the same as ``record`` is in native/ipc/request_metrics.c.

Source: Kafka's RequestChannel.Request.updateRequestMetrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import (
    API_HISTOGRAMS,
    API_REQUEST_BYTES,
    API_RESPONSE_BYTES,
    API_ROW_WORDS,
    API_ROWS,
    API_STAGES,
    API_TABLES,
    API_VERSIONS,
    CONNECTION_LISTENER,
    CONNECTION_MUTED_UNTIL,
    CONNECTION_PRINCIPAL,
    HISTOGRAM_BUCKETS,
    HISTOGRAM_SHIFT,
    HISTOGRAM_WORDS,
    LOG_ENTRIES,
    LOG_ENTRY_WORDS,
    LOG_FIRST,
    LOG_NOTED,
    LOG_WORDS,
    METRICS,
    METRICS_LOG_ABOVE,
    REQUEST_LOGS,
    SLOT_COMPLETED,
    SLOT_CONNECTION,
    SLOT_DEQUEUED,
    SLOT_ERROR,
    SLOT_ERROR_OF,
    SLOT_PARKED,
    SLOT_RECEIVED,
    SLOT_REQUEST_OFFSET,
    SLOT_RESPONSE_LENGTH,
    SLOT_TAKEN,
    SLOT_WORDS,
    SLOTS,
    connection_row,
)
from mpbroker.ipc.segment import Segment

_SIZE_BYTES: Final = 4
_SHORTEST_HEADER: Final = 8
_NS_PER_MS: Final = 1_000_000
# Enough for a header, a transactional id and a topic's name, all of usual lengths.
_HEAD_BYTES: Final = 1024
_PRODUCE: Final = 0
_FLEXIBLE_SINCE: Final = {_PRODUCE: 9, 1: 12}
_TOPIC_IDS_SINCE: Final = 13  # of both
_NO_API: Final = API_ROWS - 1
_LAST_VERSION: Final = API_VERSIONS - 1
_LAST_BUCKET: Final = HISTOGRAM_BUCKETS - 1
_SLOT: Final = Struct(f"{SLOT_WORDS}q")
# The bucket of a time, by the length of the time in bits.
_BUCKETS: Final = tuple(
    min(max(0, bits - HISTOGRAM_SHIFT), _LAST_BUCKET) for bits in range(65)
)


class Stage(IntEnum):
    """The stages of a request, in the order in which an API has histograms of them."""

    QUEUE = 0
    LOCAL = 1
    REMOTE = 2
    RESPONSE_QUEUE = 3
    SEND = 4
    TOTAL = 5


class LoggedRequest(NamedTuple):
    """A request that a processor has noted for the request log.

    The fields are the words of an entry, in this order.
    """

    number: int  # running number among the processor's logged requests, from 1 on
    api_key: int
    api_version: int
    correlation_id: int
    connection: int
    received_ns: int
    dequeued_ns: int
    parked_ns: int
    completed_ns: int
    taken_ns: int
    sent_ns: int
    request_bytes: int
    response_bytes: int
    principal: int  # its number in the table of principals
    notes: (
        int  # bits 0-15 error code + 2, 16-31 listener, from 32 on throttle time (ms)
    )
    topic: int  # topic_hash() of a Produce's or Fetch's first topic; 0: none

    @property
    def error_code(self) -> int | None:
        """The code of an error in the answer; None: there was none."""
        return (self.notes & 0xFFFF) - 2 if self.notes & 0xFFFF else None

    @property
    def listener(self) -> int:
        return self.notes >> 16 & 0xFFFF

    @property
    def throttle_ms(self) -> int:
        return self.notes >> 32


class Histogram(NamedTuple):
    """A histogram of times: the count of each bucket, and the sum of times in ns."""

    counts: list[int]
    sum_ns: int


def topic_hash(name_or_id: bytes) -> int:
    """Return a 63-bit hash (FNV-1a) of a topic's name or id, for the request log."""
    found = 0xCBF29CE484222325
    for byte in name_or_id:
        found = (found ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return found >> 1


def first_topic(request: bytes | memoryview, length: int) -> int:
    """Return ``topic_hash`` of the first topic of a Produce or a Fetch; 0: none.

    Args:
        request: the first bytes of a request, without its size.
        length: the length of the whole request without its size, in bytes.
    """
    request = bytes(request[:length])
    key, version = int.from_bytes(request[:2], "big"), request[3] if request[3:] else 0
    if key not in _FLEXIBLE_SINCE or request[2:3] != b"\0":
        return 0
    is_flexible = version >= _FLEXIBLE_SINCE[key]
    try:
        at = 10 + max(0, int.from_bytes(request[8:10], "big", signed=True))
        if is_flexible:
            if request[at]:
                return 0  # tagged fields
            at += 1
        if key == _PRODUCE:
            size, at = _text_length(request, at, is_flexible=is_flexible)
            at += max(0, size) + 6
        else:
            at += (0 if version >= 15 else 4) + 8
            at += (4 if version >= 3 else 0) + (1 if version >= 4 else 0)
            at += 8 if version >= 7 else 0
        if is_flexible:
            count, at = _unsigned_varint(request, at)
            count -= 1
        else:
            count = int.from_bytes(request[at : at + 4], "big", signed=True)
            at += 4
        if count < 1:
            return 0
        size = 16
        if version < _TOPIC_IDS_SINCE:
            size, at = _text_length(request, at, is_flexible=is_flexible)
    except IndexError:
        return 0
    if size < 1 or at + size > len(request):
        return 0
    return topic_hash(request[at : at + size])


def _text_length(request: bytes, at: int, *, is_flexible: bool) -> tuple[int, int]:
    if is_flexible:
        size, at = _unsigned_varint(request, at)
        return size - 1, at
    return int.from_bytes(request[at : at + 2], "big", signed=True), at + 2


def _unsigned_varint(request: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 35:
        byte = request[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
    raise IndexError


def bucket_of(ns: int) -> int:
    """Return the number of the histogram bucket for a time in ns."""
    return _BUCKETS[ns.bit_length()]


def bounds_s() -> list[float]:
    """Return the upper bound of each histogram bucket except the last, in seconds."""
    return [(1 << (HISTOGRAM_SHIFT + n)) / 1e9 for n in range(_LAST_BUCKET)]


class RequestMetrics:
    """One processor's histograms of request times, and its notes for the request log.

    Only this processor writes them.
    """

    def __init__(self, processor: int, control: Segment, arena: Segment) -> None:
        self._words = control.words
        self._bytes = control.view
        self._arena = arena.view
        self._table = API_TABLES + processor * API_ROWS * API_ROW_WORDS
        self._log = REQUEST_LOGS + processor * LOG_WORDS

    def taken(self, slot: int, now_ns: int) -> None:
        """Store when the processor took a request's answer, before it sends it."""
        self._words[SLOTS + slot * SLOT_WORDS + SLOT_TAKEN] = now_ns

    def record(self, slot: int, sent: int) -> None:
        """Count the request of a slot, whose answer was sent to its end at ``sent`` ns.

        To be called before the connection is unmuted, because this reads the first
        bytes of the request.
        """
        words, arena = self._words, self._arena
        row = _SLOT.unpack_from(self._bytes, (SLOTS + slot * SLOT_WORDS) * 8)
        offset, length, received = row[SLOT_REQUEST_OFFSET : SLOT_RECEIVED + 1]
        dequeued, completed = row[SLOT_DEQUEUED], row[SLOT_COMPLETED]
        parked, taken = row[SLOT_PARKED], row[SLOT_TAKEN]
        if not received <= dequeued <= completed <= taken <= sent:
            # Stamps may be missing if a successor finished a dead process's work.
            dequeued = max(dequeued, received)
            completed = max(completed, dequeued)
            taken = max(taken, completed)
            sent = max(sent, taken)
        if not dequeued <= parked <= completed:
            parked = completed
        key = _NO_API
        version = 0
        if (
            length >= _SHORTEST_HEADER
            and not arena[offset]
            and arena[offset + 1] < API_ROWS
        ):
            key = arena[offset + 1]
            version = arena[offset + 3]
            if arena[offset + 2] or version > _LAST_VERSION:
                version = _LAST_VERSION
        # As few operations as possible: they are much of a request's cost here.
        at = self._table + key * API_ROW_WORDS
        words[at + API_REQUEST_BYTES] += length + _SIZE_BYTES
        words[at + API_RESPONSE_BYTES] += row[SLOT_RESPONSE_LENGTH]
        at += API_HISTOGRAMS
        for ns in (
            dequeued - received,
            parked - dequeued,
            completed - parked,
            taken - completed,
            sent - taken,
            sent - received,
        ):
            words[at + _BUCKETS[ns.bit_length()]] += 1
            if ns:
                words[at + HISTOGRAM_BUCKETS] += ns
            at += HISTOGRAM_WORDS
        words[at + version] += 1
        above = words[METRICS + METRICS_LOG_ABOVE]
        if above and sent - received >= above - 1:
            self._log_request(
                key,
                bytes(arena[offset : offset + _SHORTEST_HEADER]),
                row[SLOT_CONNECTION],
                (received, dequeued, parked, completed, taken, sent),
                (length + _SIZE_BYTES, row[SLOT_RESPONSE_LENGTH]),
                (
                    words[connection_row(row[SLOT_CONNECTION]) + CONNECTION_PRINCIPAL],
                    self._notes(row, completed),
                    first_topic(arena[offset : offset + _HEAD_BYTES], length),
                ),
            )

    def _notes(self, row: tuple[int, ...], completed: int) -> int:
        words, at = self._words, connection_row(row[SLOT_CONNECTION])
        error = row[SLOT_ERROR] if row[SLOT_ERROR_OF] == row[SLOT_RECEIVED] else 0
        muted_ns = words[at + CONNECTION_MUTED_UNTIL] - completed
        throttle_ms = -(-muted_ns // _NS_PER_MS) if muted_ns > 0 else 0
        listener = words[at + CONNECTION_LISTENER]
        return throttle_ms << 32 | (listener & 0xFFFF) << 16 | error & 0xFFFF

    def _log_request(
        self,
        key: int,
        head: bytes,
        connection: int,
        times: tuple[int, ...],
        sizes: tuple[int, int],
        notes: tuple[int, int, int],
    ) -> None:
        words = self._words
        noted = words[self._log + LOG_NOTED]
        at = self._log + LOG_FIRST + noted % LOG_ENTRIES * LOG_ENTRY_WORDS
        version = int.from_bytes(head[2:4], "big", signed=True)
        correlation_id = int.from_bytes(head[4:8], "big", signed=True)
        words[at] = 0  # the entry is incomplete from here on
        fields = (key, version, correlation_id, connection, *times, *sizes, *notes)
        for number, value in enumerate(fields, 1):
            words[at + number] = value
        words[at] = noted + 1
        words[self._log + LOG_NOTED] = noted + 1


def read_logged(
    words: memoryview, processor: int, first: int
) -> tuple[list[LoggedRequest], int, int]:
    """Read a processor's notes for the request log, from entry ``first`` on.

    Returns:
        The requests; the number of requests that were overwritten before they could be
        read; the entry to continue from.
    """
    log = REQUEST_LOGS + processor * LOG_WORDS
    noted = words[log + LOG_NOTED]
    start = max(first, noted - LOG_ENTRIES)
    found = []
    for number in range(start, noted):
        at = log + LOG_FIRST + number % LOG_ENTRIES * LOG_ENTRY_WORDS
        fields = words[at : at + len(LoggedRequest._fields)].tolist()
        if fields[0] == number + 1 == words[at]:
            found.append(LoggedRequest._make(fields))
    return found, noted - first - len(found), noted


def log_above(words: memoryview, ns: int | None) -> None:
    """Set the total time in ns from which requests are logged; None: log none."""
    words[METRICS + METRICS_LOG_ABOVE] = 0 if ns is None else ns + 1


class ApiMetrics(NamedTuple):
    """The counts of one API, added up over all processors."""

    request_bytes: int
    response_bytes: int
    stages: list[Histogram]
    versions: dict[int, int]  # requests by version

    @property
    def requests(self) -> int:
        return sum(self.stages[Stage.TOTAL].counts)


def read_apis(words: memoryview, processors: Sequence[int]) -> dict[int, ApiMetrics]:
    """Add up, by API key, the counts of these processors and of their predecessors."""
    found = {}
    for key in range(API_ROWS):
        total = [0] * API_ROW_WORDS
        for processor in processors:
            at = API_TABLES + (processor * API_ROWS + key) * API_ROW_WORDS
            if words[at + API_REQUEST_BYTES]:
                row = words[at : at + API_ROW_WORDS].tolist()
                total = [a + b for a, b in zip(total, row, strict=True)]
        if total[API_REQUEST_BYTES]:
            found[key] = ApiMetrics(
                total[API_REQUEST_BYTES],
                total[API_RESPONSE_BYTES],
                [_histogram(total, stage) for stage in range(API_STAGES)],
                {
                    version: count
                    for version, count in enumerate(total[-API_VERSIONS:])
                    if count
                },
            )
    return found


def _histogram(row: list[int], stage: int) -> Histogram:
    start = API_HISTOGRAMS + stage * HISTOGRAM_WORDS
    end = start + HISTOGRAM_BUCKETS
    return Histogram(row[start:end], row[end])
