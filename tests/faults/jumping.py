"""mpbroker whose wall clock jumps: python -m tests.faults.jumping FILE serve ...

FILE holds how many seconds the clock is ahead. Monotonic time goes on as ever.
"""

import sys
import time
from pathlib import Path

_ahead = Path(sys.argv.pop(1))
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + int(_ahead.read_text())
time.time_ns = lambda: _time_ns() + int(_ahead.read_text()) * 1_000_000_000

from mpbroker.cli import main  # noqa: E402 - whoever imports the names gets these

sys.exit(main())
