"""StickyPartitioner: one partition for a whole batch of records without keys.

Source: KIP-480 (sticky), KIP-794 (weights by how fast partitions drain, and shares by
bytes rather than by batches).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence


class StickyPartitioner:
    """Chooses partitions of one topic for records without keys.

    Attributes:
        partition: the partition chosen last; None before the first `choose`.
        bytes: how many bytes went there since, in closed batches.
    """

    __slots__ = ("_rng", "bytes", "partition")

    def __init__(self, rng: random.Random) -> None:
        self.partition: int | None = None
        self.bytes = 0
        self._rng = rng

    def choose(self, lengths: Sequence[int | None], adaptive: bool) -> int:
        """Choose the next partition at random.

        Args:
            lengths: how many batches wait for each partition; None for a partition that
                cannot be used now.
            adaptive: whether partitions with shorter queues are likelier; their weight
                is the longest length + 1 - their length.
        """
        longest = -1
        for length in lengths:
            if length is not None and length > longest:
                longest = length
        if longest < 0:
            lengths, longest = [0] * len(lengths), 0
        total = 0
        table = []
        for length in lengths:
            if length is not None:
                total += longest + 1 - length if adaptive else 1
            table.append(total)
        self.partition = bisect_right(table, int(self._rng.random() * total))
        self.bytes = 0
        return self.partition
