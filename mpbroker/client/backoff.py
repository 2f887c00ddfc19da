"""How long to wait before trying again."""

from __future__ import annotations

import random
from typing import NamedTuple


class Backoff(NamedTuple):
    """Waits that grow by a factor, up to a limit, each a little by chance.

    Chance, so that a thousand clients of one broker that restarted do not come back in
    the same millisecond, again and again.

    Source: KIP-580 (base 2, jitter of 20 %).
    """

    initial_ms: float
    max_ms: float
    multiplier: float = 2.0
    jitter: float = 0.2

    def delay_ms(self, failures: int, rng: random.Random) -> float:
        """Return the wait after so many failures in a row before this one, from 0."""
        if self.initial_ms >= self.max_ms:
            return float(self.max_ms)  # a constant: asked for to be exact
        # Beyond 60 doublings every limit is reached, and powers overflow.
        grown = self.initial_ms * self.multiplier ** min(failures, 60)
        factor = 1 + rng.uniform(-self.jitter, self.jitter)
        return min(grown, self.max_ms) * factor
