"""GroupMetadata names the group's member that commits offsets in a transaction."""

from __future__ import annotations

import warnings
from typing import NamedTuple


class GroupMetadata(NamedTuple):
    """Names the group, and its member, whose offsets a producer's transaction commits.

    The group's id is enough if no member of the group reads what is committed.
    """

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


def group_of(group: GroupMetadata | str, stacklevel: int) -> GroupMetadata:
    """Return the group whose offsets a transaction commits; warn if it is only a name.

    Args:
        group: the group and its member, or the group's name.
        stacklevel: the number of frames from here to the user's call.
    """
    if isinstance(group, GroupMetadata):
        return group
    warnings.warn(
        f"send_offsets_to_transaction({group!r:.100}): with a group's name alone, a"
        " member that was replaced commits all the same, and records are processed"
        " twice; give consumer.group_metadata(), or GroupMetadata(name) if no group"
        " shares the work",
        UserWarning,
        stacklevel + 1,
    )
    return GroupMetadata(group)
