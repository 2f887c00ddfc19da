"""When members of groups were last heard of: a table for the coordinator's successor.

A successor finds the members in the log, but not how long each has been silent. If it
gave them all their full session timeouts, a dead member would stay for as long as
coordinators are killed more often than that. So the coordinator stores the time at each
request of a member.

    word     field        notes
    0        latest       when any member was last heard of, ms
    1..      members      when a member was last heard of, ms; 0: unknown

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
    """The table, as one coordinator sees it.

    Args:
        words: the table.
    """

    def __init__(self, words: memoryview | MutableSequence[int]) -> None:
        self._words = words
        self._latest_before = words[_LATEST]  # what the predecessor has left

    @staticmethod
    def create_segment() -> Segment:
        return Segment.create("mpbroker-member-sessions", MEMBER_SESSION_WORDS * 8)

    def heard(self, member_id: str, at_ms: int) -> None:
        """Note that a request of a member has come."""
        self._words[_LATEST] = self._words[_at(member_id)] = at_ms

    def take_over(self, member_id: str, now_ms: int) -> int:
        """Return for how many ms a member was silent when the predecessor ended.

        Its silence goes on from there, for the next successor as well.
        """
        at = _at(member_id)
        heard_ms = self._words[at]
        silence_ms = max(self._latest_before - heard_ms, 0) if heard_ms else 0
        self._words[at] = now_ms - silence_ms
        self._words[_LATEST] = max(self._words[_LATEST], now_ms)
        return silence_ms

    def forget(self, member_id: str) -> None:
        """Note that a member's session does not run now: its request is parked."""
        self._words[_at(member_id)] = 0


def _at(member_id: str) -> int:
    return _MEMBERS + (crc32(member_id.encode()) & _MASK)
