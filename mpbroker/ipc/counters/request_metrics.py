"""Request metrics: times and sizes by API, in words that outlive the counting process.

When a processor has sent the last byte of an answer, all time stamps of the request are
in its slot. The processor adds the times between them to histograms of its own, and its
successors continue with these; a reader adds up the histograms of all processors. So
no counter decreases when a process dies, retires or is replaced. A request whose answer
was not sent completely is not counted.

    received  dequeued    parked     completed       taken     sent
       |--queue--|--local--|--remote--|--response--queue--|--send--|
       |---------------------------- total ----------------------|

A request that did not have to wait has no remote time. A histogram has one word for
each bucket, and one for the sum. Bucket n has the times below 2**(HISTOGRAM_SHIFT + n)
ns; the last bucket has no upper bound. The sum is the last store: if the processor is
killed before it, counts and sum differ by one request.

The twin of ``record`` is in native/ipc/request_metrics.c.

Source: Kafka's RequestChannel.Request.updateRequestMetrics.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from mpbroker.ipc.layout import (
    API_HISTOGRAMS,
    API_REQUEST_BYTES,
    API_RESPONSE_BYTES,
    API_ROW_WORDS,
    API_ROWS,
    API_STAGES,
    API_TABLES,
    API_VERSIONS,
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
    SLOT_PARKED,
    SLOT_RECEIVED,
    SLOT_REQUEST_OFFSET,
    SLOT_RESPONSE_LENGTH,
    SLOT_TAKEN,
    SLOT_WORDS,
    SLOTS,
)
from mpbroker.ipc.segment import Segment

_SIZE_BYTES: Final = 4
_SHORTEST_HEADER: Final = 8
_NO_API: Final = API_ROWS - 1
_LAST_VERSION: Final = API_VERSIONS - 1
_LAST_BUCKET: Final = HISTOGRAM_BUCKETS - 1
_SLOT: Final = Struct(f"{SLOT_WORDS}q")
# The bucket of a time, by the length of the time in bits.
_BUCKETS: Final = tuple(
    min(max(0, bits - HISTOGRAM_SHIFT), _LAST_BUCKET) for bits in range(65)
)


class Stage(IntEnum):
    """The histograms of an API, in this order."""

    QUEUE = 0
    LOCAL = 1
    REMOTE = 2
    RESPONSE_QUEUE = 3
    SEND = 4
    TOTAL = 5


class LoggedRequest(NamedTuple):
    """One request of a request log: the words of an entry, in this order."""

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


class Histogram(NamedTuple):
    """Counts by bucket, and the sum in ns."""

    counts: list[int]
    sum_ns: int


def bucket_of(ns: int) -> int:
    """Return the bucket of a time."""
    return _BUCKETS[ns.bit_length()]


def bounds_s() -> list[float]:
    """Return the upper bound of each bucket except the last, in seconds."""
    return [(1 << (HISTOGRAM_SHIFT + n)) / 1e9 for n in range(_LAST_BUCKET)]


class RequestMetrics:
    """One processor's histograms and log. Only this processor writes them."""

    def __init__(self, processor: int, control: Segment, arena: Segment) -> None:
        self._words = control.words
        self._bytes = control.view
        self._arena = arena.view
        self._table = API_TABLES + processor * API_ROWS * API_ROW_WORDS
        self._log = REQUEST_LOGS + processor * LOG_WORDS

    def taken(self, slot: int, now_ns: int) -> None:
        """Note when the processor took the answer; it may take a while to send it."""
        self._words[SLOTS + slot * SLOT_WORDS + SLOT_TAKEN] = now_ns

    def record(self, slot: int, sent: int) -> None:
        """Count a slot's request, after its answer was sent completely at ``sent`` ns.

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
            )

    def _log_request(
        self,
        key: int,
        head: bytes,
        connection: int,
        times: tuple[int, ...],
        sizes: tuple[int, int],
    ) -> None:
        words = self._words
        noted = words[self._log + LOG_NOTED]
        at = self._log + LOG_FIRST + noted % LOG_ENTRIES * LOG_ENTRY_WORDS
        version = int.from_bytes(head[2:4], "big", signed=True)
        correlation_id = int.from_bytes(head[4:8], "big", signed=True)
        words[at] = 0  # the entry is incomplete from here on
        fields = (key, version, correlation_id, connection, *times, *sizes)
        for number, value in enumerate(fields, 1):
            words[at + number] = value
        words[at] = noted + 1
        words[self._log + LOG_NOTED] = noted + 1


def read_logged(
    words: memoryview, processor: int, first: int
) -> tuple[list[LoggedRequest], int, int]:
    """Read a processor's log from entry ``first`` on.

    Returns:
        The requests; how many were overwritten before we read them; the entry to
        continue from.
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
    """Set the total time from which requests are logged; None: log no requests."""
    words[METRICS + METRICS_LOG_ABOVE] = 0 if ns is None else ns + 1


class ApiMetrics(NamedTuple):
    """The counts of all processors for one API."""

    request_bytes: int
    response_bytes: int
    stages: list[Histogram]
    versions: dict[int, int]  # requests by version

    @property
    def requests(self) -> int:
        return sum(self.stages[Stage.TOTAL].counts)


def read_apis(words: memoryview, processors: range) -> dict[int, ApiMetrics]:
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
