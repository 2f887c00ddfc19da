"""`mpbroker group`: list, describe, delete, reset-offsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

from mpbroker.cli.command_group import CommandGroup
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import (
    bootstrap_option,
    client_settings,
    complete_group,
    complete_topic,
    format_option,
    open_cluster,
    timeout_option,
)
from mpbroker.cli.output import print_json, print_table
from mpbroker.cli.records.start_offset import parse_offsets, resolve_bounds
from mpbroker.client.admin import group_admin
from mpbroker.client.admin.topic_admin import EARLIEST, LATEST, list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.errors import UnsupportedVersionError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

_RESET_HELP = """\
Store other positions for a group without members.

A position is the committed offset of a partition; that of a share group is the first
offset that is not finished.

Only shows the new positions; with --execute it stores them.

\b
  mpbroker group reset-offsets g -t events -o beginning
  mpbroker group reset-offsets g -t events:0,1 -o 1200 --execute
  mpbroker group reset-offsets g --all-topics -o s@2026-11-28T12:00:00Z --execute
  mpbroker group reset-offsets g --all-topics --shift-by -10 --execute
"""


@click.group("group", cls=CommandGroup)
def command() -> None:
    """List, describe and delete groups, and reset their positions."""


def _describe_existing(cluster: Cluster, group_id: str) -> group_admin.GroupDescription:
    try:
        return group_admin.describe_group(cluster, group_id)
    except ApiError as error:
        if error.error_code is ErrorCode.GROUP_ID_NOT_FOUND:
            raise CliError(str(error), ExitCode.NOT_FOUND) from None
        raise


@command.command("list")
@click.option(
    "--state",
    "states",
    multiple=True,
    help="Only groups in this state; may be repeated.",
)
@click.option(
    "--type",
    "types",
    type=click.Choice(["classic", "consumer", "share", "streams"]),
    multiple=True,
    help="Only groups of this protocol; consumer is KIP-848's, share KIP-932's,"
    " streams KIP-1071's.",
)
@bootstrap_option
@timeout_option
@format_option
def list_groups(
    states: Sequence[str],
    types: Sequence[str],
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    """List groups."""
    with open_cluster(bootstrap, timeout_s) as cluster:
        groups = group_admin.list_groups(cluster, states, types)
    if output_format == "json":
        print_json(
            [
                {
                    "group": group.group_id,
                    "type": group.group_type.lower(),
                    "state": group.group_state,
                    "protocol_type": group.protocol_type,
                }
                for group in groups
            ]
        )
        return
    for group in groups:
        print(group.group_id)


@command.command("describe", short_help="Show members, positions and lag.")
@click.argument(
    "group_ids",
    nargs=-1,
    required=True,
    metavar="GROUP...",
    shell_complete=complete_group,
)
@bootstrap_option
@timeout_option
@format_option
def describe(
    group_ids: Sequence[str], bootstrap: str, timeout_s: float, output_format: str
) -> None:
    """Show each partition's member, position and lag."""
    with open_cluster(bootstrap, timeout_s) as cluster:
        described = [_describe(cluster, group_id) for group_id in group_ids]
    if output_format == "json":
        print_json(described)
        return
    for index, group in enumerate(described):
        if index:
            print()
        _print_group(group)


def _describe(cluster: Cluster, group_id: str) -> dict[str, Any]:
    group = _describe_existing(cluster, group_id)
    if group.type == "share":
        return _describe_share(cluster, group)
    committed = group_admin.committed_offsets(cluster, group_id)
    reader = {where: member for member in group.members for where in member.partitions}
    partitions = sorted(committed.keys() | reader.keys())
    ends = _ends(cluster, partitions)
    rows = []
    for where in partitions:
        offset, end = committed.get(where), ends.get(where)
        known = offset is not None and end is not None
        member = reader.get(where)
        rows.append(
            {
                "topic": where.topic,
                "partition": where.partition,
                "offset": offset,
                "end": end,
                "lag": max(0, end - offset) if known else None,  # type: ignore[operator]
                "member_id": member.member_id if member else None,
                "host": member.host if member else None,
                "client_id": member.client_id if member else None,
            }
        )
    return _described(group, rows)


def _describe_share(
    cluster: Cluster, group: group_admin.GroupDescription
) -> dict[str, Any]:
    """Describe a share group: several of its members may read the same partition."""
    offsets = group_admin.share_offsets(cluster, group.group_id)
    assigned = {where for member in group.members for where in member.partitions}
    partitions = sorted(offsets.keys() | assigned)
    ends = _ends(cluster, partitions)
    unknown = group_admin.ShareOffset(None, None)
    rows = [
        {
            "topic": where.topic,
            "partition": where.partition,
            "offset": offsets.get(where, unknown).start_offset,
            "end": ends.get(where),
            "lag": offsets.get(where, unknown).lag,
            "member_id": None,
            "host": None,
            "client_id": None,
        }
        for where in partitions
    ]
    return _described(group, rows)


def _described(
    group: group_admin.GroupDescription, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "group": group.group_id,
        "type": group.type,
        "state": group.state,
        "assignor": group.assignor or None,
        "epoch": group.epoch,
        "members": [
            {
                **member._asdict(),
                "partitions": [
                    {"topic": where.topic, "partition": where.partition}
                    for where in member.partitions
                ],
            }
            for member in group.members
        ],
        "partitions": rows,
    }


def _ends(
    cluster: Cluster, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, int]:
    """Return the log end offsets of those given partitions that can be read now."""
    wanted = set(partitions)
    names = sorted({where.topic for where in wanted})
    leaders = {
        TopicPartition(topic.name or "", partition.partition_index): partition.leader_id
        for topic in (cluster.metadata(names).topics if names else ())
        if not topic.error_code
        for partition in topic.partitions
        if partition.leader_id >= 0
    }
    asked = dict.fromkeys(wanted & leaders.keys(), LATEST)
    answers = list_offsets(cluster, asked, leaders)
    return {where: answer.offset for where, answer in answers.items()}


def _print_group(group: dict[str, Any]) -> None:
    members = group["members"]
    how = f", {group['assignor']}" if group["assignor"] else ""
    count = _members(len(members))
    print(f"{group['group']}: {group['type']}, {group['state']}{how}, {count}")
    names = ["topic", "partition", "offset", "end", "lag"]
    headings = ["TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG"]
    if group["type"] == "share":
        headings[2] = "START-OFFSET"  # and no member: several may share a partition
    else:
        names += ["member_id", "host", "client_id"]
        headings += ["CONSUMER-ID", "HOST", "CLIENT-ID"]
    if group["partitions"]:
        print_table(
            headings, [[row[name] for name in names] for row in group["partitions"]]
        )
    idle = [member for member in members if not member["partitions"]]
    for member in idle:
        print(f"{member['member_id']} ({member['host']}) reads nothing")


@command.command("delete")
@click.argument(
    "group_ids",
    nargs=-1,
    required=True,
    metavar="GROUP...",
    shell_complete=complete_group,
)
@click.option("--if-exists", is_flag=True, help="Accept a group that does not exist.")
@bootstrap_option
@timeout_option
@format_option
def delete(
    group_ids: Sequence[str],
    if_exists: bool,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    """Delete groups without members, and their positions."""
    gone: list[dict[str, object]] = []
    with open_cluster(bootstrap, timeout_s) as cluster:
        for group_id in group_ids:
            try:
                group_admin.delete_group(cluster, group_id)
            except ApiError as error:
                if error.error_code is not ErrorCode.GROUP_ID_NOT_FOUND:
                    raise
                if not if_exists:
                    raise CliError(str(error), ExitCode.NOT_FOUND) from None
                said, deleted = "does not exist", False
            else:
                said, deleted = "deleted", True
            gone.append({"group": group_id, "deleted": deleted})
            if output_format == "text":
                print(f"group {group_id} {said}")
    if output_format == "json":
        print_json(gone)


@command.command("reset-offsets", help=_RESET_HELP)
@click.argument("group_id", metavar="GROUP", shell_complete=complete_group)
@click.option(
    "-t",
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC[:PARTITION,...]",
    shell_complete=complete_topic,
    help="May be repeated.",
)
@click.option(
    "--all-topics", is_flag=True, help="All topics in which the group has positions."
)
@click.option(
    "-o",
    "--to",
    "to",
    metavar="OFFSET",
    help="beginning, end, an offset, -N (the last N records of each partition), or"
    " s@TIME (from that time on, in ms or ISO 8601).",
)
@click.option(
    "--shift-by", type=int, metavar="N", help="Forward by N offsets; back if negative."
)
@click.option("--execute", is_flag=True, help="Store the new positions.")
@bootstrap_option
@timeout_option
@format_option
def reset_offsets(
    group_id: str,
    topics: Sequence[str],
    all_topics: bool,
    to: str | None,
    shift_by: int | None,
    execute: bool,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    if bool(topics) == all_topics:
        raise click.UsageError("give either --topic or --all-topics")
    if (to is None) == (shift_by is None):
        raise click.UsageError("give either --to or --shift-by")
    if to is not None and to.startswith("e@"):
        raise click.BadParameter("e@ says where to stop", param_hint="'--to'")
    with open_cluster(bootstrap, timeout_s) as cluster:
        share = _share_offsets(cluster, group_id)
        if share is None:
            before = group_admin.committed_offsets(cluster, group_id)
        else:
            before = share
        if topics:
            leaders = _chosen(cluster, topics)
        else:
            if not before:
                raise CliError(
                    f"group {group_id!r} has no positions; name topics with --topic",
                    ExitCode.NOT_FOUND,
                )
            names = sorted({where.topic for where in before})
            found = group_admin.partitions_of(cluster, names)
            leaders = {where: found[where] for where in before if where in found}
        after = _targets(cluster, leaders, before, to, shift_by, bootstrap)
        if execute:
            _check_is_empty(cluster, group_id)
            if share is None:
                group_admin.alter_offsets(cluster, group_id, after)
            else:
                group_admin.alter_share_offsets(cluster, group_id, after)
    rows = [
        {
            "topic": where.topic,
            "partition": where.partition,
            "before": before.get(where),
            "after": offset,
        }
        for where, offset in sorted(after.items())
    ]
    if output_format == "json":
        print_json({"group": group_id, "executed": execute, "partitions": rows})
        return
    print_table(
        ["TOPIC", "PARTITION", "CURRENT-OFFSET", "NEW-OFFSET"],
        [list(row.values()) for row in rows],
    )
    if execute:
        print("the new offsets are stored")
    else:
        print("nothing is stored yet; --execute stores it")


def _members(count: int) -> str:
    return f"{count} member{'' if count == 1 else 's'}"


def _share_offsets(cluster: Cluster, group_id: str) -> dict[TopicPartition, int] | None:
    """Return a share group's start offset by partition; None: no such share group."""
    try:
        found = group_admin.share_offsets(cluster, group_id)
    except UnsupportedVersionError:
        return None
    except ApiError as error:
        if error.error_code is not ErrorCode.GROUP_ID_NOT_FOUND:
            raise
        return None
    return {
        where: each.start_offset
        for where, each in found.items()
        if each.start_offset is not None
    }


def _check_is_empty(cluster: Cluster, group_id: str) -> None:
    """Raise CliError if a group has members, which would not notice a reset."""
    try:
        group = group_admin.describe_group(cluster, group_id)
    except ApiError as error:
        if error.error_code is not ErrorCode.GROUP_ID_NOT_FOUND:
            raise
        return  # a new group, which gets its first positions
    if group.members:
        raise CliError(
            f"group {group_id!r} has {_members(len(group.members))} and is"
            f" {group.state}; its positions can be reset while it has no members"
        )


def _chosen(cluster: Cluster, items: Sequence[str]) -> dict[TopicPartition, int]:
    """Return the leader's node id of each partition that the command line names."""
    chosen: dict[TopicPartition, int] = {}
    for item in items:
        name, colon, numbers = item.partition(":")
        found = group_admin.partitions_of(cluster, [name])
        if not colon:
            chosen |= found
            continue
        for number in numbers.split(","):
            if not (number.isascii() and number.isdigit()):
                raise click.BadParameter(
                    f"{item!r} is not TOPIC:PARTITION,...", param_hint="'--topic'"
                )
            where = TopicPartition(name, int(number))
            if where not in found:
                raise CliError(
                    f"topic {name!r} has no partition {number}, only"
                    f" 0..{len(found) - 1}",
                    ExitCode.NOT_FOUND,
                )
            chosen[where] = found[where]
    return chosen


def _targets(
    cluster: Cluster,
    leaders: dict[TopicPartition, int],
    before: dict[TopicPartition, int],
    to: str | None,
    shift_by: int | None,
    bootstrap: str,
) -> dict[TopicPartition, int]:
    """Return the offsets to reset a group to, limited to those that the logs have.

    Args:
        cluster: the brokers.
        leaders: the leader's node id, by partition.
        before: the group's offset now, by partition.
        to: a place as for `-o` of `mpbroker consume`; used if ``shift_by`` is None.
        shift_by: how far to move each offset; back if negative.
        bootstrap: the addresses to connect to first.

    Raises:
        CliError: a partition has no offset to shift.
    """
    if shift_by is None:
        wanted = parse_offsets([to or ""])
        starts = resolve_bounds(
            cluster,
            leaders,
            wanted,
            stop_at_end=False,
            settings=client_settings(bootstrap),
        ).starts
    else:
        missing = sorted(leaders.keys() - before.keys())
        if missing:
            raise CliError(
                f"{missing[0]} has no position to shift; give --to instead",
                ExitCode.NOT_FOUND,
            )
        starts = {where: before[where] + shift_by for where in leaders}
    first = list_offsets(cluster, dict.fromkeys(leaders, EARLIEST), leaders)
    last = list_offsets(cluster, dict.fromkeys(leaders, LATEST), leaders)
    return {
        where: min(max(offset, first[where].offset), last[where].offset)
        for where, offset in starts.items()
    }
