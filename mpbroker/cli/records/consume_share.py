"""`mpbroker consume --share`: write records as a member of a share group.

Records are acknowledged after they were written, never before. So another member may
get the last records again, and none is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.records.ending import finished_first
from mpbroker.client.admin.config_admin import (
    ConfigResource,
    ConfigResourceType,
    alter_configs,
)
from mpbroker.client.admin.group_admin import partitions_of, share_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.consumer_record import ConsumerRecord
from mpbroker.client.errors import ApiError, BrokerUnavailableError, ErrorCode
from mpbroker.client.share.share_consumer import AcknowledgeType, ShareConsumer

_POLL_MS: Final = 500
_MAX_POLL_RECORDS: Final = 500

# Writes records of a partition; returns whether more are wanted.
Write = Callable[[TopicPartition, Sequence[ConsumerRecord]], bool]


def begin_at(cluster: Cluster, group_id: str, strategy: str) -> None:
    """Set a share group's share.auto.offset.reset.

    It is where the group begins in partitions that it has not read yet.

    Args:
        cluster: the brokers.
        group_id: the share group.
        strategy: earliest or latest.
    """
    group = ConfigResource(ConfigResourceType.GROUP, group_id)
    alter_configs(cluster, group, {"share.auto.offset.reset": strategy})


def read_as_share_member(
    cluster: Cluster,
    settings: Mapping[str, object],
    topics: Sequence[str],
    write: Write,
    *,
    kind: AcknowledgeType,
    exit_at_end: bool,
    count: int | None,
    quiet: bool,
) -> None:
    """Join a share group, and write the records that it delivers.

    Args:
        cluster: the brokers; they are asked first whether the topics exist, because a
            consumer would wait for missing ones.
        settings: the share consumer's settings, such as group.id.
        topics: the topics to read.
        write: is called with the records of one partition, to write them.
        kind: how to acknowledge records after they were written.
        exit_at_end: whether to stop when the group is done with all records.
        count: stop after so many records; None: do not.
        quiet: whether to hide warnings.
    """
    for name in topics:
        cluster.topic(name)

    def warn(text: object) -> None:
        if not quiet:
            print(f"mpbroker: {text}", file=sys.stderr)

    left = sys.maxsize if count is None else count
    limits = {
        "share.acknowledgement.mode": "explicit",
        "share.acquire.mode": "record_limit",
        "max.poll.records": min(left, _MAX_POLL_RECORDS),
    }
    with ShareConsumer({**limits, **settings}) as consumer:
        consumer.subscribe(topics)
        while left:
            try:
                found = consumer.poll(_POLL_MS)
            except BrokerUnavailableError as error:
                warn(f"{error}; trying again")
                continue
            with finished_first():
                for where, records in found.items():
                    wanted = records[:left]  # close() releases the others
                    if wanted:
                        write(where, wanted)
                        left -= len(wanted)
                        for record in wanted:
                            consumer.acknowledge(record, kind)
                if found:
                    _commit(consumer, warn)
            if (
                not found
                and exit_at_end
                and _is_done(cluster, str(settings["group.id"]), topics)
            ):
                return


def _commit(consumer: ShareConsumer, warn: Callable[[object], None]) -> None:
    try:
        results = consumer.commit_sync()
    except BrokerUnavailableError as error:
        raise CliError(
            f"the last records could not be acknowledged: {error}", ExitCode.UNAVAILABLE
        ) from error
    for where, refusal in results.items():
        if refusal is not None:
            warn(f"{where}: records are delivered again: {refusal}")


def _is_done(cluster: Cluster, group_id: str, topics: Sequence[str]) -> bool:
    """Return whether a share group has finished all records of the topics.

    A partition in which the group has not begun yet is not finished.
    """
    try:
        states = share_offsets(cluster, group_id)
    except ApiError as error:
        if error.error_code == ErrorCode.GROUP_ID_NOT_FOUND:
            return False  # the coordinator has not made the group yet
        raise
    return all(
        where in states
        and states[where].start_offset is not None
        and not states[where].lag
        for where in partitions_of(cluster, topics)
    )
