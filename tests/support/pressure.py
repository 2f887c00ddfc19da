"""How much of a time span tests had to wait for a CPU, as the kernel counts it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

_PRESSURE: Final = Path("/proc/pressure/cpu")
_STAT: Final = Path("/proc/stat")
_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")


class Reading(NamedTuple):
    """The kernel's counters at one moment, in seconds.

    Attributes:
        at_s: monotonic time.
        waited_s: how long some task has waited for a CPU (PSI, "some"); 0 without PSI.
        stolen_s: how long the hypervisor ran others, over all CPUs.
    """

    at_s: float
    waited_s: float
    stolen_s: float

    @classmethod
    def now(cls) -> Reading:
        """Read the counters; those that this kernel lacks are 0."""
        return cls(time.monotonic(), _waited_s(), _stolen_s())

    def since(self, earlier: Reading) -> Pressure:
        """Return the shares of the time between an earlier reading and this one."""
        span_s = max(self.at_s - earlier.at_s, 1e-6)
        return Pressure(
            _percent((self.waited_s - earlier.waited_s) / span_s),
            _percent(
                (self.stolen_s - earlier.stolen_s) / span_s / (os.cpu_count() or 1)
            ),
        )

    def unavailable_since(self, earlier: Reading) -> float:
        """Return the seconds since an earlier reading in which a CPU was not to be had.

        At most all of them: a moment in which several tasks wait counts once.
        """
        stolen_s = (self.stolen_s - earlier.stolen_s) / (os.cpu_count() or 1)
        return min(
            self.at_s - earlier.at_s, self.waited_s - earlier.waited_s + stolen_s
        )


class Pressure(NamedTuple):
    """Shares of a time span, in whole percent.

    Attributes:
        waited: some task waited for a CPU.
        stolen: a CPU was the hypervisor's.
    """

    waited: int
    stolen: int

    def __str__(self) -> str:
        return f"CPU pressure {self.waited} %, steal {self.stolen} %"


def _percent(share: float) -> int:
    return round(100 * min(1.0, max(0.0, share)))


def _waited_s() -> float:
    # some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS
    try:
        some = _PRESSURE.read_text().splitlines()[0]
    except (OSError, IndexError):
        return 0.0
    return int(some.rpartition("total=")[2]) / 1e6


def _stolen_s() -> float:
    # cpu user nice system idle iowait irq softirq steal guest guest_nice
    try:
        fields = _STAT.read_text().partition("\n")[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / _TICKS_A_SECOND if len(fields) > 8 else 0.0
