"""The consumer protocol (KIP-848), heartbeat by heartbeat."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mpbroker.coordinator.groups.consumer_group import ConsumerGroup, ConsumerGroupState
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
)
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    TopicPartitions,
)
from mpbroker.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from mpbroker.protocol.messages.list_groups import ListGroupsRequest
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tests.coordinator.rig import Rig

S = ConsumerGroupState
T = b"t".ljust(16, b"\0")
MANY_NAMES = [f"a-name-of-24-letters-{n:03d}" for n in range(40)] + ["logs-a", "logs-b"]


def beat(rig, member_id, epoch, *, owned=None, version=1, **fields):
    """Send one heartbeat; return its answer."""
    if epoch == 0:
        fields = {
            "rebalance_timeout_ms": 20_000,
            "subscribed_topic_names": ["t"],
            **fields,
        }
        owned = owned or {}
    rows = None
    if owned is not None:
        rows = [
            TopicPartitions(topic_id=topic, partitions=sorted(numbers))
            for topic, numbers in owned.items()
            if numbers
        ]
    request = ConsumerGroupHeartbeatRequest(
        group_id=fields.pop("group", "g"),
        member_id=member_id,
        member_epoch=epoch,
        topic_partitions=rows,
        **fields,
    )
    return rig.ask("consumer_group_heartbeat", request, version)


def given_to(answer):
    return {
        row.topic_id: set(row.partitions)
        for row in (answer.assignment.topic_partitions if answer.assignment else ())
    }


class Consumer:
    """A client as KIP-848 describes it: it gives up revoked partitions at once."""

    def __init__(self, rig, member_id, **fields):
        self.rig, self.member_id, self.fields = rig, member_id, fields
        self.epoch, self.owned = 0, {}
        self.unsure = False  # has lost an answer: says everything once more

    def beat(self):
        fields = self.fields if self.epoch == 0 or self.unsure else {}
        if self.unsure:
            fields = {
                "rebalance_timeout_ms": 20_000,
                "subscribed_topic_names": ["t"],
                **fields,
            }
        self.unsure = False
        answer = beat(self.rig, self.member_id, self.epoch, owned=self.owned, **fields)
        if answer.error_code in (
            ErrorCode.FENCED_MEMBER_EPOCH,
            ErrorCode.UNKNOWN_MEMBER_ID,
        ):
            self.epoch, self.owned = 0, {}
        elif answer.error_code == 0:
            self.epoch = answer.member_epoch
            if answer.assignment is not None:
                self.owned = given_to(answer)
        return answer


def settle(*consumers):
    for _ in range(6):
        for consumer in consumers:
            assert consumer.beat().error_code == 0


def numbers(consumer):
    return set().union(*consumer.owned.values()) if consumer.owned else set()


# -- the way of a member ---------------------------------------------------------------


def test_the_first_member_gets_everything_at_once(rig):
    answer = beat(rig, "m", 0)
    assert (answer.error_code, answer.member_id, answer.member_epoch) == (0, "m", 1)
    assert given_to(answer) == {T: {0, 1, 2, 3}}
    assert answer.heartbeat_interval_ms == 5000
    assert beat(rig, "m", 1).assignment is None  # nothing new
    assert rig.group().state is S.STABLE


def test_version_0_is_given_an_id(rig):
    answer = beat(rig, "", 0, version=0)
    assert answer.member_id


def test_a_second_member_waits_until_the_first_has_given_up(rig):
    one, two = Consumer(rig, "one"), Consumer(rig, "two")
    one.beat()
    assert two.beat().member_epoch == 2
    assert numbers(two) == set()
    assert rig.group().state is S.RECONCILING
    answer = beat(rig, "one", 1, owned=one.owned)
    assert given_to(answer) == {T: {0, 1}}
    assert answer.member_epoch == 1  # until it has given the others up
    two.beat()
    assert numbers(two) == set()
    one.owned = given_to(answer)
    assert one.beat().member_epoch == 2
    two.beat()
    assert numbers(two) == {2, 3}
    assert rig.group().state is S.STABLE


def test_the_partitions_of_a_leaving_member_go_to_the_others(rig):
    one, two = Consumer(rig, "one"), Consumer(rig, "two")
    settle(one, two)
    answer = beat(rig, "two", -1)
    assert (answer.error_code, answer.member_epoch) == (0, -1)
    settle(one)
    assert numbers(one) == {0, 1, 2, 3}


def test_a_silent_member_is_out_after_its_session(rig):
    one, two = Consumer(rig, "one"), Consumer(rig, "two")
    settle(one, two)
    for _ in range(10):
        rig.advance(5000)
        one.beat()
    assert numbers(one) == {0, 1, 2, 3}
    assert two.beat().error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_silent_member_is_out_though_the_coordinator_is_killed_more_often(rig):
    alive, silent = Consumer(rig, "alive"), Consumer(rig, "silent")
    for each in (alive, silent):
        each.beat()
    for _ in range(5):
        rig.advance(8000)
        assert "silent" in rig.group().members
        alive.beat()
        rig.restart()
    rig.advance(5000)
    assert list(rig.group().members) == ["alive"]


def test_a_heartbeat_during_a_load_begins_the_session_anew(rig):
    consumers = [Consumer(rig, name) for name in ("alive", "heard", "silent")]
    settle(*consumers)
    timeout_ms = rig.config.group_consumer_session_timeout_ms
    rig.advance(timeout_ms - 1000)
    consumers[0].beat()
    codes = []

    def knock():
        for name in ("heard", "silent"):
            epoch = rig.group().members[name].member_epoch if name == "heard" else -1
            codes.append(beat(rig, name, epoch).error_code)

    rig.restart(knock)
    assert codes == [ErrorCode.COORDINATOR_LOAD_IN_PROGRESS] * 2
    rig.advance(3000)
    assert set(rig.group().members) == {"alive", "heard"}


def test_a_group_has_timeouts_of_its_own_from_its_next_heartbeat_on(rig):
    beat(rig, "m", 0)
    rig.group_configs["g"] = {
        "consumer.session.timeout.ms": "60000",
        "consumer.heartbeat.interval.ms": "9000",
    }
    assert beat(rig, "m", 1).heartbeat_interval_ms == 9000
    rig.advance(59_999)
    assert "m" in rig.group().members
    rig.advance(1)
    assert "m" not in rig.group().members


def test_a_member_that_does_not_give_up_partitions_in_time_is_removed(rig):
    one, two = Consumer(rig, "one"), Consumer(rig, "two")
    one.beat()
    two.beat()
    for _ in range(5):
        beat(rig, "one", 1, owned={T: {0, 1, 2, 3}})
        rig.advance(5000)
        two.beat()
    assert "one" not in rig.group().members
    two.beat()
    assert numbers(two) == {0, 1, 2, 3}


def test_no_member_waits_for_partitions_for_longer_than_half_an_hour(rig):
    """Clients may ask for a rebalance timeout of 24.8 days."""
    one = Consumer(rig, "one", rebalance_timeout_ms=0x7FFF_FFFF)
    two = Consumer(rig, "two")
    one.beat()
    two.beat()
    for _ in range(1_800_000 // 5000):
        assert "one" in rig.group().members
        beat(rig, "one", 1, owned={T: {0, 1, 2, 3}})
        rig.advance(5000)
        two.beat()
    assert "one" not in rig.group().members
    two.beat()
    assert numbers(two) == {0, 1, 2, 3}


def test_a_new_partition_is_assigned_at_the_next_heartbeat(rig):
    one = Consumer(rig, "one")
    settle(one)
    rig.topics.counts["t"] = 6
    settle(one)
    assert numbers(one) == set(range(6))


@pytest.mark.parametrize(
    "pattern",
    ["logs-.*", "(?i)LOGS-[AB]", r"logs\b-\p{Ll}", r"\Qlogs-\E.", "|".join(MANY_NAMES)],
)
def test_a_pattern_takes_in_topics_as_they_come(rig, pattern):
    one = Consumer(
        rig, "one", subscribed_topic_regex=pattern, subscribed_topic_names=None
    )
    settle(one)
    assert one.owned == {}
    rig.topics.counts |= {"logs-a": 1, "other": 2}
    settle(one)
    assert one.owned == {b"logs-a".ljust(16, b"\0"): {0}}
    rig.restart()
    rig.topics.counts["logs-b"] = 1
    settle(one)
    assert len(one.owned) == 2


def test_a_change_of_subscription_is_a_new_epoch(rig):
    one = Consumer(rig, "one")
    settle(one)
    answer = beat(rig, "one", one.epoch, subscribed_topic_names=["u"])
    assert rig.group().group_epoch == 2
    assert given_to(answer) == {}
    one.owned = {}
    settle(one)
    assert one.owned == {b"u".ljust(16, b"\0"): {0, 1}}


@pytest.mark.parametrize("assignor", ["uniform", "range"])
def test_the_assignor_is_the_one_that_most_ask_for(rig, assignor):
    members = [Consumer(rig, f"m{n}", server_assignor=assignor) for n in range(2)]
    settle(*members)
    assert rig.group().assignor_name == assignor


# -- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"group": ""}, ErrorCode.INVALID_REQUEST),
        ({"member_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"epoch": -3}, ErrorCode.INVALID_REQUEST),
        ({"epoch": -2}, ErrorCode.INVALID_REQUEST),
        ({"epoch": -1}, ErrorCode.GROUP_ID_NOT_FOUND),
        ({"epoch": 5}, ErrorCode.GROUP_ID_NOT_FOUND),
        ({"rebalance_timeout_ms": -1}, ErrorCode.INVALID_REQUEST),
        ({"subscribed_topic_names": None}, ErrorCode.INVALID_REQUEST),
        ({"owned": {T: {0}}}, ErrorCode.INVALID_REQUEST),
        ({"instance_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"rack_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"server_assignor": "mine"}, ErrorCode.UNSUPPORTED_ASSIGNOR),
        ({"subscribed_topic_regex": "("}, ErrorCode.INVALID_REGULAR_EXPRESSION),
    ],
)
def test_an_invalid_heartbeat_is_refused_and_changes_nothing(rig, fields, code):
    member_id = fields.pop("member_id", "m")
    answer = beat(rig, member_id, fields.pop("epoch", 0), **fields)
    assert answer.error_code == code
    assert len(rig.coordinator) == 0
    assert not rig.log


def test_a_subscription_larger_than_a_record_is_refused(rig):
    names = ["x" * 20_000] * 60
    assert beat(rig, "m", 0, subscribed_topic_names=names).error_code == -1
    assert len(rig.coordinator) == 0
    one = Consumer(rig, "one")
    settle(one)
    written = len(rig.log)
    assert beat(rig, "one", one.epoch, subscribed_topic_names=names).error_code == -1
    assert len(rig.log) == written
    settle(one)


def test_epochs_from_the_past_and_the_future_are_fenced(rig):
    one, two = Consumer(rig, "one"), Consumer(rig, "two")
    settle(one, two)
    written = len(rig.log)
    for epoch in (one.epoch + 1, one.epoch - 2):
        if epoch > 0:
            answer = beat(rig, "one", epoch, owned=one.owned)
            assert answer.error_code == ErrorCode.FENCED_MEMBER_EPOCH
    answer = beat(rig, "one", 1, owned={T: {3}})
    assert answer.error_code == ErrorCode.FENCED_MEMBER_EPOCH
    assert len(rig.log) == written
    # A member that only missed an answer may go on.
    assert beat(rig, "one", 1, owned=one.owned).error_code == 0
    assert beat(rig, "x", 3).error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_full_group_takes_no_member():
    rig = Rig(group_consumer_max_size=1)
    beat(rig, "one", 0)
    assert beat(rig, "two", 0).error_code == ErrorCode.GROUP_MAX_SIZE_REACHED


def test_the_protocol_can_be_turned_off():
    rig = Rig(rebalance_protocols=("classic",))
    assert beat(rig, "one", 0).error_code == ErrorCode.UNSUPPORTED_VERSION


# -- static members --------------------------------------------------------------------


def test_a_static_member_that_goes_for_a_while_keeps_its_share(rig):
    one = Consumer(rig, "one", instance_id="i")
    two = Consumer(rig, "two")
    settle(one, two)
    share, epoch = one.owned, rig.group().group_epoch
    answer = beat(rig, "one", -2, instance_id="i")
    assert answer.member_epoch == -2
    two.beat()
    rig.restart()
    again = beat(rig, "again", 0, instance_id="i")
    assert given_to(again) == share
    assert rig.group().group_epoch == epoch
    assert "one" not in rig.group().members


def test_an_instance_has_one_member(rig):
    beat(rig, "one", 0, instance_id="i")
    code = beat(rig, "two", 0, instance_id="i").error_code
    assert code == ErrorCode.UNRELEASED_INSTANCE_ID
    code = beat(rig, "two", 1, instance_id="i").error_code
    assert code == ErrorCode.FENCED_INSTANCE_ID
    code = beat(rig, "one", 1, instance_id="j").error_code
    assert code == ErrorCode.UNKNOWN_MEMBER_ID


# -- beside the classic protocol -------------------------------------------------------


def test_commits_are_of_a_member_and_its_epoch(rig):
    beat(rig, "m", 0)
    kwargs = {"member_id": "m", "version": 9}
    assert rig.commit({("t", 0): 3}, generation=1, **kwargs) == {("t", 0): 0}
    assert rig.commit({("t", 0): 4}, generation=0, **kwargs) == {
        ("t", 0): ErrorCode.STALE_MEMBER_EPOCH
    }
    kwargs["member_id"] = "x"
    assert rig.commit({("t", 0): 4}, generation=1, **kwargs) == {
        ("t", 0): ErrorCode.UNKNOWN_MEMBER_ID
    }
    assert rig.fetch() == {("t", 0): 3}
    rig.restart()
    assert rig.fetch() == {("t", 0): 3}


@pytest.mark.parametrize("version", [9, 10])
def test_a_commit_with_an_older_epoch_counts_for_partitions_held_since_then(
    rig, version
):
    """KIP-1251: the member's answer with its new epoch may be still under way."""

    def commit(epoch, *partitions):
        codes = rig.commit(
            {("t", number): 7 for number in partitions},
            member_id="m",
            generation=epoch,
            version=version,
        )
        (code,) = set(codes.values())
        return code

    member, other = Consumer(rig, "m"), Consumer(rig, "o")
    settle(member)
    first = member.epoch
    settle(other, member)
    second = member.epoch
    (kept, _), (lost, _) = sorted(numbers(member)), sorted(numbers(other))
    assert first < second
    for _ in range(2):  # and by the log
        assert commit(second, kept) == commit(first, kept) == ErrorCode.NONE
        assert commit(first, lost) == ErrorCode.STALE_MEMBER_EPOCH
        assert commit(first, kept, lost) == ErrorCode.STALE_MEMBER_EPOCH
        assert commit(second + 1, kept) == ErrorCode.STALE_MEMBER_EPOCH
        rig.restart()
    beat(rig, "o", -1)
    settle(member)
    assert lost in numbers(member) and member.epoch > second
    for _ in range(2):
        for epoch in (first, second):
            assert commit(epoch, kept) == ErrorCode.NONE
            assert commit(epoch, lost) == ErrorCode.STALE_MEMBER_EPOCH
        rig.restart()


def test_a_commit_with_an_older_epoch_counts_until_the_partition_is_given_up(rig):
    member, other = Consumer(rig, "m"), Consumer(rig, "o")
    settle(member)
    first = member.epoch
    other.beat()
    member_is_told = beat(rig, "m", first, owned={T: {0, 1, 2, 3}})
    given = given_to(member_is_told)[T]
    asked = {"member_id": "m", "generation": first, "version": 9}
    for number in range(4):  # those to be given up, too
        assert rig.commit({("t", number): 1}, **asked) == {("t", number): 0}
    beat(rig, "m", first, owned={T: given})
    for number in range(4):
        code = ErrorCode.NONE if number in given else ErrorCode.STALE_MEMBER_EPOCH
        assert rig.commit({("t", number): 1}, **asked) == {("t", number): code}


@pytest.mark.parametrize("version", [9, 10])
def test_a_refused_commit_says_which_partitions_do_not_exist(rig, version):
    settle(Consumer(rig, "m"))
    refused, none = ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    unknown = none if version < 10 else ErrorCode.UNKNOWN_TOPIC_ID
    request = OffsetCommitRequest(
        group_id="g",
        member_id="x",
        generation_id_or_member_epoch=1,
        topics=[
            OffsetCommitRequestTopic(
                name=name,
                topic_id=name.encode().ljust(16, b"\0"),
                partitions=[
                    OffsetCommitRequestPartition(partition_index=number)
                    for number in numbers
                ],
            )
            for name, numbers in (("t", (0, 4, -1)), ("gone", (0,)))
        ],
    )
    answer = rig.ask("offset_commit", request, version)
    assert [[part.error_code for part in row.partitions] for row in answer.topics] == [
        [refused, none, none],
        [unknown],
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"group": " "},
        {"member_id": "\t "},
        {"instance_id": " "},
        {"rack_id": "\0"},
        {"member_id": " ", "version": 0},
    ],
)
def test_a_blank_id_is_as_invalid_as_an_empty_one(rig, fields):
    fields = {"member_id": "m", "epoch": 0, **fields}
    answer = beat(rig, fields.pop("member_id"), fields.pop("epoch"), **fields)
    assert answer.error_code == ErrorCode.INVALID_REQUEST
    assert "can't be empty" in answer.error_message


def test_a_static_member_that_left_does_not_commit_with_its_epoch_from_before(rig):
    settle(Consumer(rig, "m", instance_id="i"))
    beat(rig, "m", -2, instance_id="i")
    back = Consumer(rig, "m", instance_id="i")
    settle(back, Consumer(rig, "o"), back)
    (kept, _) = sorted(numbers(back))
    codes = rig.commit(
        {("t", kept): 1}, member_id="m", instance="i", generation=0, version=9
    )
    assert codes == {("t", kept): ErrorCode.STALE_MEMBER_EPOCH}


def test_a_commit_in_a_version_without_member_epochs_is_not_supported(rig):
    settle(Consumer(rig, "m"))
    for generation in (0, 1):
        codes = rig.commit({("t", 0): 1}, member_id="m", generation=generation)
        assert codes == {("t", 0): ErrorCode.UNSUPPORTED_VERSION}


def test_a_group_changes_its_protocol_while_it_is_empty(rig):
    (classic,) = rig.stable(1)
    rig.commit({("t", 0): 3}, member_id=classic, generation=1)
    rig.leave(classic)
    assert beat(rig, "m", 0).error_code == 0
    rig.restart()
    assert isinstance(rig.group(), ConsumerGroup)
    assert rig.heartbeat("m", 1) == ErrorCode.UNKNOWN_MEMBER_ID
    beat(rig, "m", -1)
    assert rig.fetch() == {("t", 0): 3}
    rig.stable(1)
    rig.restart()
    assert not isinstance(rig.group(), ConsumerGroup)
    assert rig.fetch() == {("t", 0): 3}


def test_a_group_is_listed_and_described(rig):
    one = Consumer(rig, "one")
    settle(one)
    (row,) = rig.ask(
        "list_groups", ListGroupsRequest(types_filter=["consumer"]), 5
    ).groups
    assert (row.group_id, row.group_type, row.group_state) == (
        "g",
        "consumer",
        "Stable",
    )
    request = ConsumerGroupDescribeRequest(group_ids=["g", "none"])
    found, missing = rig.ask("consumer_group_describe", request, 1).groups
    assert (found.group_state, found.group_epoch, found.assignment_epoch) == (
        "Stable",
        1,
        1,
    )
    (member,) = found.members
    assert member.subscribed_topic_names == ["t"]
    for assignment in (member.assignment, member.target_assignment):
        (row,) = assignment.topic_partitions
        assert (row.topic_name, row.partitions) == ("t", [0, 1, 2, 3])
    assert missing.error_code == ErrorCode.GROUP_ID_NOT_FOUND


# -- whatever happens ------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 5])
def test_an_admin_client_removes_a_member_by_its_id(rig, version):
    stays, goes = Consumer(rig, "stays"), Consumer(rig, "goes")
    settle(stays, goes)
    request = LeaveGroupRequest(group_id="g", member_id="goes")
    if version >= 3:
        request.members = [MemberIdentity(member_id="goes")]
        request.member_id = ""
    answer = rig.ask("leave_group", request, version)
    codes = [answer.error_code, *(row.error_code for row in answer.members)]
    assert set(codes) == {ErrorCode.NONE}
    assert goes.beat().error_code == ErrorCode.UNKNOWN_MEMBER_ID
    settle(stays)
    assert numbers(stays) == {0, 1, 2, 3}
    rig.restart()
    assert set(rig.group().members) == {"stays"}


@pytest.mark.parametrize("is_away", [False, True])
def test_an_admin_client_removes_a_static_member_by_its_instance(rig, is_away):
    member = Consumer(rig, "m", instance_id="i")
    settle(member)
    if is_away:  # it has left, and will come back
        beat(rig, "m", -2, instance_id="i")
    (row,) = rig.leave(MemberIdentity(member_id="", group_instance_id="i")).members
    assert (row.error_code, row.group_instance_id) == (ErrorCode.NONE, "i")
    assert not rig.group().members and not rig.group().static_members
    (row,) = rig.leave(MemberIdentity(member_id="", group_instance_id="i")).members
    assert row.error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_static_member_under_another_id_is_not_removed(rig):
    settle(Consumer(rig, "m", instance_id="i"))
    (row,) = rig.leave(MemberIdentity(member_id="o", group_instance_id="i")).members
    assert row.error_code == ErrorCode.FENCED_INSTANCE_ID
    assert set(rig.group().members) == {"m"}


class ConsumerGroups(RuleBasedStateMachine):
    """Clients that join, leave, stall and lose answers; a coordinator that dies."""

    def __init__(self):
        super().__init__()
        self.rig = Rig()
        self.consumers = [Consumer(self.rig, f"m{number}") for number in range(4)]

    @rule(number=st.integers(0, 3))
    def beat(self, number):
        assert self.consumers[number].beat().error_code in (
            ErrorCode.NONE,
            ErrorCode.FENCED_MEMBER_EPOCH,
            ErrorCode.UNKNOWN_MEMBER_ID,
        )

    @rule(number=st.integers(0, 3))
    def beat_and_lose_the_answer(self, number):
        consumer = self.consumers[number]
        epoch, owned = consumer.epoch, consumer.owned
        consumer.beat()
        if epoch:  # a member that loses the answer to its join asks again
            consumer.epoch, consumer.owned = epoch, owned
            consumer.unsure = True

    @rule(number=st.integers(0, 3))
    def leave(self, number):
        consumer = self.consumers[number]
        if consumer.epoch > 0:
            beat(self.rig, consumer.member_id, -1)
            consumer.epoch, consumer.owned = 0, {}

    @rule(count=st.integers(1, 8))
    def change_topic(self, count):
        self.rig.topics.counts["t"] = max(count, self.rig.topics.counts["t"])

    @rule(ms=st.sampled_from([1000, 10_000, 50_000]))
    def wait(self, ms):
        self.rig.advance(ms)
        if ms >= 45_000:
            # A client that could not heartbeat gives up what it has.
            for consumer in self.consumers:
                consumer.epoch, consumer.owned = 0, {}

    @rule()
    def restart(self):
        before = self.rig.group()
        self.rig.restart()
        after = self.rig.group()
        if before is not None:
            assert after.group_epoch == before.group_epoch
            assert after.target == before.target
            assert {m: x.position() for m, x in after.members.items()} == {
                m: x.position() for m, x in before.members.items()
            }

    @invariant()
    def nothing_is_two_members(self):
        group = self.rig.group()
        if group is None:
            return
        held = [
            (topic, n)
            for member in group.members.values()
            for partitions in (member.assigned, member.pending_revocation)
            for topic, numbers in partitions.items()
            for n in numbers
        ]
        assert len(held) == len(set(held))
        for topic, n in held:
            assert group.holder(topic, n) is not None
        for member in group.members.values():
            assert member.member_epoch <= group.assignment_epoch <= group.group_epoch

    def teardown(self):
        """With heartbeats alone, all members reach the target."""
        for _ in range(8):
            for consumer in self.consumers:
                consumer.beat()
        shares = [numbers(consumer) for consumer in self.consumers]
        assert sum(map(len, shares)) == self.rig.topics.counts["t"]
        assert set().union(*shares) == set(range(self.rig.topics.counts["t"]))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert self.rig.group().state is S.STABLE


ConsumerGroups.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestConsumerGroups = ConsumerGroups.TestCase
