"""Read the groups of a broker that has become a node of a cluster.

Their records are in its __consumer_offsets, and are copied into the database once. The
topic stays as it is, and is not used any more.
"""

from __future__ import annotations

from collections.abc import Callable

from mpbroker.base.java_hash import java_hash
from mpbroker.base.logger import get_logger
from mpbroker.coordinator.coordinator_topic import CoordinatorTopic
from mpbroker.coordinator.groups.group_records import read_record
from mpbroker.coordinator.groups.share_group import is_share_key
from mpbroker.metadata.cluster_nodes import GROUP_SHARD_COUNT
from mpbroker.protocol.errors import ProtocolError

_LOG = get_logger(__name__)


def records_to_adopt(
    topic: CoordinatorTopic, step: Callable[[], None]
) -> list[tuple[int, bytes, bytes]]:
    """Return the newest record of each key, and the shard that its group belongs to.

    Offsets of transactions that have no marker are left out, and so are share groups.

    Args:
        topic: __consumer_offsets.
        step: called as reading goes on.

    Raises:
        ApiError: a partition is offline, or cannot be read.
    """
    newest: dict[bytes, bytes | None] = {}
    for partition in topic.partitions_to_load():
        pending: dict[int, dict[bytes, bytes | None]] = {}
        for records in topic.load(partition):
            step()
            for record in records:
                if record.commit is not None:
                    ended = pending.pop(record.producer_id, {})
                    newest.update(ended if record.commit else {})
                elif record.producer_id >= 0:
                    of_producer = pending.setdefault(record.producer_id, {})
                    of_producer[record.key] = record.value
                else:
                    newest[record.key] = record.value
    found = []
    for key, value in newest.items():
        group_id = None if value is None else _group_of(key, value)
        if value is not None and group_id is not None:
            found.append((java_hash(group_id) % GROUP_SHARD_COUNT, key, value))
    return found


def _group_of(key: bytes, value: bytes) -> str | None:
    """Return the id of a record's group; None: the record is left out."""
    try:
        read = read_record(key, value)
    except (ProtocolError, ValueError) as error:
        _LOG.error("a record of __consumer_offsets is left behind: %s", error)
        return None
    if read is None or is_share_key(read[0]):
        return None
    group_id: str = getattr(read[0], "group", "") or getattr(read[0], "group_id", "")
    return group_id
