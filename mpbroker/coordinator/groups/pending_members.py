"""PendingMembers: clients of classic groups that have a member id and did not join yet.

A JoinGroup without a member id is answered with MEMBER_ID_REQUIRED and an id, and the
client joins again with it, at once. The id is kept for the client's session timeout,
which may be half an hour. So a client that never joins again could have as many as it
can ask for, in groups that exist for them alone. They are limited over all groups: the
oldest ones are forgotten first, and a client that comes back so late is answered
UNKNOWN_MEMBER_ID, at which it begins anew.

Source: KIP-394. Kafka has no limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from mpbroker.coordinator.groups.classic_group import ClassicGroup
from mpbroker.coordinator.timers import Timers

MAX_PENDING_MEMBERS: Final = 65_536
# An id begins with the client's own, which may have 32 KB.
_MAX_BYTES: Final = 64 * 1024 * 1024


class PendingMembers:
    """Keeps the pending members of all groups, and forgets them in time.

    Args:
        timers: the coordinator's timers.
        forgotten: called with the group, the member's id and the time in ms after the
            member was removed from the group's ``pending_join_members`` because it has
            not joined.
    """

    def __init__(
        self, timers: Timers, forgotten: Callable[[ClassicGroup, str, int], None]
    ) -> None:
        self._timers = timers
        self._forgotten = forgotten
        # In the order in which they came, also those that have joined meanwhile.
        self._queue: deque[tuple[ClassicGroup, str]] = deque()
        self._bytes = 0

    def add(
        self, group: ClassicGroup, member_id: str, now_ms: int, session_ms: int
    ) -> None:
        """Keep a new id until its member joins, or its session timeout is over."""
        group.pending_join_members.add(member_id)
        self._timers.schedule(
            _timer(group, member_id),
            now_ms + session_ms,
            lambda at_ms: self._forget(group, member_id, at_ms),
        )
        self._queue.append((group, member_id))
        self._bytes += len(member_id)
        while len(self._queue) > MAX_PENDING_MEMBERS or self._bytes > _MAX_BYTES:
            oldest_group, oldest_id = self._queue.popleft()
            self._bytes -= len(oldest_id)
            self._forget(oldest_group, oldest_id, now_ms)

    def ended(self, group: ClassicGroup, member_id: str) -> None:
        """Note that a member has joined or left, and is not pending any more."""
        self._timers.cancel(_timer(group, member_id))

    def _forget(self, group: ClassicGroup, member_id: str, now_ms: int) -> None:
        if member_id in group.pending_join_members:
            group.pending_join_members.discard(member_id)
            self._timers.cancel(_timer(group, member_id))
            self._forgotten(group, member_id, now_ms)


def _timer(group: ClassicGroup, member_id: str) -> tuple[str, str, str]:
    return "pending", group.group_id, member_id
