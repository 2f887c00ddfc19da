"""The database's functions for records and objects, written once more, in memory.

Simulations use this in place of PostgreSQL. It is written from what the functions
promise, not from their SQL; a test gives both the same calls and compares the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from mpbroker.cluster.errors import ObjectGivenUpError
from mpbroker.cluster.sequencer import (
    Extent,
    ObjectBatch,
    ObjectCommit,
    PartitionEnds,
    PartitionNews,
)

UNKNOWN_PARTITION: Final = 3
OUT_OF_ORDER: Final = 45
OLD_EPOCH: Final = 47
_KEPT_BATCHES: Final = 5
_SEQUENCES: Final = 1 << 31
Place = tuple[UUID, int]


@dataclass
class _Head:
    log_start: int = 0
    high_watermark: int = 0


@dataclass
class _Object:
    changed: float
    state: str = "pending"
    answer: ObjectCommit | None = None
    live_extents: int = 0


@dataclass
class _Producer:
    """The epoch, and of the last batches first and last sequence, and base offset."""

    epoch: int
    recent: list[tuple[int, int, int]] = field(default_factory=list)


class SequencerModel:
    """What the functions of schema/ keep, and what they answer.

    Args:
        clock: seconds; the database's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heads: dict[Place, _Head] = {}
        self._objects: dict[UUID, _Object] = {}
        self._extents: dict[Place, list[Extent]] = {}
        self._producers: dict[tuple[UUID, int, int], _Producer] = {}

    def create_partitions(self, topic: UUID, count: int) -> None:
        for part in range(count):
            self._heads.setdefault((topic, part), _Head())
            self._extents.setdefault((topic, part), [])

    def register_objects(self, keys: Sequence[UUID]) -> None:
        for key in keys:
            self._objects.setdefault(key, _Object(self._clock()))

    def commit_object(self, key: UUID, batches: Sequence[ObjectBatch]) -> ObjectCommit:
        found = self._objects.get(key)
        if found is None or found.state == "dead":
            raise ObjectGivenUpError(str(key))
        if found.answer is not None:
            return found.answer
        bases, errors = [-1] * len(batches), [0] * len(batches)
        committed_ms = int(self._clock() * 1000)
        order = sorted(
            range(len(batches)),
            key=lambda n: (*batches[n][:2], batches[n].producer_id, n),
        )
        before: ObjectBatch | None = None  # the last one taken
        for n in order:
            one = batches[n]
            place = one.topic_id, one.partition
            head = self._heads.get(place)
            if head is None:
                errors[n] = UNKNOWN_PARTITION
                continue
            errors[n], original = self._judge(one, head.high_watermark)
            if errors[n] or original is not None:
                bases[n] = -1 if original is None else original
                continue
            bases[n] = head.high_watermark
            head.high_watermark += one.records
            self._extend(key, one, bases[n], before, committed_ms)
            before = one
        found.state, found.changed = "live", self._clock()
        found.live_extents = sum(
            each.object_key == key
            for place in {batch[:2] for batch in batches} & self._extents.keys()
            for each in self._extents[place]
        )
        found.answer = ObjectCommit(bases, errors, committed_ms)
        return found.answer

    def _judge(self, one: ObjectBatch, base_offset: int) -> tuple[int, int | None]:
        """Return an error, or the offset of the batch that this one repeats.

        A batch that is to be taken is noted.
        """
        if one.producer_id < 0:
            return 0, None
        key = one.topic_id, one.partition, one.producer_id
        known = self._producers.get(key)
        first = one.base_sequence
        last = (first + one.records - 1) % _SEQUENCES
        if known is not None and one.producer_epoch < known.epoch:
            return OLD_EPOCH, None
        if known is None or one.producer_epoch > known.epoch:
            if known is not None and first != 0:
                return OUT_OF_ORDER, None
            known = self._producers[key] = _Producer(one.producer_epoch)
        elif known.recent and first != (known.recent[-1][1] + 1) % _SEQUENCES:
            for was_first, was_last, offset in known.recent:
                if (was_first, was_last) == (first, last):
                    return 0, offset
            return OUT_OF_ORDER, None
        known.recent = [*known.recent, (first, last, base_offset)][-_KEPT_BATCHES:]
        return 0, None

    def _extend(
        self,
        key: UUID,
        one: ObjectBatch,
        base_offset: int,
        before: ObjectBatch | None,
        committed_ms: int,
    ) -> None:
        """Add a batch to the extent before it, or begin another extent."""
        extents = self._extents[one.topic_id, one.partition]
        stamp = committed_ms if one.max_timestamp == -1 else one.max_timestamp
        end = base_offset + one.records - 1
        if (
            before is not None
            and before[:2] == one[:2]
            and before.position + before.size == one.position
        ):
            last = extents[-1]
            extents[-1] = last._replace(
                last_offset=end,
                size=last.size + one.size,
                max_timestamp=max(last.max_timestamp, stamp),
            )
            return
        extents.append(
            Extent(base_offset, end, key, one.position, one.size, stamp, committed_ms)
        )

    def settle_object(self, key: UUID) -> bool:
        found = self._objects.get(key)
        if found is not None and found.state == "pending":
            found.state, found.changed = "dead", self._clock()
        return found is not None and found.state == "live"

    def end(self, place: Place) -> int:
        return self._heads[place[0], place[1]].high_watermark

    def ends(self, places: Sequence[Place]) -> list[PartitionEnds]:
        found = []
        for place in places:
            head = self._heads.get((place[0], place[1]))
            size = sum(
                each.size for each in self._extents.get((place[0], place[1]), ())
            )
            found.append(
                PartitionEnds(-1, -1, -1)
                if head is None
                else PartitionEnds(head.log_start, head.high_watermark, size)
            )
        return found

    def look(
        self, places: Sequence[tuple[UUID, int, int, int]], max_extents: int
    ) -> list[PartitionNews]:
        found = []
        for topic, part, offset, known_start in places:
            there = [
                each
                for each in self._extents[topic, part]
                if each.last_offset >= offset
            ]
            start = self._heads[topic, part].log_start
            is_above = start > known_start
            found.append(
                PartitionNews(there[:max_extents], start if is_above else None)
            )
        return found

    def trim(self, topic: UUID, part: int) -> None:
        """Remove all records of a partition, and its extents."""
        head = self._heads[topic, part]
        head.log_start = head.high_watermark
        for each in self._extents[topic, part]:
            owner = self._objects[each.object_key]
            owner.live_extents -= 1
            owner.changed = self._clock()
        self._extents[topic, part] = []

    def give_up_objects(self, age_s: float) -> None:
        for each in self._objects.values():
            is_unused = each.state == "live" and not each.live_extents
            if (each.state == "pending" or is_unused) and (
                each.changed < self._clock() - age_s
            ):
                each.state, each.changed = "dead", self._clock()

    def dead_objects(self, age_s: float) -> list[UUID]:
        return [
            key
            for key, each in self._objects.items()
            if each.state == "dead" and each.changed < self._clock() - age_s
        ]

    def forget_object(self, key: UUID) -> None:
        del self._objects[key]
