"""Make a consumer group of a classic one, or the reverse, while its members live.

Members, their assignments and the generation stay; the generation is the group epoch.
So a member that was up to date before is so afterwards, and may commit.

Source: KIP-848, "Online upgrade"; Kafka's ConsumerGroup.fromClassicGroup and
ClassicGroup.fromConsumerGroup.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mpbroker.coordinator.context import Topics
from mpbroker.coordinator.groups.assignors import Partitions
from mpbroker.coordinator.groups.classic_group import (
    ClassicGroup,
    ClassicGroupState,
    ClassicMember,
    Membership,
)
from mpbroker.coordinator.groups.consumer_group import (
    ClassicSide,
    ConsumerGroup,
    ConsumerMember,
)
from mpbroker.coordinator.groups.consumer_group_records import (
    current_record,
    group_epoch_record,
    member_record,
    target_epoch_record,
    target_record,
)
from mpbroker.coordinator.groups.consumer_protocol import (
    CONSUMER_PROTOCOL,
    Subscription,
    read_assignment,
    read_subscription,
    version_of,
    write_assignment,
)
from mpbroker.coordinator.groups.group_records import KeyValue
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError


def consumer_group_of(classic: ClassicGroup, topics: Topics) -> ConsumerGroup:
    """Return a consumer group with the same members; the classic one is unchanged.

    Raises:
        ApiError: GROUP_ID_NOT_FOUND: a member's metadata is not that of a consumer.
    """
    group = ConsumerGroup(classic.group_id)
    group.group_epoch = group.assignment_epoch = classic.generation_id
    for old in classic.members.values():
        subscription = read_subscription(old.protocols[0][1])
        assignment = read_assignment(old.assignment)
        if subscription is None or assignment is None:
            raise ApiError(
                ErrorCode.GROUP_ID_NOT_FOUND,
                f"Cannot upgrade classic group {classic.group_id} to consumer group"
                " because the embedded consumer protocol is malformed.",
            )
        member = ConsumerMember(old.member_id, old.group_instance_id)
        member.client_id, member.client_host = old.client_id, old.client_host
        member.rebalance_timeout_ms = old.rebalance_timeout_ms
        subscribe(member, subscription, old.session_timeout_ms, old.protocols)
        member.member_epoch = member.previous_epoch = classic.generation_id
        member.assigned = by_id(assignment, topics)
        group.add(member)
        group.target[member.member_id] = by_id(assignment, topics)
    return group


def subscribe(
    member: ConsumerMember,
    subscription: Subscription,
    session_timeout_ms: int,
    protocols: Sequence[tuple[str, bytes]],
) -> None:
    """Keep what a member has sent in its JoinGroup."""
    member.topic_names = tuple(sorted(set(subscription.topics)))
    member.topic_regex = member.server_assignor = None
    if subscription.rack_id is not None:
        member.rack_id = subscription.rack_id
    member.classic = ClassicSide(session_timeout_ms, tuple(protocols))


def creation_records(group: ConsumerGroup) -> list[KeyValue]:
    """Return all records of a group, as if it had just been made."""
    group_id, members = group.group_id, group.members.values()
    found = [member_record(group_id, each.member_id, each) for each in members]
    found.append(group_epoch_record(group_id, group.group_epoch, group.metadata_hash))
    found.extend(
        target_record(group_id, member_id, target)
        for member_id, target in group.target.items()
    )
    found.append(target_epoch_record(group_id, group.assignment_epoch))
    found.extend(current_record(group_id, each.member_id, each) for each in members)
    return found


def classic_group_of(
    group: ConsumerGroup, leaving: Collection[str], topics: Topics, now_ms: int
) -> ClassicGroup:
    """Return a classic group with the members that stay, all of them classic."""
    classic = ClassicGroup(group.group_id, now_ms, ClassicGroupState.STABLE)
    classic.generation_id = group.group_epoch
    for old in group.members.values():
        if old.member_id in leaving or old.classic is None:
            continue
        membership = Membership(
            CONSUMER_PROTOCOL,
            old.classic.protocols,
            old.rebalance_timeout_ms,
            old.classic.session_timeout_ms,
        )
        classic.add(
            ClassicMember(
                old.member_id,
                old.instance_id,
                old.client_id,
                old.client_host,
                membership,
                assignment_of(old, topics),
            )
        )
    classic.protocol_name = classic.select_protocol()
    return classic


def departed_member(member_id: str) -> ClassicMember:
    """Return a member to stand in a classic group's record for one that has gone."""
    return ClassicMember(
        member_id, None, "", "", Membership(CONSUMER_PROTOCOL, (), 0, 0)
    )


def assignment_of(member: ConsumerMember, topics: Topics) -> bytes:
    """Return a member's assignment as a leader would send it, in its version."""
    assert member.classic is not None
    partitions = {
        name: sorted(numbers)
        for topic, numbers in member.assigned.items()
        if (name := topics.topic_name(topic)) is not None
    }
    return write_assignment(partitions, version_of(member.classic.protocols[0][1]))


def by_id(partitions: Mapping[str, Collection[int]], topics: Topics) -> Partitions:
    """Return partitions by topic id; topics that do not exist are left out."""
    return {
        topic: set(numbers)
        for name, numbers in partitions.items()
        if numbers and (topic := topics.topic_id(name)) is not None
    }
