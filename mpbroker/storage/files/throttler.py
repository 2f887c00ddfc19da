"""Throttler: limit the rate of the log cleaner, and of the remote store's client.

Source: Kafka's Throttler.
"""

import time
from collections.abc import Callable
from typing import Final

_CHECK_S: Final = 0.3
_SLICE_S: Final = 0.1


class Throttler:
    """Limits a rate of bytes: sleeps if more bytes were counted than the rate allows.

    Args:
        bytes_per_second: the rate; with infinity there are no sleeps.
        beat: called before and between sleeps; may raise, to end the work.
        clock: returns the time in seconds, as ``time.monotonic``.
        sleep: sleeps for some seconds, as ``time.sleep``.
    """

    def __init__(
        self,
        bytes_per_second: float,
        beat: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._beat = beat
        self._clock = clock
        self._sleep = sleep
        self._since = clock()
        self._bytes = 0

    def done(self, size: int) -> None:
        """Count bytes that were read or written; sleep if the rate is exceeded."""
        self._beat()
        self._bytes += size
        elapsed = self._clock() - self._since
        if elapsed < _CHECK_S and self._bytes < self._rate * _CHECK_S:
            return
        left = self._bytes / self._rate - elapsed
        while left > 0:
            self._sleep(min(left, _SLICE_S))
            left -= _SLICE_S
            self._beat()
        self._since = self._clock()
        self._bytes = 0
