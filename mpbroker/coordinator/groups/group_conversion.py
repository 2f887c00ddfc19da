"""Convert a classic group to a consumer group, or back, while it has members.

Members, their assignments and the generation stay; the generation is the group epoch.
So a member that was up to date before is up to date afterwards, and may commit.

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
from mpbroker.coordinator.versioned import KeyValue
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError


def consumer_group_of(classic: ClassicGroup, topics: Topics) -> ConsumerGroup:
    """Return a group of the consumer protocol (KIP-848) with the same members.

    The classic group is unchanged.

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
        member.keep_epochs()
        group.add(member)
        group.target[member.member_id] = by_id(assignment, topics)
    return group


def subscribe(
    member: ConsumerMember,
    subscription: Subscription,
    session_timeout_ms: int,
    protocols: Sequence[tuple[str, bytes]],
) -> None:
    """Store the subscription and the protocols of a classic member's JoinGroup."""
    member.topic_names = tuple(sorted(set(subscription.topics)))
    member.topic_regex = member.server_assignor = None
    if subscription.rack_id is not None:
        member.rack_id = subscription.rack_id
    member.classic = ClassicSide(session_timeout_ms, tuple(protocols))


def creation_records(group: ConsumerGroup) -> list[KeyValue]:
    """Return records that describe a group completely, as if it had just been made."""
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
    """Return a classic group with the members of a consumer group that stay.

    Members that do not speak the classic protocol are left out.

    Args:
        leaving: the ids of the members that do not stay.
    """
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
    """Return a placeholder for a member that has left, for a classic group's record.

    Its session timeout is 0: a coordinator that loads the record begins a rebalance.
    """
    return ClassicMember(
        member_id, None, "", "", Membership(CONSUMER_PROTOCOL, (), 0, 0)
    )


def assignment_of(member: ConsumerMember, topics: Topics) -> bytes:
    """Encode a member's partitions in the form that a classic group's leader sends."""
    assert member.classic is not None
    partitions = {
        name: sorted(numbers)
        for topic, numbers in member.assigned.items()
        if (name := topics.topic_name(topic)) is not None
    }
    return write_assignment(partitions, version_of(member.classic.protocols[0][1]))


def by_id(partitions: Mapping[str, Collection[int]], topics: Topics) -> Partitions:
    """Convert partitions by topic name to partitions by topic id.

    Leave out topics that do not exist.
    """
    return {
        topic: set(numbers)
        for name, numbers in partitions.items()
        if numbers and (topic := topics.topic_id(name)) is not None
    }
