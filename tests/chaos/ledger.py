"""What was sent, acknowledged and read back, and what the log must therefore hold.

A batch has a number of its own and is sent once; who gets no answer never tries again.
So a number that the log holds twice was executed twice, and one that it lacks although
it was acknowledged is lost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.bench import wire

# Enough to see what is wrong, not all of it.
_COMPLAINTS_KEPT: Final = 20
_FILLER: Final = bytes(range(256)) * 2048


class Batch(NamedTuple):
    """One batch as it was sent."""

    number: int
    partition: int
    records: int
    value_bytes: int

    def value(self, index: int) -> bytes:
        """The value of one of its records."""
        name = b"%d.%d." % (self.number, index)
        return name + _FILLER[: max(0, self.value_bytes - len(name))]

    def encode(self) -> bytes:
        return wire.record_batch(
            [wire.RecordSpec(self.value(index)) for index in range(self.records)]
        )


@dataclass
class Ledger:
    """All batches of one topic.

    Attributes:
        topic: its name.
        partitions: how many it has.
        wrong: what answers said that is not so; the first few.
    """

    topic: str
    partitions: int
    batches: dict[int, Batch] = field(default_factory=dict)
    acknowledged: dict[int, int] = field(default_factory=dict)  # number: base offset
    ends: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    wrong_count: int = 0
    _order: list[int] = field(default_factory=list)
    _at: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ends = [0] * self.partitions

    def send(
        self, number: int, partition: int, records: int, value_bytes: int
    ) -> Batch:
        batch = Batch(number, partition, records, value_bytes)
        self.batches[number] = batch
        return batch

    def acknowledge(self, batch: Batch, base_offset: int) -> None:
        if base_offset < 0:
            self.complain(f"{batch} was acknowledged at offset {base_offset}")
            return
        self.acknowledged[batch.number] = base_offset
        self._order.append(batch.number)
        for index in range(batch.records):
            self._note(batch.partition, base_offset + index, batch.number, index)
        end = base_offset + batch.records
        self.ends[batch.partition] = max(self.ends[batch.partition], end)

    def read(self, partition: int, records: list[wire.StoredRecord]) -> None:
        """Hold what a fetch returned to what was sent, and to what others were told."""
        for record in records:
            found = self._identify(partition, record)
            if found is not None:
                self._note(partition, record.offset, *found)

    def some_batch(self, pick: float) -> tuple[int, int] | None:
        """Return (partition, base offset) of an acknowledged batch; 0 <= pick < 1."""
        if not self._order:
            return None
        number = self._order[int(pick * len(self._order))]
        return self.batches[number].partition, self.acknowledged[number]

    def _identify(
        self, partition: int, record: wire.StoredRecord
    ) -> tuple[int, int] | None:
        where = f"{partition}@{record.offset}"
        try:
            number, index, _ = (record.value or b"").split(b".", 2)
            batch = self.batches[int(number)]
        except (ValueError, KeyError):
            self.complain(f"{where} holds what was never sent: {record.value!r:.60}")
            return None
        if batch.partition != partition or int(index) >= batch.records:
            self.complain(f"{where} holds record {int(index)} of {batch}")
            return None
        if record.value != batch.value(int(index)):
            self.complain(f"{where} holds other bytes than {batch}")
        return int(number), int(index)

    def _note(self, partition: int, offset: int, number: int, index: int) -> None:
        known = self._at.setdefault((partition, offset), (number, index))
        if known != (number, index):
            self.complain(
                f"{partition}@{offset} was said to hold {known} and {(number, index)}"
            )

    def complain(self, text: str) -> None:
        self.wrong_count += 1
        if len(self.wrong) < _COMPLAINTS_KEPT:
            self.wrong.append(text)

    def verify(self, address: tuple[str, int]) -> int:
        """Read the whole topic once all is quiet; return how many records it has.

        Whatever is not as it must be goes to ``wrong``.
        """
        total = 0
        seen: Counter[tuple[int, int]] = Counter()
        with wire.Connection(address) as connection:
            for partition in range(self.partitions):
                try:
                    # Checks that offsets have no gaps, and each batch's CRC.
                    records = connection.read_all(self.topic, partition)
                except wire.AnswerError as error:
                    self.complain(f"{self.topic}-{partition}: {error}")
                    continue
                total += len(records)
                self.read(partition, records)
                held = {record.offset: record for record in records}
                self._look_for(partition, held)
                for record in records:
                    found = self._identify(partition, record)
                    if found is not None:
                        seen[found] += 1
        for (number, index), count in seen.items():
            if count > 1:
                self.complain(
                    f"record {index} of batch {number} is there {count} times"
                )
        return total

    def _look_for(self, partition: int, held: dict[int, wire.StoredRecord]) -> None:
        for number, base_offset in self.acknowledged.items():
            batch = self.batches[number]
            if batch.partition != partition:
                continue
            for index in range(batch.records):
                record = held.get(base_offset + index)
                if record is None:
                    self.complain(f"{batch}, acknowledged at {base_offset}, is lost")
                elif record.value != batch.value(index):
                    self.complain(f"{batch} is not at {base_offset}, as acknowledged")

    @property
    def in_doubt(self) -> int:
        """How many batches were never answered."""
        return len(self.batches) - len(self.acknowledged)
