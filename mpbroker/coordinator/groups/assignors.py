"""Assign partitions to the members of a group: the assignors.

    uniform  Each member gets about the same number of partitions. A member keeps the
             partitions it has, as far as that allows.
    range    Each member gets consecutive partitions of each topic. Members with the
             same subscription get the same partition numbers of every topic.

    simple   For share groups (KIP-932): each partition has about the same number of
             members, and each member about the same number of partitions.

An assignor's result depends only on the members, the topics and the last assignment:
the same input gives the same result.

Source: KIP-848; the promises are those of Kafka's UniformAssignor, RangeAssignor
and SimpleAssignor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from mpbroker.base.named_tuple import NamedTuple

TopicId = bytes
# topic id -> partitions
Partitions = dict[TopicId, set[int]]


class MemberSpec(NamedTuple):
    """What an assignor must know of a group's member."""

    member_id: str
    instance_id: str | None
    topics: frozenset[TopicId]  # the existing topics to which it subscribes
    assigned: Mapping[TopicId, set[int]]  # its share of the last target assignment


Assignor = Callable[[list[MemberSpec], Mapping[TopicId, int]], dict[str, Partitions]]


def assign_uniform(
    members: list[MemberSpec], topics: Mapping[TopicId, int]
) -> dict[str, Partitions]:
    """Give members about the same number of partitions, and move as few as possible.

    Args:
        topics: the number of partitions of each topic.
    """
    members = sorted(members, key=lambda member: member.member_id)
    shares: dict[str, list[tuple[TopicId, int]]] = {}
    taken: set[tuple[TopicId, int]] = set()
    for member in members:
        kept = [
            (topic, number)
            for topic, numbers in sorted(member.assigned.items())
            if topic in member.topics
            for number in sorted(numbers)
            if number < topics.get(topic, 0) and (topic, number) not in taken
        ]
        shares[member.member_id] = kept
        taken.update(kept)
    free = [
        (topic, number)
        for topic in sorted(topics)
        for number in range(topics[topic])
        if (topic, number) not in taken
    ]
    if members and all(member.topics == members[0].topics for member in members):
        wanted = members[0].topics
        _fill_alike(shares, [each for each in free if each[0] in wanted])
    else:
        _fill_unlike(members, shares, free)
    return {member_id: _by_topic(share) for member_id, share in shares.items()}


def _fill_alike(
    shares: dict[str, list[tuple[TopicId, int]]], free: list[tuple[TopicId, int]]
) -> None:
    """Fill up shares of members that all have the same subscription."""
    total = len(free) + sum(map(len, shares.values()))
    least, more = divmod(total, len(shares))
    # Each member gets the average, rounded down. The members that have the most
    # partitions get one more, as far as the remainder allows.
    order = sorted(shares, key=lambda member_id: (-len(shares[member_id]), member_id))
    quota = {member_id: least + (rank < more) for rank, member_id in enumerate(order)}
    for member_id, share in shares.items():
        free.extend(share[quota[member_id] :])
        del share[quota[member_id] :]
    free.sort(reverse=True)
    for member_id in sorted(shares):
        share = shares[member_id]
        while len(share) < quota[member_id]:
            share.append(free.pop())


def _fill_unlike(
    members: list[MemberSpec],
    shares: dict[str, list[tuple[TopicId, int]]],
    free: list[tuple[TopicId, int]],
) -> None:
    """Give free partitions to members with different subscriptions.

    Then move partitions to members that have at least two fewer.
    """
    wanting: dict[TopicId, list[str]] = {}
    for member in members:
        for topic in member.topics:
            wanting.setdefault(topic, []).append(member.member_id)
    # First the partitions that few members can take. Each goes to the member that has
    # the fewest partitions by then.
    free.sort(key=lambda each: (len(wanting.get(each[0], ())), each))
    for topic, number in free:
        takers = wanting.get(topic)
        if takers:
            least = min(takers, key=lambda member_id: len(shares[member_id]))
            shares[least].append((topic, number))
    moved = True
    while moved:
        moved = False
        lowest = min(map(len, shares.values()))
        for giver in sorted(shares, key=lambda member_id: -len(shares[member_id])):
            if len(shares[giver]) - lowest < 2:
                break
            for index, (topic, number) in enumerate(shares[giver]):
                takers = wanting[topic]
                least = min(takers, key=lambda member_id: len(shares[member_id]))
                # This ends: each move makes the sum of the squared sizes smaller.
                if len(shares[giver]) - len(shares[least]) >= 2:
                    del shares[giver][index]
                    shares[least].append((topic, number))
                    moved = True
                    break


def assign_range(
    members: list[MemberSpec], topics: Mapping[TopicId, int]
) -> dict[str, Partitions]:
    """Give each member consecutive partitions of each topic to which it subscribes.

    Args:
        topics: the number of partitions of each topic.
    """
    # Static members first, in the order of their instance ids, so that a member that
    # comes back gets the same partitions.
    members = sorted(
        members, key=lambda m: (m.instance_id is None, m.instance_id or m.member_id)
    )
    shares: dict[str, Partitions] = {member.member_id: {} for member in members}
    for topic, count in topics.items():
        readers = [member.member_id for member in members if topic in member.topics]
        if not readers:
            continue
        least, more = divmod(count, len(readers))
        start = 0
        for rank, member_id in enumerate(readers):
            end = start + least + (rank < more)
            if end > start:
                shares[member_id][topic] = set(range(start, end))
            start = end
    return shares


def assign_simple(
    members: list[MemberSpec], topics: Mapping[TopicId, int]
) -> dict[str, Partitions]:
    """Assign partitions for a share group, each to one or more members.

    A partition has several members if there are more members than partitions.

    Args:
        topics: the number of partitions of each topic.
    """
    shares: dict[str, Partitions] = {member.member_id: {} for member in members}
    members = sorted(members, key=lambda member: member.member_id)
    if members and all(member.topics == members[0].topics for member in members):
        together = [list(topics)]
    else:
        together = [[topic] for topic in topics]
    turn = 0
    for some in together:
        readers = [
            member.member_id for member in members if member.topics.intersection(some)
        ]
        partitions = [
            (topic, number)
            for topic in some
            for number in range(topics[topic])
            if any(topic in member.topics for member in members)
        ]
        if not readers or not partitions:
            continue
        for step in range(max(len(readers), len(partitions))):
            topic, number = partitions[step % len(partitions)]
            # Each topic begins with another member, so that all members get about the
            # same number of partitions.
            member_id = readers[(step + turn) % len(readers)]
            shares[member_id].setdefault(topic, set()).add(number)
        turn += len(partitions)
    return shares


def _by_topic(share: list[tuple[TopicId, int]]) -> Partitions:
    found: Partitions = {}
    for topic, number in share:
        found.setdefault(topic, set()).add(number)
    return found


ASSIGNORS: Final[Mapping[str, Assignor]] = {
    "uniform": assign_uniform,
    "range": assign_range,
}
