"""Assignors of consumer groups, and the bytes of subscriptions and assignments.

An assignor decides which member reads which partitions. The leader of a group, which is
one of its members, runs it; the broker only passes the bytes on. Names and bytes are
those of Kafka's own clients, so members of both kinds can share a group.

Source: Kafka protocol guide, "Group Membership API"; ConsumerProtocolSubscription
versions 0-2 and ConsumerProtocolAssignment version 0; KIP-54 (sticky), KIP-429.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from struct import Struct, error
from typing import Final, NamedTuple

from mpbroker.client.cluster import TopicPartition
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.primitives import Buffer

RANGE: Final = "range"
ROUND_ROBIN: Final = "roundrobin"
COOPERATIVE_STICKY: Final = "cooperative-sticky"

_INT16 = Struct(">h")
_INT32 = Struct(">i")
_NO_USER_DATA = _INT32.pack(-1)


class Subscription(NamedTuple):
    """The topics and partitions that a member names when it joins the group.

    Attributes:
        topics: the topics that it wants to read.
        owned: the partitions that it reads now.
        generation: the generation in which it got them; -1 if the member does not say.
    """

    topics: list[str]
    owned: Sequence[TopicPartition] = ()
    generation: int = -1


Assignment = dict[str, list[TopicPartition]]
Assign = Callable[[Mapping[str, Subscription], Mapping[str, int]], Assignment]
"""Make an assignment from subscriptions by member and partition counts by topic.

A topic that has no count is treated as one without partitions.
"""


def assign_range(
    subscriptions: Mapping[str, Subscription], partition_counts: Mapping[str, int]
) -> Assignment:
    """Assign a range of each topic's partitions to each member, in the order of ids."""
    found: Assignment = {member: [] for member in subscriptions}
    for topic, members in sorted(_members_by_topic(subscriptions).items()):
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


def assign_round_robin(
    subscriptions: Mapping[str, Subscription], partition_counts: Mapping[str, int]
) -> Assignment:
    """Assign partitions in turn, each to the next member that reads its topic."""
    found: Assignment = {member: [] for member in subscriptions}
    turn = sorted(subscriptions)
    for topic, members in sorted(_members_by_topic(subscriptions).items()):
        for partition in range(partition_counts.get(topic, 0)):
            while turn[0] not in members:
                turn.append(turn.pop(0))
            found[turn[0]].append(TopicPartition(topic, partition))
            turn.append(turn.pop(0))
    return found


def assign_cooperative_sticky(
    subscriptions: Mapping[str, Subscription], partition_counts: Mapping[str, int]
) -> Assignment:
    """Assign evenly and move few partitions, in two rounds.

    In the first round, a partition that must move is assigned to no member. Its reader
    gives it up and joins again, and the second round assigns it.
    """
    owner = _owners(subscriptions)
    found = assign_sticky(subscriptions, partition_counts)
    return {
        member: [where for where in partitions if owner.get(where, member) == member]
        for member, partitions in found.items()
    }


def assign_sticky(
    subscriptions: Mapping[str, Subscription], partition_counts: Mapping[str, int]
) -> Assignment:
    """Assign evenly, and leave as many partitions as possible with their readers.

    The shares of members that read the same topics differ by one at most.
    """
    by_topic = _members_by_topic(subscriptions)
    found: Assignment = {member: [] for member in sorted(subscriptions)}
    owner = _owners(subscriptions)
    free = []
    for topic in sorted(by_topic):
        for partition in range(partition_counts.get(topic, 0)):
            where = TopicPartition(topic, partition)
            member = owner.get(where)
            if member is not None and member in by_topic[topic]:
                found[member].append(where)
            else:
                free.append(where)
    # First the partitions that few members can read; the others leave more choice.
    for where in sorted(free, key=lambda each: len(by_topic[each.topic])):
        found[_idlest(by_topic[where.topic], found)].append(where)
    while move := _next_move(found, by_topic):
        # This ends: each move makes the sum of the squares of all shares smaller.
        giver, taker, where = move
        found[giver].remove(where)
        found[taker].append(where)
    return found


def _next_move(
    found: Assignment, by_topic: Mapping[str, set[str]]
) -> tuple[str, str, TopicPartition] | None:
    """Return a move that evens out two members' shares: giver, taker and partition.

    Return None if no member can give a partition to one that has at least two fewer.
    """
    for giver in sorted(found, key=lambda member: (-len(found[member]), member)):
        topics = {where.topic: where for where in found[giver]}
        for topic in sorted(topics):
            taker = _idlest(by_topic[topic], found)
            if len(found[taker]) + 1 < len(found[giver]):
                return giver, taker, topics[topic]
    return None


def _idlest(members: Iterable[str], found: Assignment) -> str:
    return min(members, key=lambda member: (len(found[member]), member))


def _owners(subscriptions: Mapping[str, Subscription]) -> dict[TopicPartition, str]:
    """Return the member that owns each partition.

    If several members claim a partition, the claim of the latest generation counts. If
    two claims are of that generation, the partition has no owner, because one member
    must be wrong.
    """
    claims: dict[TopicPartition, tuple[int, str | None]] = {}
    for member, subscription in subscriptions.items():
        generation = subscription.generation
        for where in subscription.owned:
            rival, _ = claims.get(where, (-2, None))
            if generation > rival:
                claims[where] = generation, member
            elif generation == rival:
                claims[where] = generation, None
    return {
        where: member for where, (_, member) in claims.items() if member is not None
    }


def _members_by_topic(subscriptions: Mapping[str, Subscription]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for member, subscription in subscriptions.items():
        for topic in subscription.topics:
            found.setdefault(topic, set()).add(member)
    return found


ASSIGNORS: Final[Mapping[str, Assign]] = {
    RANGE: assign_range,
    ROUND_ROBIN: assign_round_robin,
    COOPERATIVE_STICKY: assign_cooperative_sticky,
}


def assignor_of(name: str) -> Assign:
    """Return an assignor by its name.

    Raises:
        ProtocolError: there is no such assignor: the coordinator chose one that this
            client did not offer.
    """
    found = ASSIGNORS.get(name)
    if found is None:
        raise ProtocolError(
            f"the coordinator has chosen {name!r}, which this client does not have"
        )
    return found


# -- bytes -----------------------------------------------------------------------------


def encode_subscription(subscription: Subscription) -> bytes:
    """Encode the subscription that a member sends to the group's leader."""
    topics, owned, generation = subscription
    return b"".join(
        [
            _INT16.pack(2),
            _INT32.pack(len(topics)),
            *map(_string, topics),
            _NO_USER_DATA,
            *_partitions(owned),
            _INT32.pack(generation),
        ]
    )


def decode_subscription(data: Buffer) -> Subscription:
    """Decode a member's subscription, which any client may have encoded.

    Versions above 2 may only append fields, which are ignored.

    Raises:
        ProtocolError: the bytes end too early, or a name is not UTF-8.
    """
    try:
        version = _INT16.unpack_from(data, 0)[0]
        count, at = _count(data, 2)
        names = []
        for _ in range(count):
            name, at = _read_string(data, at)
            names.append(name)
        owned: Sequence[TopicPartition] = ()
        generation = -1
        if version >= 1:
            at += 4 + max(0, _INT32.unpack_from(data, at)[0])  # user data
            owned, at = _read_partitions(data, at)
        if version >= 2:
            generation = _INT32.unpack_from(data, at)[0]
    except (error, UnicodeDecodeError) as problem:
        raise ProtocolError(f"a member's subscription: {problem}") from None
    return Subscription(names, owned, generation)


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    """Encode the assignment that the group's leader sends to a member."""
    return b"".join([_INT16.pack(0), *_partitions(partitions), _NO_USER_DATA])


def decode_assignment(data: Buffer) -> list[TopicPartition]:
    """Decode an assignment, which any client may have encoded; b"" has no partitions.

    Raises:
        ProtocolError: the bytes end too early, or a name is not UTF-8.
    """
    if not len(data):
        return []
    try:
        return _read_partitions(data, 2)[0]
    except (error, UnicodeDecodeError) as problem:
        raise ProtocolError(f"a group's assignment: {problem}") from None


def _partitions(partitions: Iterable[TopicPartition]) -> list[bytes]:
    topics: dict[str, list[int]] = {}
    for topic, partition in partitions:
        topics.setdefault(topic, []).append(partition)
    parts = [_INT32.pack(len(topics))]
    for topic, numbers in topics.items():
        parts += [_string(topic), _INT32.pack(len(numbers))]
        parts += map(_INT32.pack, numbers)
    return parts


def _read_partitions(data: Buffer, at: int) -> tuple[list[TopicPartition], int]:
    found = []
    topics, at = _count(data, at)
    for _ in range(topics):
        topic, at = _read_string(data, at)
        count, at = _count(data, at)
        for _ in range(count):
            found.append(TopicPartition(topic, _INT32.unpack_from(data, at)[0]))
            at += 4
    return found, at


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
