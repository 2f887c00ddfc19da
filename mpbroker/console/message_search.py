"""Search the records of a partition for bytes.

Nearly all records have no match, so none is decoded to find that out. Bytes are looked
for in what was fetched, over many batches at once, and in each compressed batch once it
is decompressed. Only batches that have them are decoded, to learn whether a key or a
value has them.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from struct import Struct
from typing import Any, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.client.admin.topic_admin import EARLIEST
from mpbroker.client.cluster import Cluster
from mpbroker.console.message_pages import (
    MAX_DECOMPRESSED,
    Batch,
    Fetched,
    Look,
    Partition,
    fetch,
    row_of,
)
from mpbroker.console.page_server import WORKERS
from mpbroker.console.record_places import end_of_record, skipped_to
from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    CODEC_MASK,
    CONTROL_FLAG,
    LOG_OVERHEAD,
    MAGIC,
    parse_batch_header,
)
from mpbroker.protocol.records.record_batch import (
    Record,
    iter_payload,
    records_payload,
)

# With each fetch. Beside searches with 8 MiB a producer's p99 was 2.1 times the usual.
# With this and the nice value it was 1.2 times, at the same rate (two loaded cores).
_FETCH_BYTES: Final = 512 * 1024
_NICE: Final = 10
_SEARCH_S: Final = 0.5  # of work for one request; other users' requests come between
_MAX_FOUND: Final = 100
# The part of a batch's header that a search needs: base offset, batch length, magic,
# attributes, last offset delta. To read it takes 0.2 us, the whole header 1 us.
_HEADER: Final = Struct(">qi4xb4xhi")


def search_messages(
    cluster: Cluster,
    partition: Partition,
    offset: int,
    text: str,
    place: str,
    look: Look,
) -> dict[str, Any]:
    """Search a part of a partition for a text; return the records that have it.

    The result also has the offset from which to go on with the search, which may be
    within a batch.

    Args:
        cluster: the client, connected to the brokers.
        partition: the partition to search.
        offset: where to begin.
        text: the text; its UTF-8 bytes are looked for.
        place: "key" finds keys that equal the text, "value" values that contain it, and
            "any" keys or values that contain it.
        look: how to show keys and values.
    """
    deadline = time.monotonic() + _SEARCH_S
    needle = text.encode()
    at = max(offset, partition.offset_at(cluster, EARLIEST))
    scanned, rows = 0, list[dict[str, Any]]()
    while True:
        fetched = fetch(cluster, partition, at, _FETCH_BYTES)
        scan = scan_batches(fetched.records, needle, deadline)
        scanned += scan.size
        is_empty = fetched.is_empty
        at = max(at, scan.next_offset)
        until = 0.0
        for batch, record in _found(fetched, scan, needle):
            if _matches(record, needle, place):
                rows.append(row_of(batch, record, look))
            now = time.monotonic()
            # The way to the first record, over those before it, is to be worth it: the
            # next request, which begins in the same batch, takes it again.
            until = until or max(deadline, now + _SEARCH_S)
            if len(rows) >= _MAX_FOUND or now > until:
                at = record.offset + 1
                break
        if (
            is_empty
            or at >= fetched.end
            or len(rows) >= _MAX_FOUND
            or time.monotonic() > deadline
        ):
            return {
                "partition": partition.where.partition,
                "next": fetched.end if is_empty else at,
                "end": fetched.end,
                "scanned_bytes": scanned,
                "rows": rows,
            }


class Searchers:
    """Threads for searches, which leave the processors to all others.

    The nice value is a thread's own in Linux. The threads of pages keep theirs, since
    only root could lower it again.

    Source: nice(2), "C library/kernel differences".
    """

    def __init__(self) -> None:
        # One for each thread of a page, so that none waits for another's search.
        self._pool = ThreadPoolExecutor(
            WORKERS, "search", initializer=os.nice, initargs=(_NICE,)
        )

    def run(self, search: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what a search finds, or raise what it raises."""
        return self._pool.submit(search).result()


class Scan(NamedTuple):
    """Batches that were looked at.

    Attributes:
        places: where the batches begin that have the bytes.
        next_offset: the offset after the last batch that was looked at; -1: none was.
        size: the bytes of all of them.
    """

    places: list[int]
    next_offset: int
    size: int


def scan_batches(
    fetched: bytes | bytearray | memoryview, needle: bytes, deadline: float
) -> Scan:
    """Look for bytes in batches, in all of them or until a time.

    A batch is named if the bytes are anywhere in it. Control batches never are.

    Args:
        fetched: batches; the last may be cut off.
        needle: the bytes.
        deadline: stop after a compressed batch later than this, by `time.monotonic`.

    Raises:
        RecordBatchError, DecompressionError: a batch is malformed.
    """
    data = fetched if isinstance(fetched, bytes) else bytes(fetched)
    end, places, run = len(data), list[int](), list[int]()
    pos, next_offset = 0, -1
    unpack = _HEADER.unpack_from
    while end - pos >= BATCH_HEADER_SIZE:
        base, length, magic, attributes, delta = unpack(data, pos)
        if magic != MAGIC or length < BATCH_HEADER_SIZE - LOG_OVERHEAD:
            parse_batch_header(data, pos)  # raises
        following = pos + length + LOG_OVERHEAD
        if following > end:
            break
        if not attributes & (CODEC_MASK | CONTROL_FLAG):
            run.append(pos)
            next_offset = base + delta + 1
            pos = following
            continue
        places += _places(data, needle, run, pos)
        run.clear()
        if not attributes & CONTROL_FLAG and needle in _payload(data, pos, following):
            places.append(pos)
        next_offset = base + delta + 1
        pos = following
        if time.monotonic() > deadline:
            break
    return Scan(places + list(_places(data, needle, run, pos)), next_offset, pos)


def _places(data: bytes, needle: bytes, run: list[int], end: int) -> Iterator[int]:
    """Yield those of adjacent batches that have bytes, by where they begin.

    A match over the border of two batches, or in a header, names a batch, too.

    Args:
        data: has the batches.
        needle: the bytes.
        run: where the batches begin.
        end: where the last one ends.
    """
    if not run:
        return
    found = data.find(needle, run[0], end)
    while found >= 0:
        after = bisect_right(run, found)
        yield run[after - 1]
        if after == len(run):
            return
        found = data.find(needle, run[after], end)


def _payload(data: bytes, start: int, end: int) -> bytes:
    batch = memoryview(data)[start:end]
    return records_payload(parse_batch_header(batch), batch, MAX_DECOMPRESSED)


def _found(
    fetched: Fetched, scan: Scan, needle: bytes
) -> Iterator[tuple[Batch, Record]]:
    """Yield the records that have the bytes anywhere, with their batches."""
    if not scan.places:
        return
    places = frozenset(scan.places)
    for batch in fetched.batches():
        if batch.place in places:
            for record in _records_with(batch, needle, fetched.at):
                yield batch, record


def _records_with(batch: Batch, needle: bytes, at: int) -> Iterator[Record]:
    """Yield the records of a batch that have the bytes, from an offset on.

    A batch of 64 MiB may have 9 million records. So none is decoded before the bytes
    are found in it, or to come to the offset.

    Raises:
        RecordBatchError, DecompressionError: the batch is malformed.
    """
    header = batch.header
    data = records_payload(header, batch.data, MAX_DECOMPRESSED)
    append_time = header.max_timestamp if header.timestamp_type else None
    end, _ = skipped_to(data, at - header.base_offset)
    place = data.find(needle, end)
    while 0 <= place < len(data):  # no bytes at all are found at the end, too
        start = end
        while (end := end_of_record(data, start)) <= place:
            start = end
        for record in iter_payload(
            data[start:end], 1, header.base_offset, header.base_timestamp, append_time
        ):
            if record.offset >= at:
                yield record
        place = data.find(needle, end)


def _matches(record: Record, needle: bytes, place: str) -> bool:
    key, value = record.key, record.value or b""
    if place == "key":
        return key == needle
    return needle in value or (place == "any" and needle in (key or b""))
