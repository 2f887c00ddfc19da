"""Who of a group reads which partitions; and what members tell each other about it.

The leader of a group assigns; a broker only passes the bytes on. Range, so that our
members can share a group with those of Kafka's own clients, whose default it is.

Source: Kafka protocol guide, "Group Membership API"; ConsumerProtocolSubscription and
ConsumerProtocolAssignment, version 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct, error

from mpbroker.client.cluster import TopicPartition
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.primitives import Buffer

RANGE = "range"

_INT16 = Struct(">h")
_INT32 = Struct(">i")
_NO_USER_DATA = _INT32.pack(-1)


def assign_range(
    subscriptions: Mapping[str, Iterable[str]], partition_counts: Mapping[str, int]
) -> dict[str, list[TopicPartition]]:
    """Give each topic's partitions out in ranges, to members in the order of ids.

    Args:
        subscriptions: topics by member.
        partition_counts: by topic; one that is not there has nothing to give out.
    """
    found: dict[str, list[TopicPartition]] = {member: [] for member in subscriptions}
    by_topic: dict[str, list[str]] = {}
    for member, topics in subscriptions.items():
        for topic in set(topics):
            by_topic.setdefault(topic, []).append(member)
    for topic, members in sorted(by_topic.items()):
        each, more = divmod(partition_counts.get(topic, 0), len(members))
        first = 0
        for index, member in enumerate(sorted(members)):
            count = each + (index < more)
            found[member] += [
                TopicPartition(topic, partition)
                for partition in range(first, first + count)
            ]
            first += count
    return found


def encode_subscription(topics: Iterable[str]) -> bytes:
    """Return what a member tells the leader."""
    names = list(topics)
    parts = [_INT16.pack(0), _INT32.pack(len(names)), *map(_string, names)]
    return b"".join([*parts, _NO_USER_DATA])


def decode_subscription(data: Buffer) -> list[str]:
    """Read what any client's member told; newer versions only add to it.

    Raises:
        ProtocolError: it is cut off.
    """
    try:
        count, at = _count(data, 2)
        names = []
        for _ in range(count):
            name, at = _read_string(data, at)
            names.append(name)
    except (error, UnicodeDecodeError) as problem:
        raise ProtocolError(f"a member's subscription: {problem}") from None
    return names


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    """Return what the leader tells a member."""
    topics: dict[str, list[int]] = {}
    for topic, partition in partitions:
        topics.setdefault(topic, []).append(partition)
    parts = [_INT16.pack(0), _INT32.pack(len(topics))]
    for topic, numbers in topics.items():
        parts += [_string(topic), _INT32.pack(len(numbers))]
        parts += map(_INT32.pack, numbers)
    return b"".join([*parts, _NO_USER_DATA])


def decode_assignment(data: Buffer) -> list[TopicPartition]:
    """Read what any client's leader told; nothing is no partitions.

    Raises:
        ProtocolError: it is cut off.
    """
    if not len(data):
        return []
    found = []
    try:
        topics, at = _count(data, 2)
        for _ in range(topics):
            topic, at = _read_string(data, at)
            count, at = _count(data, at)
            for _ in range(count):
                found.append(TopicPartition(topic, _INT32.unpack_from(data, at)[0]))
                at += 4
    except (error, UnicodeDecodeError) as problem:
        raise ProtocolError(f"a group's assignment: {problem}") from None
    return found


def _count(data: Buffer, at: int) -> tuple[int, int]:
    count = _INT32.unpack_from(data, at)[0]
    if not 0 <= count <= len(data) - at:
        raise ProtocolError(f"{count} entries in {len(data) - at} bytes")
    return count, at + 4


def _string(text: str) -> bytes:
    encoded = text.encode()
    return _INT16.pack(len(encoded)) + encoded


def _read_string(data: Buffer, at: int) -> tuple[str, int]:
    size = _INT16.unpack_from(data, at)[0]
    if not 0 <= size <= len(data) - at - 2:
        raise ProtocolError(f"a name of {size} bytes with {len(data) - at - 2} left")
    end = at + 2 + size
    return str(memoryview(data)[at + 2 : end], "utf-8"), end
