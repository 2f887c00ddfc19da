"""GroupMetadata names the group's member that commits offsets in a transaction."""

from __future__ import annotations

from typing import NamedTuple


class GroupMetadata(NamedTuple):
    """Names the group, and its member, whose offsets a producer's transaction commits.

    The group's id may be enough.
    """

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None
