"""Make metrics of the figures that the coordinator writes to shared memory.

They are numbers of groups by state, and counts of share groups.
"""

from __future__ import annotations

from typing import Final

from mpbroker.exporter.exposition import Family, counter, gauge
from mpbroker.ipc.layout import (
    COORDINATOR,
    GROUP_STATES,
    HANDLER_GROUPS,
    GroupFigure,
    handler_row,
)

GROUPS: Final = "mpbroker_groups"
CLASSIC_GROUPS: Final = "mpbroker_classic_groups"
CONSUMER_GROUPS: Final = "mpbroker_consumer_groups"
SHARE_GROUPS: Final = "mpbroker_share_groups"
STREAMS_GROUPS: Final = "mpbroker_streams_groups"
OF_TYPE: Final = {
    "classic": CLASSIC_GROUPS,
    "consumer": CONSUMER_GROUPS,
    "share": SHARE_GROUPS,
    "streams": STREAMS_GROUPS,
}
SHARE_SESSIONS: Final = "mpbroker_share_sessions"
ACKNOWLEDGEMENTS: Final = "mpbroker_share_acknowledgements_total"
LOCK_TIMEOUTS: Final = "mpbroker_share_lock_timeouts_total"


def group_families(words: memoryview) -> tuple[Family, ...]:
    """Return the metrics of groups, from the numbers that the coordinator writes.

    Args:
        words: the control segment, the shared memory in which these numbers are.
    """
    first = handler_row(COORDINATOR) + HANDLER_GROUPS

    def figure(which: GroupFigure) -> int:
        return words[first + which]

    by_state = {
        group_type: gauge(name, f"Groups of type {group_type}, by state.")
        for group_type, name in OF_TYPE.items()
    }
    for (group_type, state), which in GROUP_STATES.items():
        by_state[group_type].add(figure(which), state=state)
    for group_type in ("classic", "consumer", "streams"):
        by_state[group_type].add(0, state="Dead")  # such a group is not kept
    groups = gauge(GROUPS, "Groups that the coordinator has, by type.")
    groups.add(figure(GroupFigure.CLASSIC), type="classic")
    groups.add(figure(GroupFigure.CONSUMER), type="consumer")
    for group_type in ("share", "streams"):
        number = sum(
            figure(which)
            for (each, _), which in GROUP_STATES.items()
            if each == group_type
        )
        groups.add(number, type=group_type)
    sessions = gauge(SHARE_SESSIONS, "Members of share groups that fetch.")
    sessions.add(figure(GroupFigure.SHARE_SESSIONS))
    acknowledged = counter(
        ACKNOWLEDGEMENTS, "Records that members of share groups have acknowledged."
    )
    acknowledged.add(figure(GroupFigure.ACCEPTED), type="Accept")
    acknowledged.add(figure(GroupFigure.RELEASED), type="Release")
    acknowledged.add(figure(GroupFigure.REJECTED), type="Reject")
    acknowledged.add(figure(GroupFigure.RENEWED), type="Renew")
    ended = counter(
        LOCK_TIMEOUTS, "Records of share groups that were not acknowledged in time."
    )
    ended.add(figure(GroupFigure.LOCKS_ENDED))
    return groups, *by_state.values(), sessions, acknowledged, ended
