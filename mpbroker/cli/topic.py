"""`mpbroker topic`: create, list, describe, alter, delete."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, Final

import click

from mpbroker.cli.command_group import CommandGroup
from mpbroker.cli.config_values import refuse_unknown
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import (
    bootstrap_option,
    complete_topic,
    format_option,
    open_cluster,
    timeout_option,
)
from mpbroker.cli.output import print_json, print_table
from mpbroker.client.admin import config_admin, topic_admin
from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.errors import UnsupportedVersionError, describe_error
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.describe_configs import DescribeConfigsResourceResult
from mpbroker.protocol.messages.metadata import MetadataResponseTopic

_CONFIG_SOURCES: Final = {
    1: "topic",
    2: "broker (dynamic)",
    3: "cluster (dynamic)",
    4: "broker",
    5: "default",
}
_SET_ON_TOPIC: Final = 1


@click.group("topic", cls=CommandGroup)
def command() -> None:
    """Create, list, describe, alter and delete topics."""


def _parse_configs(items: Iterable[str]) -> dict[str, str]:
    configs: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(
                f"{item!r} is not KEY=VALUE", param_hint="'--config'"
            )
        configs[key.strip()] = value
    return configs


_config_option = click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a topic setting, such as retention.ms=3600000; may be repeated.",
)


@command.command("create")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "-p",
    "--partitions",
    type=click.IntRange(min=1, max=2**31 - 1),
    help="Number of partitions. Default: the broker's num.partitions.",
)
@click.option(
    "--replication-factor",
    type=click.IntRange(min=-(2**15), max=2**15 - 1),
    default=-1,
    help="1, or -1 for the broker's default; mpbroker keeps one replica.",
)
@_config_option
@click.option("--if-not-exists", is_flag=True, help="Accept a topic that exists.")
@click.option("--validate-only", is_flag=True, help="Only check; create nothing.")
@bootstrap_option
@timeout_option
@format_option
def create(
    names: Sequence[str],
    partitions: int | None,
    replication_factor: int,
    configs: Sequence[str],
    if_not_exists: bool,
    validate_only: bool,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    """Create topics."""
    settings = _parse_configs(configs)
    created = []
    with open_cluster(bootstrap, timeout_s) as cluster:
        for name in names:
            try:
                result = topic_admin.create_topic(
                    cluster,
                    name,
                    partitions=partitions or -1,
                    replication_factor=replication_factor,
                    configs=settings,
                    validate_only=validate_only,
                )
            except ApiError as error:
                exists = error.error_code == ErrorCode.TOPIC_ALREADY_EXISTS
                if not (exists and if_not_exists):
                    raise
                created.append({"name": name, "created": False})
                continue
            created.append(
                {
                    "name": name,
                    "created": not validate_only,
                    "topic_id": topic_admin.topic_id_text(result.topic_id),
                    "partitions": result.num_partitions,
                }
            )
    if output_format == "json":
        print_json(created)
        return
    for entry in created:
        what = "created" if entry["created"] else "exists already"
        if validate_only and "topic_id" in entry:
            what = "could be created"
        print(f"topic {entry['name']} {what}")


@command.command("list", short_help="List topics, or those that match PATTERN.")
@click.argument("pattern", required=False)
@click.option("--exclude-internal", is_flag=True, help="Leave out internal topics.")
@bootstrap_option
@timeout_option
@format_option
def list_topics(
    pattern: str | None,
    exclude_internal: bool,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> int:
    """List all topics, or those that match PATTERN (with * and ?).

    Exits with 10 if no topic matches PATTERN.
    """
    with open_cluster(bootstrap, timeout_s) as cluster:
        topics = [
            topic
            for topic in sorted(cluster.metadata(None).topics, key=_name)
            if not (exclude_internal and topic.is_internal)
            and (pattern is None or fnmatch.fnmatchcase(_name(topic), pattern))
        ]
    if output_format == "json":
        print_json(
            [
                {
                    "name": topic.name,
                    "topic_id": topic_admin.topic_id_text(topic.topic_id),
                    "partitions": len(topic.partitions),
                    "internal": topic.is_internal,
                }
                for topic in topics
            ]
        )
    else:
        for topic in topics:
            print(topic.name)
    if pattern is not None and not topics:
        return ExitCode.NOT_FOUND
    return ExitCode.OK


def _name(topic: MetadataResponseTopic) -> str:
    return topic.name or ""


@command.command("describe", short_help="Show partitions, offsets and settings.")
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_topic)
@click.option("--all-configs", is_flag=True, help="Also settings left at default.")
@bootstrap_option
@timeout_option
@format_option
def describe(
    names: Sequence[str],
    all_configs: bool,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    """Show partitions, offsets and settings of topics; of all if none is named."""
    with open_cluster(bootstrap, timeout_s) as cluster:
        topics = sorted(cluster.metadata(names or None).topics, key=_name)
        unknown = [topic for topic in topics if topic.error_code]
        if unknown:
            first = unknown[0]
            reason = describe_error(first.error_code, None)
            raise CliError(f"topic {first.name!r}: {reason}", ExitCode.NOT_FOUND)
        described = [_describe(cluster, topic, all_configs) for topic in topics]
    if output_format == "json":
        print_json(described)
        return
    for index, entry in enumerate(described):
        if index:
            print()
        _print_description(entry)


def _describe(
    cluster: Cluster, topic: MetadataResponseTopic, all_configs: bool
) -> dict[str, Any]:
    name = _name(topic)
    everyone = {
        TopicPartition(name, partition.partition_index): partition.leader_id
        for partition in topic.partitions
    }
    # The others are on a broker, or in a log directory, that is not there.
    leaders = {key: leader for key, leader in everyone.items() if leader >= 0}
    earliest = topic_admin.list_offsets(
        cluster, dict.fromkeys(leaders, topic_admin.EARLIEST), leaders
    )
    latest = topic_admin.list_offsets(
        cluster, dict.fromkeys(leaders, topic_admin.LATEST), leaders
    )
    configs = _configs(cluster, name, all_configs)
    partitions: list[dict[str, int | None]] = [
        {
            "partition": key.partition,
            "leader": leaders.get(key),
            "start_offset": earliest[key].offset if key in leaders else None,
            "end_offset": latest[key].offset if key in leaders else None,
        }
        for key in sorted(everyone)
    ]
    if configs.get("remote.storage.enable", {}).get("value") == "true":
        _add_tiers(cluster, leaders, partitions)
    return {
        "name": name,
        "topic_id": topic_admin.topic_id_text(topic.topic_id),
        "internal": topic.is_internal,
        "configs": configs,
        "partitions": partitions,
    }


def _add_tiers(
    cluster: Cluster,
    leaders: dict[TopicPartition, int],
    partitions: list[dict[str, int | None]],
) -> None:
    """Add tiered storage's offsets to each partition's row.

    They are the last offset in the remote store, and the first one on disk.
    """
    try:
        tiered = topic_admin.list_offsets(
            cluster, dict.fromkeys(leaders, topic_admin.LATEST_TIERED), leaders
        )
        local = topic_admin.list_offsets(
            cluster, dict.fromkeys(leaders, topic_admin.EARLIEST_LOCAL), leaders
        )
    except UnsupportedVersionError:
        return  # show the rest without the tiers
    rows = {row["partition"]: row for row in partitions}
    for row in partitions:
        row.update(last_remote_offset=None, first_local_offset=None)
    for key in leaders:
        last, row = tiered[key].offset, rows[key.partition]
        row["last_remote_offset"] = last if last >= 0 else None
        row["first_local_offset"] = local[key].offset


def _configs(
    cluster: Cluster, name: str, all_configs: bool
) -> dict[str, dict[str, str | None]]:
    try:
        resource = ConfigResource(ConfigResourceType.TOPIC, name)
        entries = config_admin.describe_configs(cluster, resource)
    except UnsupportedVersionError:
        return {}  # show the rest without the settings
    return {
        entry.name: {"value": entry.value, "source": _source(entry)}
        for entry in sorted(entries, key=lambda entry: entry.name)
        if all_configs or entry.config_source == _SET_ON_TOPIC
    }


def _source(entry: DescribeConfigsResourceResult) -> str:
    return _CONFIG_SOURCES.get(entry.config_source, str(entry.config_source))


def _count(row: dict[str, int | None]) -> int | None:
    start, end = row["start_offset"], row["end_offset"]
    return None if start is None or end is None else end - start


def _print_description(entry: dict[str, Any]) -> None:
    print(f"topic {entry['name']}")
    print(f"  id          {entry['topic_id']}")
    print(f"  partitions  {len(entry['partitions'])}")
    for key, config in entry["configs"].items():
        print(f"  {key}={config['value']}  ({config['source']})")
    print()
    rows = entry["partitions"]
    columns = [
        ("  PARTITION", [f"  {row['partition']}" for row in rows]),
        ("LEADER", [row["leader"] for row in rows]),
        ("START", [row["start_offset"] for row in rows]),
        ("END", [row["end_offset"] for row in rows]),
        ("OFFSETS", [_count(row) for row in rows]),
    ]
    if rows and "last_remote_offset" in rows[0]:
        columns += [
            ("IN STORE TO", [row["last_remote_offset"] for row in rows]),
            ("ON DISK FROM", [row["first_local_offset"] for row in rows]),
        ]
    heads, values = zip(*columns, strict=True)
    print_table(list(heads), [list(row) for row in zip(*values, strict=True)])


@command.command("alter", short_help="Change settings, or add partitions.")
@click.argument("name", shell_complete=complete_topic)
@click.option(
    "-p",
    "--partitions",
    type=click.IntRange(min=1, max=2**31 - 1),
    help="Raise the number of partitions to this.",
)
@_config_option
@click.option(
    "--delete-config",
    "deleted",
    multiple=True,
    metavar="KEY",
    help="Put a setting back to its default; may be repeated.",
)
@bootstrap_option
@timeout_option
@format_option
def alter(
    name: str,
    partitions: int | None,
    configs: Sequence[str],
    deleted: Sequence[str],
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    """Change settings of a topic, or raise its number of partitions."""
    settings = _parse_configs(configs)
    if partitions is None and not settings and not deleted:
        raise click.UsageError(
            "nothing to alter: give --partitions, --config or --delete-config"
        )
    both = settings.keys() & set(deleted)
    if both:
        raise click.UsageError(f"{sorted(both)[0]} is both set and deleted")
    with open_cluster(bootstrap, timeout_s) as cluster:
        resource = ConfigResource(ConfigResourceType.TOPIC, name)
        if deleted:
            refuse_unknown(cluster, resource, deleted)
        if settings or deleted:
            config_admin.alter_configs(cluster, resource, settings, deleted)
        if partitions is not None:
            topic_admin.create_partitions(cluster, name, partitions)
    if output_format == "json":
        changed = {"set": list(settings), "unset": list(deleted)}
        print_json({"name": name, **changed, "partitions": partitions})
    else:
        print(f"topic {name} altered")


@command.command("delete")
@click.argument(
    "names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_topic
)
@click.option("--if-exists", is_flag=True, help="Accept a topic that does not exist.")
@bootstrap_option
@timeout_option
@format_option
def delete(
    names: Sequence[str],
    if_exists: bool,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    """Delete topics and all their records."""
    gone: list[dict[str, object]] = []
    with open_cluster(bootstrap, timeout_s) as cluster:
        for name in names:
            try:
                topic_admin.delete_topic(cluster, name)
            except ApiError as error:
                unknown = error.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                if not (unknown and if_exists):
                    raise
                said, deleted = "does not exist", False
            else:
                said, deleted = "deleted", True
            gone.append({"name": name, "deleted": deleted})
            if output_format == "text":
                print(f"topic {name} {said}")
    if output_format == "json":
        print_json(gone)
