"""Death at any line of the storage package, and of the rows that it builds on."""

from pathlib import Path

import mpbroker.storage
from tests.support import children

_DIRECTORY = Path(mpbroker.storage.__file__).parent
FILES = (
    *(f"mpbroker/storage/{path.name}" for path in _DIRECTORY.glob("*.py")),
    "mpbroker/ipc/partition_table.py",
)


def kill_at_line(number: int) -> None:
    """Kill this process before it runs the n-th of those lines from now on."""
    children.kill_at_line(number, FILES)
