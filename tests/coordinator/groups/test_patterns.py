"""The topics that members get by a pattern if there is an authorizer."""

from __future__ import annotations

import pytest

from mpbroker.coordinator.groups.group_records import read_record
from mpbroker.protocol.acl import AclOperation
from tests.coordinator.groups.test_consumer_protocol import Consumer, settle
from tests.coordinator.rig import Rig


class Access:
    """The rights of one member."""

    def __init__(self, *topics):
        self.topics = set(topics)
        self.version = 1
        self.asked = 0

    def may_topic(self, operation, name, *, log=True):
        assert operation is AclOperation.DESCRIBE and not log
        self.asked += 1
        return name in self.topics


class Guarded(Consumer):
    def __init__(self, rig, member_id, access, pattern="logs-.*"):
        super().__init__(
            rig, member_id, subscribed_topic_regex=pattern, subscribed_topic_names=None
        )
        self.access = access

    def beat(self):
        self.rig.access_of = lambda client: self.access
        return super().beat()


@pytest.fixture
def rig():
    made = Rig()
    make = made._start

    def start():
        make()
        made.coordinator.be_guarded()

    made._start = start
    start()
    made.topics.counts |= {"logs-a": 2, "logs-b": 2, "other": 2}
    return made


def names(*consumers):
    return {
        topic.rstrip(b"\0").decode()
        for consumer in consumers
        for topic, partitions in consumer.owned.items()
        if partitions
    }


def in_the_log(rig):
    """All topics that ever were in a record of a pattern."""
    found = set()
    for _, key, value in rig.log:
        record = read_record(key, value)
        if record is not None and hasattr(record[0], "regular_expression"):
            found.update(() if record[1] is None else record[1].topics)
    return found


def test_a_pattern_shows_the_topics_that_the_member_may_describe(rig):
    one = Guarded(rig, "one", Access("logs-a", "other"))
    settle(one)
    assert names(one) == {"logs-a"}
    assert in_the_log(rig) == {"logs-a"}


def test_two_members_see_different_topics_by_one_pattern(rig):
    one = Guarded(rig, "one", Access("logs-a", "logs-b"))
    two = Guarded(rig, "two", Access("logs-a"))
    settle(one, two)
    assert names(two) <= {"logs-a"}
    assert names(one, two) == {"logs-a", "logs-b"}


def test_rights_that_change_count_from_the_next_heartbeat_on(rig):
    one = Guarded(rig, "one", Access("logs-a"))
    settle(one)
    one.access.topics.add("logs-b")
    one.access.version = 2
    settle(one)
    assert names(one) == {"logs-a", "logs-b"}
    one.access.topics.clear()
    one.access.version = 3
    settle(one)
    assert names(one) == set()


def test_rights_are_looked_at_when_something_has_changed(rig):
    one = Guarded(rig, "one", Access("logs-a"))
    settle(one)
    asked = one.access.asked
    settle(one)
    assert one.access.asked == asked
    rig.topics.counts["logs-c"] = 1
    one.access.topics.add("logs-c")
    settle(one)
    assert names(one) == {"logs-a", "logs-c"}
    one.access.version = None  # no answer may be kept
    asked = one.access.asked
    one.beat()
    assert one.access.asked > asked


def test_after_a_restart_no_member_sees_more_than_before(rig):
    one = Guarded(rig, "one", Access("logs-a"))
    two = Guarded(rig, "two", Access("logs-a"))
    settle(one, two)
    epoch = rig.group().group_epoch
    rig.restart()
    settle(one, two)
    assert rig.group().group_epoch == epoch  # nobody was disturbed
    rig.topics.counts["logs-c"] = 1
    rig.restart()
    settle(two)  # "one" has not been heard since
    assert rig.group().wanted_topics(rig.group().members["one"]) == {"logs-a"}
    assert "logs-c" not in in_the_log(rig)


def test_a_pattern_of_an_older_log_that_is_none_here_shows_nothing():
    rig = Rig()
    rig.topics.counts |= {"a": 2}
    one = Consumer(rig, "one", subscribed_topic_names=["a"])
    two = Consumer(rig, "two", subscribed_topic_names=["a"])
    settle(one, two)
    rig.group().members["one"].topic_regex = "a**"
    rig.topics.counts["b"] = 1
    settle(two)
    assert names(one) | names(two) == {"a"}


def test_a_member_that_changes_its_pattern_sees_by_the_new_one(rig):
    one = Guarded(rig, "one", Access("logs-a", "other"))
    settle(one)
    one.unsure = True
    one.fields = {**one.fields, "subscribed_topic_regex": "o.*"}
    settle(one)
    assert names(one) == {"other"}
