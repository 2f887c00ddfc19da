"""GroupPositions: the committed offsets of a cluster node's groups, in a file.

Without a cluster the exporter reads them from __consumer_offsets. In a cluster they are
in the database, and the coordinator has those of the groups that it coordinates in its
memory. It writes them into a file that the exporter of the same node reads. So each
group is shown by one node, and after that node's death by the next one.

The file is replaced as a whole, and never synced: it can be made again at any time. It
has a msgpack map {group: {topic: {partition: offset}}} and the number of offsets that
are left out, in an array of two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

import msgpack

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.timers import Timers
from mpbroker.storage.files.log_files import write_file

_LOG = get_logger(__name__)
_FILE: Final = "cluster-group-positions"
_INTERVAL_MS: Final = 1000
# The coordinator answers no request meanwhile: at most this part of its time.
_SHARE_OF_TIME: Final = 0.01
MAX_POSITIONS: Final = 20_000

Position = tuple[str, str, int, int]
"""A group, a topic, a partition, and the offset that the group has committed there."""


class Positions(NamedTuple):
    """Committed offsets of groups.

    Attributes:
        hidden: how many more there are, which were left out.
    """

    found: list[Position]
    hidden: int


class GroupPositions:
    """Writes the file once a second, if something has changed.

    Args:
        home: the first log directory.
        committed: returns all committed offsets of this node's groups.
        timers: the coordinator's timers.
    """

    def __init__(
        self, home: str, committed: Callable[[], Iterable[Position]], timers: Timers
    ) -> None:
        self._path = f"{home}/{_FILE}"
        self._committed = committed
        self._timers = timers
        self._written: bytes | None = None
        self._has_failed = False

    def look(self, now_ms: int) -> None:
        """Write the file if it must be, and schedule the next look.

        Args:
            now_ms: the coordinator's clock.
        """
        began = time.perf_counter()
        content = _encode(self._committed())
        if content != self._written:
            self._write(content)
        spent_ms = (time.perf_counter() - began) * 1000
        pause_ms = max(_INTERVAL_MS, round(spent_ms / _SHARE_OF_TIME))
        self._timers.schedule("group positions", now_ms + pause_ms, self.look)

    def _write(self, content: bytes) -> None:
        try:
            write_file(self._path, content, sync=False)
        except OSError as error:
            # Groups go on, even if no metric tells of them.
            if not self._has_failed:
                _LOG.warning(
                    "metrics show old offsets of groups, until %s can be written: %s",
                    self._path,
                    error,
                )
            self._has_failed = True
        else:
            self._written, self._has_failed = content, False


def _encode(positions: Iterable[Position]) -> bytes:
    groups: dict[str, dict[str, dict[int, int]]] = {}
    hidden = -MAX_POSITIONS
    for group, topic, partition, offset in positions:
        hidden += 1
        if hidden <= 0:
            groups.setdefault(group, {}).setdefault(topic, {})[partition] = offset
    content: bytes = msgpack.packb((groups, max(0, hidden)))
    return content


def read_positions(home: str) -> Positions:
    """Read the file; there is nothing in it if it is damaged, or not there yet.

    Args:
        home: the first log directory.
    """
    try:
        with open(f"{home}/{_FILE}", "rb") as file:
            groups, hidden = msgpack.unpackb(file.read(), strict_map_key=False)
        found = [
            (str(group), str(topic), int(partition), int(offset))
            for group, topics in groups.items()
            for topic, partitions in topics.items()
            for partition, offset in partitions.items()
        ]
        return Positions(found, int(hidden))
    except (OSError, ValueError, TypeError, AttributeError, msgpack.UnpackException):
        return Positions([], 0)
