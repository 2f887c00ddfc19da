"""Committed offsets: permission to commit, fetches, restarts and expiry."""

from __future__ import annotations

import pytest

from mpbroker.base.java_hash import java_hash
from mpbroker.coordinator.groups.classic_group import ClassicGroupState as S
from mpbroker.coordinator.groups.group_offsets import GroupOffsets, OffsetAndMetadata
from mpbroker.coordinator.groups.group_records import (
    OffsetCommitKey,
    offset_key,
    offset_value,
    read_record,
)
from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
)
from mpbroker.protocol.messages.delete_groups import DeleteGroupsRequest
from mpbroker.protocol.messages.describe_groups import DescribeGroupsRequest
from mpbroker.protocol.messages.list_groups import ListGroupsRequest
from mpbroker.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from mpbroker.server.answer_budget import AnswerBudget
from tests.coordinator.rig import Rig, subscription

MINUTE_MS = 60_000


@pytest.mark.parametrize(
    ("text", "expected"),
    # "polygenelubricants" hashes to the least int32, whose absolute value is none
    [("", 0), ("a", 97), ("hello", 99162322), ("polygenelubricants", 0)],
)
def test_groups_are_hashed_as_java_does_it(text, expected):
    def reference(text):
        value = 0
        for character in text:
            value = (value * 31 + ord(character)) % 2**32
        value = value - 2**32 if value >= 2**31 else value
        return 0 if value == -(2**31) else abs(value)

    assert java_hash(text) == reference(text)
    assert java_hash(text) == expected


# -- commit and fetch ------------------------------------------------------------------


@pytest.mark.parametrize("version", range(2, 11))
def test_a_committed_offset_is_found_again_also_after_a_restart(rig, version):
    (mine,) = rig.stable(1)
    codes = rig.commit(
        {("t", 0): 5, ("t", 3): 7, ("u", 1): 0},
        member_id=mine,
        generation=1,
        version=version,
    )
    assert set(codes.values()) == {0}
    expected = {("t", 0): 5, ("t", 3): 7, ("u", 1): 0}
    assert rig.fetch() == expected
    rig.restart()
    assert rig.fetch() == expected


def test_a_group_without_members_may_commit_and_be_seen(rig):
    assert rig.commit({("t", 1): 9}, group="simple") == {("t", 1): 0}
    assert rig.fetch("simple") == {("t", 1): 9}
    rig.restart()
    assert rig.fetch("simple") == {("t", 1): 9}
    (row,) = rig.ask("list_groups", ListGroupsRequest(), 5).groups
    assert (row.group_id, row.group_state, row.protocol_type) == ("simple", "Empty", "")


@pytest.mark.parametrize(
    ("commit", "code"),
    [
        ({"member_id": "stranger", "generation": 1}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({"generation": 1}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({"member_id": "mine", "generation": 0}, ErrorCode.ILLEGAL_GENERATION),
        ({"member_id": "mine", "generation": 2}, ErrorCode.ILLEGAL_GENERATION),
        ({}, ErrorCode.UNKNOWN_MEMBER_ID),
        (
            {"member_id": "mine", "generation": 1, "instance": "i"},
            ErrorCode.UNKNOWN_MEMBER_ID,
        ),
    ],
)
def test_a_commit_with_a_wrong_member_or_generation_changes_nothing(rig, commit, code):
    (mine,) = rig.stable(1)
    rig.commit({("t", 0): 5}, member_id=mine, generation=1)
    written = len(rig.log)
    if commit.get("member_id") == "mine":
        commit = {**commit, "member_id": mine}
    assert rig.commit({("t", 0): 1}, **commit) == {("t", 0): code}
    assert rig.fetch() == {("t", 0): 5}
    assert len(rig.log) == written


@pytest.mark.parametrize(
    ("version", "code"),
    [(8, ErrorCode.ILLEGAL_GENERATION), (9, ErrorCode.GROUP_ID_NOT_FOUND)],
)
def test_a_commit_with_a_generation_to_no_group(rig, version, code):
    codes = rig.commit({("t", 0): 1}, member_id="m", generation=3, version=version)
    assert codes == {("t", 0): code}
    assert len(rig.coordinator) == 0


def test_commits_wait_for_the_assignment_but_not_for_the_others(rig):
    leader, follower = rig.stable(2)
    waits = rig.join(leader)
    assert rig.commit({("t", 0): 1}, member_id=follower, generation=2) == {("t", 0): 0}
    rig.join(follower)
    assert waits.answered
    codes = rig.commit({("t", 0): 2}, member_id=follower, generation=3)
    assert codes == {("t", 0): ErrorCode.REBALANCE_IN_PROGRESS}


@pytest.mark.parametrize(
    ("version", "code"),
    [(8, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), (10, ErrorCode.UNKNOWN_TOPIC_ID)],
)
def test_a_commit_for_a_missing_topic_is_refused_beside_the_others(rig, version, code):
    codes = rig.commit(
        {("missing", 0): 1, ("t", 4): 1, ("t", -1): 1, ("t", 3): 1}, version=version
    )
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert list(codes.values()) == [code, unknown, unknown, 0]
    assert rig.fetch() == {("t", 3): 1}


def test_metadata_has_a_limit(rig):
    limit = rig.config.offset_metadata_max_bytes
    assert rig.commit({("t", 0): 1}, metadata="x" * limit) == {("t", 0): 0}
    assert rig.fetch_of("t", 0).metadata == "x" * limit
    assert rig.commit({("t", 0): 2}, metadata="x" * (limit + 1)) == {
        ("t", 0): ErrorCode.OFFSET_METADATA_TOO_LARGE
    }
    assert rig.fetch() == {("t", 0): 1}
    assert rig.commit({("t", 0): 3}, metadata=None) == {("t", 0): 0}
    assert rig.fetch_of("t", 0).metadata == ""


@pytest.mark.parametrize("version", range(1, 8))
def test_versions_that_ask_for_one_group(rig, version):
    rig.commit({("t", 2): 8})
    request = OffsetFetchRequest(
        group_id="g",
        topics=[OffsetFetchRequestTopic(name="t", partition_indexes=[2, 0])],
    )
    answer = rig.ask("offset_fetch", request, version)
    (topic,) = answer.topics
    assert [p.committed_offset for p in topic.partitions] == [8, -1]
    if version >= 2:
        request.topics = None
        (topic,) = rig.ask("offset_fetch", request, version).topics
        assert [p.partition_index for p in topic.partitions] == [2]


def test_topics_may_be_named_by_their_ids(rig):
    rig.commit({("t", 0): 4}, version=10)
    request = OffsetFetchRequest()
    request.groups = [
        OffsetFetchRequestGroup(
            group_id="g",
            topics=[
                OffsetFetchRequestTopics(
                    topic_id=name.ljust(16, b"\0"), partition_indexes=[0]
                )
                for name in (b"t", b"gone")
            ],
        )
    ]
    known, unknown = rig.ask("offset_fetch", request, 10).groups[0].topics
    assert known.partitions[0].committed_offset == 4
    assert unknown.partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID


# -- deletion --------------------------------------------------------------------------


def delete_offsets(rig, *positions, group="g"):
    request = OffsetDeleteRequest(
        group_id=group,
        topics=[
            OffsetDeleteRequestTopic(
                name=topic,
                partitions=[OffsetDeleteRequestPartition(partition_index=partition)],
            )
            for topic, partition in positions
        ],
    )
    answer = rig.ask("offset_delete", request, 0)
    if answer.error_code:
        return answer.error_code
    return [row.partitions[0].error_code for row in answer.topics]


def test_offsets_of_unsubscribed_topics_can_be_deleted(rig):
    (mine,) = rig.stable(1)
    rig.commit({("t", 0): 1, ("u", 0): 2}, member_id=mine, generation=1)
    assert delete_offsets(rig, ("t", 0), ("u", 0), ("missing", 0)) == [
        ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC,
        0,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert rig.fetch() == {("t", 0): 1}
    rig.restart()
    assert rig.fetch() == {("t", 0): 1}
    rig.leave(mine)
    assert delete_offsets(rig, ("t", 0)) == [0]
    assert rig.fetch() == {}


def test_offsets_of_no_group_and_of_other_kinds_of_group(rig):
    assert delete_offsets(rig, ("t", 0)) == ErrorCode.GROUP_ID_NOT_FOUND
    rig.join(protocol_type="connect", version=3)
    assert delete_offsets(rig, ("t", 0)) == ErrorCode.NON_EMPTY_GROUP


def test_a_deleted_topic_takes_its_offsets_along(rig):
    rig.commit({("t", 0): 1, ("u", 0): 2}, group="a")
    rig.commit({("t", 1): 3}, group="b")
    rig.coordinator.topic_deleted("t")
    rig.collect()
    rig.restart()
    assert rig.fetch("a") == {("u", 0): 2}
    assert rig.fetch("b") == {}


def test_a_topic_may_be_deleted_while_there_is_no_coordinator(rig):
    rig.commit({("t", 0): 1, ("u", 0): 2}, group="a")
    rig.commit({("t", 1): 3}, group="b")
    del rig.topics.counts["t"]
    rig.restart()
    assert rig.fetch("a") == {("u", 0): 2}
    assert rig.fetch("b") == {}
    rig.topics.counts["t"] = 4  # another one of this name
    rig.restart()
    assert rig.fetch("a") == {("u", 0): 2}
    assert rig.fetch("b") == {}


def test_only_empty_groups_can_be_deleted_and_then_all_of_them_is_gone(rig):
    (mine,) = rig.stable(1, group="busy")
    rig.commit({("t", 0): 1, ("t", 1): 2}, group="idle")
    request = DeleteGroupsRequest(groups_names=["busy", "idle", "none"])
    results = rig.ask("delete_groups", request, 2).results
    assert [(row.group_id, row.error_code) for row in results] == [
        ("busy", ErrorCode.NON_EMPTY_GROUP),
        ("idle", 0),
        ("none", ErrorCode.GROUP_ID_NOT_FOUND),
    ]
    rig.restart()
    assert rig.group("idle") is None
    assert rig.fetch("idle") == {}
    assert rig.heartbeat(mine, 1, group="busy") == 0


# -- expiry ----------------------------------------------------------------------------


def expiring_rig(**config):
    rig = Rig(
        offsets_retention_ms=10 * MINUTE_MS,
        offsets_retention_check_interval_ms=MINUTE_MS,
        **config,
    )
    rig.coordinator.start_expiry(rig.now_ms)
    return rig


def test_offsets_without_group_management_expire_by_their_commit():
    rig = expiring_rig()
    rig.commit({("t", 0): 1})
    rig.advance(6 * MINUTE_MS)
    rig.commit({("t", 1): 1})
    rig.advance(5 * MINUTE_MS)
    assert rig.fetch() == {("t", 1): 1}
    rig.advance(6 * MINUTE_MS)
    assert rig.group() is None
    rig.restart()
    assert rig.group() is None


def test_offsets_of_a_group_are_kept_while_it_has_members_and_then_a_while():
    rig = expiring_rig(group_max_session_timeout_ms=10**9)
    (mine,) = rig.stable(1, session_ms=10**9)
    rig.commit({("t", 0): 1, ("u", 0): 1}, member_id=mine, generation=1)
    rig.advance(30 * MINUTE_MS)
    assert rig.fetch() == {("t", 0): 1}  # nobody reads u any more
    rig.leave(mine)
    rig.advance(9 * MINUTE_MS)
    assert rig.fetch() == {("t", 0): 1}
    rig.advance(2 * MINUTE_MS)
    assert rig.fetch() == {}
    assert rig.group() is None


def test_a_commit_may_say_how_long_it_is_to_be_kept():
    rig = expiring_rig()
    rig.commit({("t", 0): 1}, version=4, retention_ms=2 * MINUTE_MS)
    rig.restart()
    rig.coordinator.start_expiry(rig.now_ms)
    rig.advance(MINUTE_MS)
    assert rig.fetch() == {("t", 0): 1}
    rig.advance(2 * MINUTE_MS)
    assert rig.fetch() == {}


def test_many_groups_are_looked_at_in_slices():
    rig = expiring_rig()
    for number in range(1000):
        rig.commit({("t", 0): 1}, group=f"g{number}")
    rig.now_ms += 11 * MINUTE_MS
    rig.timers.expire(rig.now_ms)
    assert 0 < len(rig.coordinator) < 1000
    rig.advance(100)
    assert len(rig.coordinator) == 0


# -- transactions ----------------------------------------------------------------------


def test_offsets_of_a_transaction_count_when_it_has_committed(rig):
    rig.commit({("t", 0): 1})
    at = OffsetAndMetadata(9, -1, "", 0, -1)
    for producer, commit, expected in ((7, False, 1), (8, True, 9)):
        rig.coordinator.offsets.replay("g", "t", 0, at, producer)
        assert rig.fetch_of("t", 0).committed_offset == 1
        partition = rig.coordinator.partition_for("g")
        rig.coordinator.replay_end_of_transaction(partition, producer, commit=commit)
        assert rig.fetch_of("t", 0).committed_offset == expected


def test_a_fetch_of_stable_offsets_is_answered_to_wait_for_a_transaction(rig):
    offsets = GroupOffsets()
    offsets.put_pending(7, "t", 0, None)
    assert offsets.has_pending("t", 0)
    assert not offsets.has_pending("t", 1)
    at = OffsetAndMetadata(9, -1, "", 0, -1)
    rig.coordinator.offsets.replay("g", "t", 0, at, 7)
    (answer,) = rig.coordinator.offsets.fetch("g", "t", [0], stable=True)
    assert answer.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
    assert answer.committed_offset == -1


# -- looking ---------------------------------------------------------------------------


def test_groups_are_listed_by_state_and_type(rig):
    rig.stable(1, group="busy")
    rig.commit({("t", 0): 1}, group="idle")

    def listed(**filters):
        answer = rig.ask("list_groups", ListGroupsRequest(**filters), 5)
        return sorted(row.group_id for row in answer.groups)

    assert listed() == ["busy", "idle"]
    assert listed(states_filter=["stable"]) == ["busy"]
    assert listed(states_filter=["Empty", "Dead"]) == ["idle"]
    assert listed(types_filter=["CLASSIC"]) == ["busy", "idle"]
    assert listed(types_filter=["consumer"]) == []


@pytest.mark.parametrize("version", range(7))
def test_a_group_is_described(rig, version):
    (mine,) = rig.stable(1, client="me")
    request = DescribeGroupsRequest(groups=["g", "none"])
    if version >= 3:
        request.include_authorized_operations = True
    found, missing = rig.ask("describe_groups", request, version).groups
    assert (found.group_state, found.protocol_data) == ("Stable", "range")
    (member,) = found.members
    assert (member.member_id, member.client_id) == (mine, "me")
    assert member.client_host == "/host"
    assert bytes(member.member_metadata) == subscription("t")
    assert bytes(member.member_assignment) == f"for {mine}".encode()
    assert missing.group_state == "Dead"
    assert missing.error_code == (ErrorCode.GROUP_ID_NOT_FOUND if version > 5 else 0)
    rig.join(rig.new_id())
    found, _ = rig.ask("describe_groups", request, version).groups
    assert (found.group_state, found.protocol_data) == ("PreparingRebalance", "")
    assert bytes(found.members[0].member_metadata) == b""


def test_a_partition_that_loads_or_has_failed_serves_no_group(rig):
    (mine,) = rig.stable(1)
    waits = rig.join(rig.new_id())
    partition = rig.coordinator.partition_for("g")
    rig.coordinator.begin_loading([partition])
    loading = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert rig.commit({("t", 0): 4}) == {("t", 0): loading}
    assert rig.heartbeat(mine, 1) == ErrorCode.NONE  # as Kafka says, blindly
    rig.coordinator.loaded(partition, rig.now_ms)
    assert rig.heartbeat(mine, 1) == ErrorCode.REBALANCE_IN_PROGRESS
    rig.coordinator.failed(partition)
    rig.collect()
    assert rig.answer(waits).error_code == ErrorCode.NOT_COORDINATOR
    assert rig.heartbeat(mine, 1) == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert len(rig.timers) == 0


@pytest.mark.parametrize(("expires", "version"), [(-1, b"\0\x03"), (5, b"\0\x01")])
def test_an_offset_is_written_as_kafka_writes_it(expires, version):
    at = OffsetAndMetadata(5, 3, "größer", 2, expires)
    written = offset_value(*at)
    assert written[:2] == version
    key, value = read_record(offset_key("gruppe", "t", 7), written)
    assert key == OffsetCommitKey(group="gruppe", topic="t", partition=7)
    expected = at if expires < 0 else at._replace(leader_epoch=-1)
    assert OffsetAndMetadata.of_record(value) == expected


def test_the_end_of_the_broker_answers_all_parked_requests(rig):
    rig.stable(1)
    waits = rig.join(rig.new_id())
    rig.coordinator.refuse_waiting()
    rig.collect()
    assert rig.answer(waits).error_code == ErrorCode.NOT_COORDINATOR
    assert rig.group().is_in(S.PREPARING_REBALANCE)


def test_a_fetch_of_offsets_waits_until_they_are_on_disk(rig):
    rig.commit({("t", 0): 3})
    for version in (7, 8):
        request = OffsetFetchRequest(
            group_id="g",
            topics=None,
            groups=[OffsetFetchRequestGroup(group_id="g", topics=None)],
        )
        call = Call(version, "c", "/host")
        rig.coordinator.offset_fetch(call, request, rig.now_ms)
        (answer,) = rig.out.take_answers()
        assert answer.after == (rig.coordinator.partition_for("g"),)


def test_groups_of_a_lost_log_are_back_when_it_is_loaded_again(rig):
    rig.commit({("t", 0): 3})
    partition = rig.coordinator.partition_for("g")
    rig.coordinator.failed(partition)
    assert rig.commit({("t", 0): 4}) == {("t", 0): ErrorCode.COORDINATOR_NOT_AVAILABLE}
    rig.coordinator.begin_loading([partition])
    loading = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert rig.commit({("t", 0): 4}) == {("t", 0): loading}
    for number, key, value in rig.log:
        if number == partition:
            rig.coordinator.replay(*read_record(key, value), rig.now_ms)
    rig.coordinator.loaded(partition, rig.now_ms)
    assert rig.fetch() == {("t", 0): 3}
    assert rig.commit({("t", 0): 4}) == {("t", 0): 0}


def test_a_group_that_is_named_again_is_described_once(rig):
    """Or a request of a few bytes a name made an answer of hundreds of megabytes."""
    rig.stable(1)
    named = ["g", "h"] * 1000
    classic = rig.ask("describe_groups", DescribeGroupsRequest(groups=named), 5)
    assert [each.group_id for each in classic.groups] == ["g", "h"]
    request = ConsumerGroupDescribeRequest(group_ids=named)
    described = rig.ask("consumer_group_describe", request, 1)
    assert [each.group_id for each in described.groups] == ["g", "h"]


def test_a_group_and_a_partition_that_are_fetched_again_are_answered_once(rig):
    rig.commit({("t", 0): 5, ("t", 1): 6, ("u", 0): 7})

    def fetch(*groups, version=9):
        request = OffsetFetchRequest(
            groups=[
                OffsetFetchRequestGroup(
                    group_id=group_id,
                    topics=None
                    if topics is None
                    else [
                        OffsetFetchRequestTopics(name=name, partition_indexes=indexes)
                        for name, indexes in topics
                    ],
                )
                for group_id, topics in groups
            ]
        )
        return [
            (
                row.group_id,
                {
                    topic.name: [
                        (each.partition_index, each.committed_offset)
                        for each in topic.partitions
                    ]
                    for topic in row.topics
                },
            )
            for row in rig.ask("offset_fetch", request, version).groups
        ]

    everything = {"t": [(0, 5), (1, 6)], "u": [(0, 7)]}
    assert fetch(*[("g", None)] * 1000, ("h", None)) == [("g", everything), ("h", {})]
    assert fetch(("g", [("u", [0])]), ("g", None)) == [("g", everything)]
    named = [("t", [1, 1, 1]), ("u", [0]), ("t", [0, 1])]
    assert fetch(("g", named), ("g", [("u", [0, 1])])) == [
        ("g", {"t": [(1, 6), (0, 5)], "u": [(0, 7), (1, -1)]})
    ]


def test_descriptions_of_groups_share_a_budget(rig, monkeypatch):
    monkeypatch.setattr(AnswerBudget.__init__, "__defaults__", (100_000,))
    protocols = {"range": bytes(60_000)}
    for group in ("a", "b", "c"):
        member = rig.answer(rig.join(group=group)).member_id
        joined = rig.join(member, group=group, protocols=protocols)
        rig.sync(member, rig.answer(joined).generation_id, {member: b""}, group=group)
    request = DescribeGroupsRequest(groups=["a", "none", "b", "c", "none2"])
    found = rig.ask("describe_groups", request, 5).groups
    refused = ErrorCode.POLICY_VIOLATION
    assert [row.error_code for row in found] == [0, 0, refused, refused, refused]
    (row,) = rig.ask("describe_groups", DescribeGroupsRequest(groups=["c"]), 5).groups
    assert len(row.members[0].member_metadata) == 60_000
