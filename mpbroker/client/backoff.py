"""How long a client waits: longer with each failure, not at all once interrupted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, TypeAlias

# What contextlib.ExitStack.push takes.
ExitStep: TypeAlias = Callable[
    [type[BaseException] | None, BaseException | None, TracebackType | None], None
]


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


def hurry_if_interrupted(end_by: Callable[[float], None]) -> ExitStep:
    """Return a step to push on an ExitStack between the steps that close a client.

    An interrupt, such as KeyboardInterrupt, is no Exception. After one the steps that
    follow are done, and wait for no broker.

    Args:
        end_by: sets the time (monotonic, in seconds) at which the client's waits end.
    """

    def hurry(
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None and not issubclass(exc_type, Exception):
            end_by(time.monotonic())

    return hurry
