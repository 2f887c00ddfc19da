"""What was written, read and committed in a cluster, and what contradicts it.

A record says who wrote it, to which partition, and its number there. So any record that
is read can be judged alone, and a partition by one pass over it. What is kept for a
record is its offset and its checksum, some twelve bytes.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Final, NamedTuple

_MOST_COMPLAINTS: Final = 20
_UNKNOWN: Final = -1


class Written(NamedTuple):
    """Where a record comes from."""

    producer: str
    partition: int
    number: int


def value(producer: str, partition: int, number: int) -> bytes:
    """Return the one value that a producer's record may have."""
    head = b"%s:%d:%d:" % (producer.encode(), partition, number)
    digest = hashlib.blake2b(head, digest_size=16).hexdigest().encode()
    return head + digest * (1 + digest[0] % 8)


def parse(content: bytes | None) -> Written | None:
    """Return where a record comes from; None if a byte of it is wrong."""
    try:
        producer, partition, number, _ = (content or b"").split(b":")
        found = Written(producer.decode(), int(partition), int(number))
    except ValueError:
        return None
    return found if value(*found) == content else None


class Ledger:
    """May be used by several threads.

    Args:
        partitions: how many partitions there are.
        idempotent: names of producers whose records are there once, whatever happens.
        plain: names of producers that may double what they have sent more than once.
        groups: names of groups, which begin with a committed offset of 0.

    Attributes:
        checked: how many records were read and compared.
        complaints: what was wrong, in words.
    """

    def __init__(
        self,
        partitions: int,
        idempotent: Iterable[str],
        plain: Iterable[str] = (),
        groups: Iterable[str] = (),
    ) -> None:
        self.partitions = partitions
        self.idempotent = frozenset(idempotent)
        self.plain = frozenset(plain)
        self._lock = Lock()
        places = [
            (name, partition)
            for name in sorted(self.idempotent | self.plain)
            for partition in range(partitions)
        ]
        # The offset of each acknowledged record, or _UNKNOWN, by its number.
        self._offsets = {place: array("q") for place in places}
        # How often a record was sent, if more than once.
        self._attempts: dict[Written, int] = {}
        # The checksum of what was read first at each offset; 0: nothing was.
        self._checksums = [array("I") for _ in range(partitions)]
        self._groups = {
            name: [_Position() for _ in range(partitions)] for name in groups
        }
        self.checked = 0
        self.complaints: list[str] = []

    def complain(self, text: str) -> None:
        with self._lock:
            self._complain(text)

    def _complain(self, text: str) -> None:
        if len(self.complaints) < _MOST_COMPLAINTS:
            self.complaints.append(text)

    # -- producers ---------------------------------------------------------------------

    def sent_again(self, producer: str, partition: int, number: int) -> None:
        """Note, beforehand, that a plain producer sends a record once more."""
        written = Written(producer, partition, number)
        with self._lock:
            self._attempts[written] = self._attempts.get(written, 1) + 1

    def may_be_sent_again(self) -> None:
        """Note that a node may repeat what is under way by itself.

        It does so if all processes die that know of a request, and its connection
        lives on. To be told before they are killed, and behind it: plain producers
        have one record under way.
        """
        with self._lock:
            for (producer, partition), offsets in self._offsets.items():
                if producer in self.plain:
                    written = Written(producer, partition, len(offsets))
                    self._attempts[written] = self._attempts.get(written, 1) + 1

    def acknowledge(
        self, producer: str, partition: int, number: int, offset: int | None
    ) -> None:
        """Note an answer; a producer's are given in the order of its numbers.

        Args:
            producer: its name.
            partition: the partition.
            number: the record's.
            offset: None: not known. So librdkafka says that a batch which it sent again
                was written before.
        """
        with self._lock:
            offsets = self._offsets[producer, partition]
            name = f"{producer}:{partition}:{number}"
            if number != len(offsets):
                self._complain(
                    f"{name} was acknowledged, and {len(offsets)} was to come"
                )
                return
            if offset is None:
                offset = _UNKNOWN
            elif offsets and offset <= offsets[-1]:
                self._complain(
                    f"{name} was acknowledged at {offset}, the one before it at"
                    f" {offsets[-1]}"
                )
            offsets.append(offset)

    def acknowledged(self, producer: str, partition: int) -> int:
        """Return how many of a producer's records were acknowledged."""
        return len(self._offsets[producer, partition])

    def records(self) -> int:
        """Return how many records were acknowledged."""
        return sum(map(len, self._offsets.values()))

    def end(self, partition: int) -> int:
        """Return the offset below which a record was acknowledged, or read."""
        with self._lock:
            ends = [
                offsets[-1] + 1
                for (_, number), offsets in self._offsets.items()
                if number == partition and offsets
            ]
            return max([len(self._checksums[partition]), *ends])

    # -- records -----------------------------------------------------------------------

    def show(
        self, where: str, partition: int, offset: int, content: bytes | None
    ) -> Written | None:
        """Judge a record that somebody has read.

        Returns:
            None: there was a complaint about its bytes.
        """
        found = parse(content)
        with self._lock:
            self.checked += 1
            if found is None or found.partition != partition:
                self._complain(f"{where}: {partition}@{offset} has {content!r:.60}")
                return None
            assert content is not None
            checksum = zlib.crc32(content) or 1
            before = self._checksums[partition]
            if offset >= len(before):
                before.extend([0] * (offset + 1 - len(before)))
            if before[offset] == 0:
                before[offset] = checksum
            elif before[offset] != checksum:
                self._complain(
                    f"{where}: {partition}@{offset} has {content!r:.60}, others had"
                    " other bytes"
                )
                return None
            offsets = self._offsets.get((found.producer, partition))
            if offsets is None:
                self._complain(f"{where}: nobody has written {content!r:.60}")
                return None
            if (
                found.producer in self.idempotent
                and found.number < len(offsets)
                and offsets[found.number] not in (offset, _UNKNOWN)
            ):
                self._complain(
                    f"{where}: {partition}@{offset} has {found.producer} number"
                    f" {found.number}, acknowledged at {offsets[found.number]}"
                )
        return found

    def most_copies(self, written: Written) -> int:
        """Return how often a record may be there."""
        return self._attempts.get(written, 1)

    def offset_of(self, written: Written) -> int | None:
        """Return where a record was acknowledged; None if it was not yet."""
        with self._lock:
            offsets = self._offsets[written.producer, written.partition]
            return offsets[written.number] if written.number < len(offsets) else None

    # -- groups ------------------------------------------------------------------------

    def floor(self, group: str) -> list[int]:
        """Return the offsets that the group has certainly committed by now.

        To be asked before a request whose answer is judged by it.
        """
        with self._lock:
            return [each.committed for each in self._groups[group]]

    def read(self, group: str, partition: int, offset: int) -> None:
        """Note that a member has read a record; before it commits it."""
        with self._lock:
            self._groups[group][partition].read(offset)

    def read_to(self, group: str, partition: int) -> int:
        """Return the offset below which the group has read all."""
        return self._groups[group][partition].low

    def commit(self, group: str, floor: list[int], offsets: Mapping[int, int]) -> None:
        """Judge offsets by partition which a member was told to be committed."""
        self._judge(group, floor, offsets, "a member has committed")

    def observe(self, group: str, floor: list[int], offsets: Mapping[int, int]) -> None:
        """Judge offsets by partition which a node has told."""
        self._judge(group, floor, offsets, "a node tells of")

    def _judge(
        self, group: str, floor: list[int], offsets: Mapping[int, int], who: str
    ) -> None:
        with self._lock:
            for partition, offset in offsets.items():
                position = self._groups[group][partition]
                if offset < floor[partition]:
                    self._complain(
                        f"group {group}: {who} {partition}@{offset}, after"
                        f" {floor[partition]}"
                    )
                if offset > position.low:
                    self._complain(
                        f"group {group}: {who} {partition}@{offset}, and nobody has"
                        f" read {position.low}"
                    )
                position.committed = max(position.committed, offset)


class _Position:
    """How far a group is in a partition.

    Attributes:
        low: all below it was read.
        committed: what was told to be committed, at the most.
    """

    def __init__(self) -> None:
        self.low = 0
        self.committed = 0
        self._above: set[int] = set()

    def read(self, offset: int) -> None:
        if offset > self.low:
            self._above.add(offset)
        elif offset == self.low:
            self.low += 1
            while self.low in self._above:
                self._above.remove(self.low)
                self.low += 1


class Walk:
    """One pass over a partition from its begin: no gap, no double, no other order.

    Args:
        ledger: what is known of its records.
        where: who shows them, for complaints.
        partition: its number.

    Attributes:
        partition: its number.
        next: the offset that comes next.
    """

    def __init__(self, ledger: Ledger, where: str, partition: int) -> None:
        self._ledger = ledger
        self._where = where
        self.partition = partition
        self._expected = dict.fromkeys(ledger.idempotent, 0)
        self._copies: dict[str, Counter[int]] = {
            name: Counter() for name in ledger.plain
        }
        # Numbers that were found where they were acknowledged.
        self._at_home: dict[str, set[int]] = {name: set() for name in ledger.plain}
        self.next = 0

    def take(self, offset: int, content: bytes | None) -> None:
        """Judge the next record."""
        if offset != self.next:
            self._complain(f"offset {offset} follows {self.next - 1}")
        self.next = offset + 1
        found = self._ledger.show(self._where, self.partition, offset, content)
        if found is None:
            return
        if found.producer in self._copies:
            self._take_plain(offset, found)
            return
        expected = self._expected[found.producer]
        if found.number < expected:
            self._complain(f"{found.producer} number {found.number} is there again")
        elif found.number > expected:
            self._complain(
                f"{found.producer} number {found.number} is there without {expected}"
            )
        self._expected[found.producer] = max(expected, found.number + 1)

    def _take_plain(self, offset: int, found: Written) -> None:
        if self._ledger.offset_of(found) == offset:
            self._at_home[found.producer].add(found.number)
        copies = self._copies[found.producer]
        copies[found.number] += 1
        most = self._ledger.most_copies(found)
        if copies[found.number] > most:
            self._complain(
                f"{found.producer} number {found.number} is there"
                f" {copies[found.number]} times, and was sent {most} times"
            )

    def end(self) -> None:
        """Compare what was there with what was acknowledged; nobody writes any more."""
        for name, seen in self._expected.items():
            acknowledged = self._ledger.acknowledged(name, self.partition)
            if seen < acknowledged:
                self._complain(
                    f"{name} number {seen} is lost, and {acknowledged} records were"
                    " acknowledged"
                )
            elif seen > acknowledged:
                self._complain(
                    f"{name} has {seen} records, and {acknowledged} were acknowledged"
                )
        for name, at_home in self._at_home.items():
            for number in range(self._ledger.acknowledged(name, self.partition)):
                if number not in at_home:
                    offset = self._ledger.offset_of(
                        Written(name, self.partition, number)
                    )
                    self._complain(f"{name} number {number} is not at {offset}")

    def _complain(self, text: str) -> None:
        self._ledger.complain(
            f"{self._where}: partition {self.partition}, below {self.next}: {text}"
        )
