"""Backoff: the wait before the next attempt, which grows with the failures."""

from __future__ import annotations

import random
from typing import NamedTuple


class Backoff(NamedTuple):
    """Waits that grow by a factor, up to a limit, with some random jitter.

    The jitter keeps a thousand clients of a broker that restarted from coming back in
    the same millisecond, again and again.

    Source: KIP-580 (base 2, jitter of 20 %).
    """

    initial_ms: float
    max_ms: float
    multiplier: float = 2.0
    jitter: float = 0.2

    def delay_ms(self, failures: int, rng: random.Random) -> float:
        """Return the wait after a failure, in ms.

        Args:
            failures: how many failures in a row came before this one; 0 for none.
            rng: makes the jitter.
        """
        if self.initial_ms >= self.max_ms:
            return float(self.max_ms)  # a constant is meant exactly: no jitter
        # After 60 doublings every limit is reached; higher powers would overflow.
        grown = self.initial_ms * self.multiplier ** min(failures, 60)
        factor = 1 + rng.uniform(-self.jitter, self.jitter)
        return min(grown, self.max_ms) * factor
