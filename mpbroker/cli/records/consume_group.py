"""`mpbroker consume -G`: write records to standard output as a member of a group.

Positions are committed after records were written, never before. So the next reader may
see the last records again, and misses none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.records.ending import finished_first
from mpbroker.client.admin.topic_admin import LATEST
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.consumer import Consumer, ConsumerRecord
from mpbroker.client.consumer.group_member import RebalancedError
from mpbroker.client.errors import BrokerUnavailableError

_POLL_MS = 500
_MAX_POLL_RECORDS = 5000

# Writes records of a partition; returns whether more are wanted.
Write = Callable[[TopicPartition, Sequence[ConsumerRecord]], bool]


def read_as_member(
    cluster: Cluster,
    settings: Mapping[str, object],
    topics: Sequence[str],
    write: Write,
    *,
    exit_at_end: bool,
    count: int | None,
    quiet: bool,
) -> None:
    """Join a group, and write the records of the partitions that it assigns.

    Args:
        cluster: the brokers; they are asked first whether the topics exist, because a
            consumer would wait for missing ones.
        settings: the consumer's settings, such as group.id.
        topics: the topics to read.
        write: is called with the records of one partition, to write them.
        exit_at_end: whether to stop when all assigned partitions are read.
        count: stop after so many records; None: do not.
        quiet: whether to say nothing while brokers cannot be reached.
    """
    for name in topics:
        cluster.topic(name)
    with Consumer(settings) as consumer:
        consumer.subscribe(topics)
        left = sys.maxsize if count is None else count
        ends: dict[TopicPartition, int] = {}
        while left:
            limit = min(left, _MAX_POLL_RECORDS)
            try:
                found = consumer.poll(_POLL_MS, limit)
            except BrokerUnavailableError as error:
                if not quiet:
                    print(f"mpbroker: {error}; trying again", file=sys.stderr)
                continue
            with finished_first():
                for where, records in found.items():
                    write(where, records)
                    left -= len(records)
                if found:
                    _commit(consumer)
            if exit_at_end and _is_at_end(consumer, ends, is_idle=not found):
                return


def _commit(consumer: Consumer) -> None:
    try:
        consumer.commit()
    except RebalancedError:
        pass  # the new owner of the partitions goes on at the last commit
    except BrokerUnavailableError as error:
        raise CliError(
            f"the positions behind the last records could not be committed: {error}",
            ExitCode.UNAVAILABLE,
        ) from error


def _is_at_end(
    consumer: Consumer, ends: dict[TopicPartition, int], *, is_idle: bool
) -> bool:
    """Return whether this member has read all its assigned partitions to the end.

    Args:
        consumer: the member.
        ends: the ends of partitions as they were first looked up, to which those of new
            partitions are added. A topic that is written to has no other end.
        is_idle: whether the last poll has found nothing: a member without partitions is
            at the end only then.
    """
    assigned = consumer.assignment()
    new = [where for where in assigned if where not in ends]
    if new:
        ends.update(consumer.offsets_for(new, LATEST))
    if not assigned:
        return is_idle
    return all(consumer.position(where) >= ends[where] for where in assigned)
