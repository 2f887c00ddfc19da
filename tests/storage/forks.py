"""Death at any line of storage and metadata, and of the rows that it builds on."""

from pathlib import Path

import mpbroker.metadata
import mpbroker.storage
from tests.support import children

_DIRECTORY = Path(mpbroker.storage.__file__).parent
_METADATA = Path(mpbroker.metadata.__file__).parent
FILES = (
    *(
        f"mpbroker/storage/{path.relative_to(_DIRECTORY)}"
        for path in _DIRECTORY.rglob("*.py")
    ),
    *(f"mpbroker/metadata/{path.name}" for path in _METADATA.glob("*.py")),
    "mpbroker/ipc/tables/partition_table.py",
)


def kill_at_line(number: int) -> None:
    """Kill this process before it runs the n-th of those lines from now on."""
    children.kill_at_line(number, FILES)
