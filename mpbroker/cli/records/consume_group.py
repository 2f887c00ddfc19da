"""`mpbroker consume -G`: records to standard output as a member of a consumer group.

Positions are stored after records were written, never before: whoever reads on sees
what was written last once more at worst.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.client.admin.topic_admin import LATEST
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.consumer import Consumer, ConsumerRecord
from mpbroker.client.consumer.group_member import RebalancedError
from mpbroker.client.errors import BrokerUnavailableError

_POLL_MS = 500
_MAX_POLL_RECORDS = 5000

# Writes records of a partition; says whether more are wanted.
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
    """Join a group, and write what it gives to this member.

    Args:
        cluster: to look whether the topics exist; nobody else would say so.
        settings: of the consumer.
        topics: to read.
        write: takes the records.
        exit_at_end: until all that this member has is read.
        count: until so many records are written.
        quiet: say nothing of brokers that cannot be reached for a while.
    """
    for name in topics:
        cluster.topic(name)
    with Consumer(settings) as consumer:
        consumer.subscribe(topics)
        left = sys.maxsize if count is None else count
        while left:
            limit = min(left, _MAX_POLL_RECORDS)
            try:
                found = consumer.poll(_POLL_MS, limit)
            except BrokerUnavailableError as error:
                if not quiet:
                    print(f"mpbroker: {error}; trying again", file=sys.stderr)
                continue
            for where, records in found.items():
                write(where, records)
                left -= len(records)
            if found:
                _commit(consumer)
            elif exit_at_end and _is_at_end(consumer):
                return


def _commit(consumer: Consumer) -> None:
    try:
        consumer.commit()
    except RebalancedError:
        pass  # whoever has these partitions now reads on from the last commit
    except BrokerUnavailableError as error:
        raise CliError(
            f"what was written last could not be committed: {error}",
            ExitCode.UNAVAILABLE,
        ) from error


def _is_at_end(consumer: Consumer) -> bool:
    """Whether this member has been given its partitions, and has read them."""
    assigned = consumer.assignment()
    ends = consumer.offsets_for(assigned, LATEST)
    return all(consumer.position(where) >= end for where, end in ends.items())
