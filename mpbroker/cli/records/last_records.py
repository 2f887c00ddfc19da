"""Find where the last N records of a partition begin, for `-o -N`.

Offsets are no numbers of records: markers of transactions have offsets, and aborted
records and those that a compaction removed leave gaps. So the end of each partition is
read, and more of it until there are N records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer.consumer import Consumer
from mpbroker.client.consumer.fetcher import FetchedBatch, LeaderLostError
from mpbroker.protocol.records.record_batch import iter_records

_Offsets = Mapping[TopicPartition, int]


class _Search:
    """The search in one partition: a window of offsets that moves to the beginning."""

    def __init__(self, first: int, end: int, count: int) -> None:
        self.start, self.end = max(end - count, first), end
        self._first = first
        self._count = count
        self._window: deque[int] = deque(maxlen=count)  # offsets of its last records
        self._behind: list[int] = []  # those of the windows behind it

    def take(self, batch: FetchedBatch) -> None:
        """Note the offsets of a batch's records that are in the window."""
        self._window += (
            record.offset
            for record in iter_records(batch.data)
            if max(batch.first_offset, self.start) <= record.offset < self.end
        )

    def next_window(self) -> bool:
        """Move to the offsets before the window; return False if the search is over."""
        self._behind = [*self._window, *self._behind][-self._count :]
        self._window.clear()
        if len(self._behind) == self._count or self.start == self._first:
            return False
        width = max(2 * (self.end - self.start), self._count)
        self.end, self.start = self.start, max(self.start - width, self._first)
        return True

    @property
    def found(self) -> int:
        """The offset of the first of the last records; the end if there are none."""
        return self._behind[0] if self._behind else self.end


def start_of_last(
    settings: Mapping[str, object], first: _Offsets, ends: _Offsets, count: int
) -> dict[TopicPartition, int]:
    """Return the offsets of the first of the last ``count`` records.

    Args:
        settings: those of a consumer; isolation.level says which records there are.
        first: the first offset of each partition.
        ends: the offset behind the last one, of each partition.
        count: how many records are wanted of each partition, 1 or more. If one has
            fewer, all of them are.

    Raises:
        ApiError, BrokerUnavailableError: a partition cannot be read.
    """
    searches = {where: _Search(first[where], end, count) for where, end in ends.items()}
    left = {where for where in ends if first[where] < ends[where]}
    own = {**settings, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    with Consumer(own) as consumer:
        while left:
            consumer.assign(left)
            for where in left:
                consumer.seek(where, searches[where].start)
            _read_windows(consumer, {where: searches[where] for where in left})
            left = {where for where in left if searches[where].next_window()}
    return {
        where: each.found if first[where] < ends[where] else ends[where]
        for where, each in searches.items()
    }


def _read_windows(consumer: Consumer, searches: dict[TopicPartition, _Search]) -> None:
    left = set(searches)
    while left:
        try:
            batches = consumer.poll_batches()
        except LeaderLostError:
            continue  # the next poll asks the new leader
        for batch in batches:
            searches[batch.partition].take(batch)
        done = [w for w in left if consumer.position(w) >= searches[w].end]
        consumer.pause(done)
        left.difference_update(done)
