"""What requests cost, by API, in words that outlive whoever wrote them.

The processor that has sent an answer's last byte knows all of a request's time stamps:
they are in its slot. It adds the times between them to histograms of its own, which
its successors go on with; a reader adds up those of all processors. So nothing runs
backwards when a process dies, retires or is replaced. A request that nobody got an
answer to is not counted.

    received  dequeued    parked     completed       taken     sent
       |--queue--|--local--|--remote--|--response--queue--|--send--|
       |---------------------------- total ----------------------|

What did not have to wait has no remote time. A histogram is a word a bucket, and the
sum; bucket n ends below 2**(HISTOGRAM_SHIFT + n) ns, the last has no end. The sum is
the last store: killed before it, we are off by one request in one of the two.

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
# By the length of the time in bits.
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
    """One request of a request log: an entry's words, in this order."""

    number: int  # of the processor's requests that were logged, from 1 on
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
    """The bucket that a time belongs to."""
    return _BUCKETS[ns.bit_length()]


def bounds_s() -> list[float]:
    """The end of each bucket but the last, in seconds."""
    return [(1 << (HISTOGRAM_SHIFT + n)) / 1e9 for n in range(_LAST_BUCKET)]


class RequestMetrics:
    """One processor's histograms and log: its to write."""

    def __init__(self, processor: int, control: Segment, arena: Segment) -> None:
        self._words = control.words
        self._bytes = control.view
        self._arena = arena.view
        self._table = API_TABLES + processor * API_ROWS * API_ROW_WORDS
        self._log = REQUEST_LOGS + processor * LOG_WORDS

    def taken(self, slot: int, now_ns: int) -> None:
        """The answer has come; it may take a while to be sent."""
        self._words[SLOTS + slot * SLOT_WORDS + SLOT_TAKEN] = now_ns

    def record(self, slot: int, sent: int) -> None:
        """Count a slot's request, whose answer is out since ``sent`` ns.

        Before its connection is unmuted: the request's first bytes are looked at.
        """
        words, arena = self._words, self._arena
        row = _SLOT.unpack_from(self._bytes, (SLOTS + slot * SLOT_WORDS) * 8)
        offset, length, received = row[SLOT_REQUEST_OFFSET : SLOT_RECEIVED + 1]
        dequeued, completed = row[SLOT_DEQUEUED], row[SLOT_COMPLETED]
        parked, taken = row[SLOT_PARKED], row[SLOT_TAKEN]
        if not received <= dequeued <= completed <= taken <= sent:
            # Stamps may be missing: whoever resumes a dead one's work has not all.
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
        # The least of Python for all that: it is much of what a request costs here.
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
        words[at] = 0  # torn from here on
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
        The requests; how many were overwritten before we came; where to go on.
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
    """Have all requests logged that take so long in total; None: none at all."""
    words[METRICS + METRICS_LOG_ABOVE] = 0 if ns is None else ns + 1


class ApiMetrics(NamedTuple):
    """What all processors have counted of one API."""

    request_bytes: int
    response_bytes: int
    stages: list[Histogram]
    versions: dict[int, int]  # requests by version

    @property
    def requests(self) -> int:
        return sum(self.stages[Stage.TOTAL].counts)


def read_apis(words: memoryview, processors: range) -> dict[int, ApiMetrics]:
    """Add up what processors, the living and those before them, have counted."""
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
