"""Where records without keys go: one partition for a whole batch, then another.

Source: KIP-480 (sticky), KIP-794 (weights by how fast partitions drain, and shares by
bytes rather than by batches).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence


class StickyPartitioner:
    """One topic's choice.

    Attributes:
        partition: where records go now; None before the first `choose`.
        bytes: how many went there since, in batches that are closed.
    """

    __slots__ = ("_rng", "bytes", "partition")

    def __init__(self, rng: random.Random) -> None:
        self.partition: int | None = None
        self.bytes = 0
        self._rng = rng

    def choose(self, lengths: Sequence[int | None], adaptive: bool) -> int:
        """Choose the next partition by chance.

        Args:
            lengths: batches that wait for each partition; None: it is of no use now.
            adaptive: whether short queues are likelier: by max + 1 - length.
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
