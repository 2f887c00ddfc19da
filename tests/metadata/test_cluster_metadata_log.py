"""A node's copy of the cluster's metadata log, as its processes read it."""

from __future__ import annotations

import pytest

from mpbroker.metadata import topics
from mpbroker.metadata.cluster_metadata_log import ClusterMetadataLog
from mpbroker.metadata.metadata_image import (
    TOPIC_RESOURCE,
    config_record,
    partition_record,
    remove_topic_record,
    topic_record,
)
from mpbroker.metadata.metadata_log import recover_metadata_log
from mpbroker.metadata.topics import RegistryHooks, TopicRegistry
from mpbroker.protocol.errors import ApiError
from tests.support.metadata import NOW_MS, PlainCell, registry

THIS = 1
OTHER = 2
FIRST = 3  # the offset behind the records of a new log
CAPACITY = 4


class Node:
    """A node: the process that writes the copy, and one that reads it."""

    def __init__(self, directory) -> None:
        self.passed = -1
        cell = PlainCell()
        recover_metadata_log(str(directory), cell, NOW_MS)
        options = {"broker_id": THIS, "capacity": CAPACITY}
        hooks = RegistryHooks(passed=lambda: self.passed)
        self.writer = registry(directory, cell, **options, hooks=hooks)
        self.reader = registry(directory, cell, **options, log_class=ClusterMetadataLog)

    def copy(self, *records) -> TopicRegistry:
        end = self.writer.metadata_end().offset
        self.writer.copy_records(end, records)
        self.reader.catch_up()
        return self.reader


def topic(name: str, number: int, leader: int, count: int = 1, **overrides: str):
    topic_id = bytes([*bytes(15), number])
    return [
        topic_record(name, topic_id),
        *(
            config_record(TOPIC_RESOURCE, name, key.replace("_", "."), value)
            for key, value in overrides.items()
        ),
        *(partition_record(topic_id, index, leader) for index in range(count)),
    ]


def test_a_topic_is_led_by_the_node_that_made_it_unless_each_node_serves_it(tmp_path):
    node = Node(tmp_path)
    known = node.copy(
        *topic("here", 1, THIS),
        *topic("there", 2, OTHER),
        *topic("shared", 3, OTHER, diskless_enable="true"),
    )
    leaders = {each.name: each.leader for each in known.topics()}
    assert leaders == {"here": THIS, "there": OTHER, "shared": THIS}


def test_a_snapshot_keeps_the_place_in_the_cluster_s_log(tmp_path):
    node = Node(tmp_path)
    node.copy(*topic("orders", 1, OTHER))
    for number in range(600):
        node.copy(config_record(TOPIC_RESOURCE, "orders", "retention.ms", str(number)))
        node.copy(config_record(TOPIC_RESOURCE, "orders", "retention.ms", None))
    end = node.writer.metadata_end().offset
    again = Node(tmp_path)  # its start writes a snapshot
    assert list(tmp_path.rglob("*.checkpoint"))
    assert again.writer.metadata_end().offset == end
    known = again.copy(*topic("payments", 2, OTHER))
    assert {each.name: each.leader for each in known.topics()} == {
        "orders": OTHER,
        "payments": OTHER,
    }
    again.reader.replace_records()  # and a running broker another one
    assert again.writer.metadata_end().offset == end + 2
    again.copy(*topic("more", 3, THIS))
    assert Node(tmp_path).writer.metadata_end().offset == end + 4


def test_records_that_another_process_has_copied_are_not_copied_again(tmp_path):
    node = Node(tmp_path)
    node.copy(*topic("orders", 1, OTHER))
    end = node.writer.metadata_end().offset
    node.writer.copy_records(FIRST, topic("orders", 1, OTHER))
    assert node.writer.metadata_end().offset == end
    assert [each.name for each in node.copy().topics()] == ["orders"]


def test_rows_of_deleted_topics_are_used_again_when_this_node_has_let_go(tmp_path):
    node = Node(tmp_path)
    known = node.copy(*topic("old", 1, OTHER, 3))
    node.copy(remove_topic_record(known.topic("old").topic_id))
    # Not let go of: the partitions get rows above the limit.
    above = node.copy(*topic("above", 2, OTHER, 3)).topic("above")
    assert above.partitions == [3, 4, 5]
    node.passed = 1 << 40
    again = node.copy(*topic("again", 3, OTHER, 4)).topic("again")
    assert again.partitions == [0, 1, 2, 6]


def test_a_topic_that_no_row_of_the_table_is_left_for_is_not_copied_yet(
    tmp_path, monkeypatch
):
    """A row behind the table's end would be memory that has another meaning."""
    monkeypatch.setattr(topics, "MAX_PARTITIONS", 6)
    node = Node(tmp_path)
    known = node.copy(*topic("old", 1, OTHER, 3), *topic("kept", 2, OTHER, 2))
    removal = remove_topic_record(known.topic("old").topic_id)
    new = topic("new", 3, OTHER, 2, retention_ms="7")
    with pytest.raises(ApiError, match="partition 1 of topic new does not fit") as why:
        node.copy(removal, *new)
    assert "room for 6 partitions; 2 exist, and 3 that were deleted" in str(why.value)
    node.reader.catch_up()
    # What came before is in the copy, or the rows would never be free.
    assert [each.name for each in node.reader.topics()] == ["kept"]
    node.passed = 1 << 40
    again = node.copy(*new).topic("new")
    assert again.partitions == [0, 1]
    assert again.config.retention_ms == 7


def test_partitions_that_are_added_are_copied_as_far_as_rows_are_left(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(topics, "MAX_PARTITIONS", 5)
    node = Node(tmp_path)
    first = topic("grows", 1, OTHER, 3)
    known = node.copy(*first).topic("grows")
    more = [partition_record(known.topic_id, index, OTHER) for index in range(3, 7)]
    with pytest.raises(ApiError, match="partition 5 of topic grows does not fit"):
        node.copy(*more)
    node.reader.catch_up()
    assert node.reader.topic("grows").partitions == [0, 1, 2, 3, 4]
