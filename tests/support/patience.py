"""How long a test waits: the one place that says so.

A test waits for a thing, and gives up only when the thing will not come. How long that
is depends on the machine: four workers on two cores that others use, too, get a part of
a core each. So patience counts the time in which a CPU was to be had. The kernel tells
how long tasks waited for one (PSI) and how long the hypervisor ran others (steal). That
time does not count, but at most LONGEST_S pass in all.

    patience = Patience()
    while not is_there():
        patience.check("the broker's port")     # raises NotInTimeError when it is over
        time.sleep(0.01)

`wait_until` in tests/support/children.py does this, and the pauses between two looks.
"""

from __future__ import annotations

import time
from typing import Final

from tests.support.pressure import Reading
from tests.support.promises import NotInTimeError

# Generous: a loaded machine must not fail a test, a thing that hangs must.
PATIENCE_S: Final = 90
_AT_MOST_TIMES: Final = 5
# For the time-outs of clients and processes that know no pressure. A wait that succeeds
# does not take longer because of it.
LONGEST_S: Final = PATIENCE_S * _AT_MOST_TIMES


class Patience:
    """One wait, from now on.

    Args:
        limit_s: seconds of an idle machine; a busy one has up to five times as many.
    """

    def __init__(self, limit_s: float = PATIENCE_S) -> None:
        self.limit_s = limit_s
        self._began = Reading.now()

    @property
    def is_over(self) -> bool:
        """Whether so much time has passed in which a CPU was to be had."""
        passed_s = time.monotonic() - self._began.at_s
        if passed_s < self.limit_s:
            return False
        if passed_s >= self.limit_s * _AT_MOST_TIMES:
            return True
        unavailable_s = Reading.now().unavailable_since(self._began)
        return passed_s - unavailable_s >= self.limit_s

    def check(self, what: object) -> None:
        """Raise if patience is over.

        Args:
            what: what did not happen.

        Raises:
            NotInTimeError: it is over.
        """
        if self.is_over:
            raise NotInTimeError(f"not within {self.limit_s} s of a CPU: {what}")
