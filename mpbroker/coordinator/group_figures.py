"""Write counts of groups to shared memory, for the metrics exporter.

The coordinator has its own numbers there. If it is restarted, its successor adds to the
counters that are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from typing import TYPE_CHECKING, Final

from mpbroker.ipc.layout import GROUP_STATES, HANDLER_GROUPS, GroupFigure
from mpbroker.protocol.messages.share_acknowledge import AcknowledgeType

if TYPE_CHECKING:
    from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator

# To count 10,000 groups takes some milliseconds.
_INTERVAL_MS: Final = 1000

_OF_TYPE: Final = {
    AcknowledgeType.ACCEPT: GroupFigure.ACCEPTED,
    AcknowledgeType.RELEASE: GroupFigure.RELEASED,
    AcknowledgeType.REJECT: GroupFigure.REJECTED,
    AcknowledgeType.RENEW: GroupFigure.RENEWED,
}


class GroupFigures:
    """Counts groups, share sessions and acknowledged records of share groups.

    Args:
        words: the control segment of shared memory, as 64-bit words.
        row: the index of the coordinator's first word in it.
        groups: the groups.
        sessions: the share sessions.
    """

    def __init__(
        self, words: memoryview, row: int, groups: GroupCoordinator, sessions: Sized
    ) -> None:
        self._words = words
        self._first = row + HANDLER_GROUPS
        self._groups = groups
        self._sessions = sessions
        self._look_ms = 0

    def acknowledged(self, kind: int, records: int) -> None:
        """Count acknowledged records of share groups, by acknowledge type.

        Ignore offsets without a record (type GAP).

        Args:
            kind: the AcknowledgeType.
            records: the number of records.
        """
        figure = _OF_TYPE.get(AcknowledgeType(kind))
        if figure is not None:
            self._words[self._first + figure] += records

    def locks_ended(self, records: int) -> None:
        """Count records of share groups that were not acknowledged in time."""
        self._words[self._first + GroupFigure.LOCKS_ENDED] += records

    def look(self, now_ms: int) -> None:
        """Write the present numbers of groups and sessions, at most once a second."""
        if now_ms < self._look_ms:
            return
        self._look_ms = now_ms + _INTERVAL_MS
        counts = self._groups.counts()
        words, first = self._words, self._first
        for type_and_state, figure in GROUP_STATES.items():
            words[first + figure] = counts[type_and_state]
        of_type = Counter[str]()
        for (group_type, _), number in counts.items():
            of_type[group_type] += number
        words[first + GroupFigure.CLASSIC] = of_type["classic"]
        words[first + GroupFigure.CONSUMER] = of_type["consumer"]
        words[first + GroupFigure.SHARE_SESSIONS] = len(self._sessions)
