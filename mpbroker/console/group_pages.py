"""Show groups in the console: members, offsets and lag. Reset their offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from mpbroker.client.admin import group_admin
from mpbroker.client.admin.topic_admin import LATEST, list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.console.sessions import Session
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

PAGE_ROWS: Final = 100
SHARE: Final = "share"
# The most partitions, and the most members, that are shown of one group.
MAX_PARTITIONS: Final = 2000


def list_groups(
    session: Session, match: str, start: int, *, is_fresh: bool = False
) -> dict[str, Any]:
    """Return a page of the groups that the user may see, sorted by id.

    Args:
        session: the user's session.
        match: a part of the ids; case does not count.
        start: the number of groups before the page.
        is_fresh: whether to ask the broker, even if the cached list is recent.
    """

    def ask(cluster: Cluster) -> list[dict[str, Any]]:
        return [
            {
                "id": each.group_id,
                "state": each.group_state,
                "type": each.group_type,
                "protocol": each.protocol_type,
            }
            for each in group_admin.list_groups(cluster)
        ]

    part = match.casefold()
    found = [
        each
        for each in session.remembered("groups", ask, is_fresh=is_fresh)
        if part in each["id"].casefold()
    ]
    page = found[start : start + PAGE_ROWS]
    return {"total": len(found), "start": start, "rows": page}


def describe_group(cluster: Cluster, group_id: str) -> dict[str, Any]:
    """Return a group's members and offsets.

    A share group commits no offsets: its offset in a partition is that of the first
    unfinished record, and its lag is the broker's count of unfinished records. Its
    partitions have no owner, since members share them. The end of a partition, and so
    the lag, is None if the user may not know it.
    """
    group = group_admin.describe_group(cluster, group_id)
    owners = {
        where: member.member_id
        for member in group.members
        for where in member.partitions
    }
    lags: dict[TopicPartition, int | None] = {}
    if group.type.lower() == SHARE:
        starts = group_admin.share_offsets(cluster, group_id)
        committed = _begun(starts)
        shown = sorted({*starts, *owners})[:MAX_PARTITIONS]
        ends = _offsets_at(cluster, shown, LATEST)
        lags = {where: each.lag for where, each in starts.items()}
        owners = {}
    else:
        committed = group_admin.committed_offsets(cluster, group_id)
        shown = sorted({*committed, *owners})[:MAX_PARTITIONS]
        ends = _offsets_at(cluster, shown, LATEST)
        lags = {where: _lag(committed.get(where), ends.get(where)) for where in shown}
    return {
        "id": group_id,
        "type": group.type,
        "state": group.state,
        "assignor": group.assignor,
        "members": [
            {
                "id": each.member_id,
                "instance": each.instance_id,
                "client_id": each.client_id,
                "host": each.host,
                "partitions": [
                    str(where) for where in each.partitions[:MAX_PARTITIONS]
                ],
            }
            for each in group.members[:MAX_PARTITIONS]
        ],
        "total": len({*committed, *owners, *lags}),
        "offsets": [
            {
                "topic": where.topic,
                "partition": where.partition,
                "committed": committed.get(where),
                "end": ends.get(where),
                "lag": lags.get(where),
                "member": owners.get(where),
            }
            for where in shown
        ],
    }


def _begun(
    starts: Mapping[TopicPartition, group_admin.ShareOffset],
) -> dict[TopicPartition, int]:
    """Return a share group's start offsets, without partitions that have none yet."""
    return {
        where: each.start_offset
        for where, each in starts.items()
        if each.start_offset is not None
    }


def _is_share(cluster: Cluster, group_id: str) -> bool:
    """Return whether a group is a share group; False if it does not exist."""
    try:
        return group_admin.describe_group(cluster, group_id).type.lower() == SHARE
    except ApiError as error:
        if error.error_code is ErrorCode.GROUP_ID_NOT_FOUND:
            return False
        raise


def _lag(committed: int | None, end: int | None) -> int | None:
    return None if committed is None or end is None else max(0, end - committed)


def _offsets_at(
    cluster: Cluster, partitions: Iterable[TopicPartition], timestamp: int
) -> dict[TopicPartition, int]:
    """Return the first offset at or after a time (ms, or LATEST), for each partition.

    Topics that were deleted, or that the user may not describe, are left out.
    """
    by_topic: dict[str, list[TopicPartition]] = {}
    for where in partitions:
        by_topic.setdefault(where.topic, []).append(where)
    found: dict[TopicPartition, int] = {}
    for topic, wanted in by_topic.items():
        try:
            leaders = group_admin.partitions_of(cluster, [topic])
            asked = {where: timestamp for where in wanted if where in leaders}
            answers = list_offsets(cluster, asked, leaders)
        except ApiError:
            continue
        found |= {where: each.offset for where, each in answers.items()}
    return found


def plan_reset(
    cluster: Cluster, group_id: str, topic: str, timestamp: int
) -> dict[str, Any]:
    """Return the offsets that a reset would give a group, and change nothing.

    Args:
        timestamp: a time in ms, EARLIEST or LATEST. In a partition without a record of
            that time or later, the offset is its end.
    """
    leaders = group_admin.partitions_of(cluster, [topic])
    found = list_offsets(cluster, dict.fromkeys(leaders, timestamp), leaders)
    late = [where for where, each in found.items() if each.offset < 0]
    found |= list_offsets(cluster, dict.fromkeys(late, LATEST), leaders)
    if _is_share(cluster, group_id):
        before = _begun(group_admin.share_offsets(cluster, group_id))
    else:
        before = group_admin.committed_offsets(cluster, group_id)
    return {
        "group": group_id,
        "topic": topic,
        "rows": [
            {
                "partition": where.partition,
                "before": before.get(where),
                "after": found[where].offset,
            }
            for where in sorted(found)
        ],
    }


def reset(
    cluster: Cluster, group_id: str, topic: str, offsets: Mapping[int, int]
) -> None:
    """Set a group's offsets in a topic, by partition, as planned before."""
    wanted = {TopicPartition(topic, number): at for number, at in offsets.items()}
    if _is_share(cluster, group_id):
        group_admin.alter_share_offsets(cluster, group_id, wanted)
        return
    group_admin.alter_offsets(cluster, group_id, wanted)
