"""When members of groups were last heard of: a table for the coordinator's successor.

A successor finds the members in the log, but not how long each has been silent. If it
gave them all their full session timeouts, a dead member would stay for as long as
coordinators are killed more often than that. So the coordinator stores the time at each
request of a member.

    word     field        notes
    0        latest       when any member was last heard of, ms
    1..      members      when a member was last heard of, or got its id, ms; 0: unknown

Only the coordinator writes. A member has one word, which a hash of its id chooses. If
two members share a word, the later time counts for both, so a session may last longer
and never ends early. The time for which no coordinator lived is not a member's silence.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Final
from zlib import crc32

from mpbroker.ipc.segment import Segment

_LATEST: Final = 0
_MEMBERS: Final = 1
_MASK: Final = 0xFFFF  # 65,536 words: 512 KiB, of which only used pages exist
MEMBER_SESSION_WORDS: Final = _MEMBERS + _MASK + 1


class MemberSessions:
    """The table of times at which members of groups were last heard of.

    Args:
        words: the words of the table, in shared memory.
    """

    def __init__(self, words: memoryview | MutableSequence[int]) -> None:
        self._words = words
        self._latest_before = words[_LATEST]  # what the predecessor has left

    @staticmethod
    def create_segment() -> Segment:
        return Segment.create("mpbroker-member-sessions", MEMBER_SESSION_WORDS * 8)

    def heard(self, member_id: str, at_ms: int) -> None:
        """Store the time at which a member's request has come."""
        self._words[_LATEST] = self._words[_at(member_id)] = at_ms

    def heard_while_loading(self, member_id: str, at_ms: int) -> None:
        """Store the time at which a request came for a group that is not loaded yet.

        Store nothing for a member that no coordinator has heard of. ``take_over`` then
        finds that the member was not silent. The latest time stays: if this coordinator
        dies before it has loaded the groups, its successor would otherwise count the
        time since then as a silence of all other members.
        """
        if self._words[_at(member_id)]:
            self._words[_at(member_id)] = at_ms

    def take_over(self, member_id: str, now_ms: int) -> int:
        """Return for how many ms a member was silent when the last coordinator ended.

        The table is changed so that the silence goes on from there, also for the next
        successor.
        """
        at = _at(member_id)
        heard_ms = self._words[at]
        silence_ms = max(self._latest_before - heard_ms, 0) if heard_ms else 0
        self._words[at] = now_ms - silence_ms
        self._words[_LATEST] = max(self._words[_LATEST], now_ms)
        return silence_ms

    def forget(self, member_id: str) -> None:
        """Delete the time of a member that has gone, or whose request is parked."""
        self._words[_at(member_id)] = 0

    def had_heard(self, member_id: str) -> bool:
        """Return whether a predecessor had heard of a member, and none since.

        It may have given out the member's id. The answer may be true for another id
        that shares the word.
        """
        return 0 < self._words[_at(member_id)] <= self._latest_before


def _at(member_id: str) -> int:
    return _MEMBERS + (crc32(member_id.encode()) & _MASK)
