"""A line on the terminal that shows the progress of long work."""

from __future__ import annotations

import sys
import time
from typing import Final, TextIO

# Work that ends sooner shows nothing.
_AFTER_S: Final = 1.0
_EVERY_S: Final = 0.5
ERASE: Final = "\r\033[K"


class ProgressLine:
    """Counts records and bytes, and shows them on standard error from time to time.

    It shows nothing if standard error is no terminal.
    """

    def __init__(
        self, verb: str, *, is_wanted: bool = True, stream: TextIO | None = None
    ) -> None:
        """Start the clock; no records are counted yet.

        Args:
            verb: what was done to the records, such as "written".
            is_wanted: False: show nothing.
            stream: the terminal; None: standard error.
        """
        self._verb = verb
        self._stream = sys.stderr if stream is None else stream
        self._is_wanted = is_wanted and self._stream.isatty()
        self._records = 0
        self._bytes = 0
        self._is_shown = False
        self._started = time.monotonic()
        self._next = self._started + _AFTER_S

    def add(self, records: int, size: int) -> None:
        """Count more records; ``size`` is the sum of their sizes, in bytes."""
        self._records += records
        self._bytes += size
        if self._is_wanted and (now := time.monotonic()) >= self._next:
            self._next = now + _EVERY_S
            self._show(now - self._started)

    def _show(self, passed_s: float) -> None:
        rate = self._bytes / passed_s / 1e6
        text = (
            f"{self._records:,} records {self._verb}, {self._bytes / 1e6:,.1f} MB,"
            f" {rate:,.1f} MB/s"
        )
        print(f"{ERASE}{text}", end="", file=self._stream, flush=True)
        self._is_shown = True

    def erase(self) -> None:
        """Remove the line from the terminal, before other text or at the end."""
        if self._is_shown:
            print(ERASE, end="", file=self._stream, flush=True)
            self._is_shown = False
