"""__consumer_offsets: the coordinator writes only to the topic it began with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from mpbroker.coordinator.coordinator_topic import CoordinatorTopic
from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.metadata.log_config import LogConfig
from mpbroker.metadata.topic_names import OFFSETS_TOPIC
from mpbroker.metadata.topics import NewTopic
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.batch_header import iter_batches
from mpbroker.protocol.records.compression import Codec
from mpbroker.storage.log.partition_log import PartitionLog

CONFIGURED = 5


class FakeRegistry:
    """A registry with at most one topic."""

    def __init__(self, there: int = 0) -> None:
        self.found: Any = None
        self.unseen: Any = None  # made by another process, and not yet replayed
        if there:
            self.found = topic_of(there)

    def topic(self, name: str) -> Any:
        assert name == OFFSETS_TOPIC
        return self.found

    def create_topic(self, name: str, count: int, overrides: object) -> Any:
        assert self.found is None
        if self.unseen is not None:
            self.found = self.unseen
            raise ApiError(ErrorCode.TOPIC_ALREADY_EXISTS)
        self.found = topic_of(count)
        return self.found


def topic_of(count: int) -> Any:
    return SimpleNamespace(name=OFFSETS_TOPIC, partitions=list(range(count)))


def made_topic(registry: FakeRegistry) -> tuple[CoordinatorTopic, MagicMock]:
    own_appends = MagicMock()
    own_appends.append.return_value = 1
    made = CoordinatorTopic(
        registry,  # type: ignore[arg-type]
        MagicMock(),
        lambda topic, partition: True,
        NewTopic(OFFSETS_TOPIC, CONFIGURED, {}),
        codec=Codec.NONE,
        load_bytes=1,
        own_appends=own_appends,
    )
    return made, own_appends.append


def append(topic: CoordinatorTopic) -> None:
    topic.append(0, [(b"k", b"v")], 0)


@pytest.mark.parametrize("there", [0, CONFIGURED, 7])
def test_records_go_to_a_topic_that_exists_or_is_created(there: int) -> None:
    registry = FakeRegistry(there)
    topic, written = made_topic(registry)
    assert topic.num_partitions == (there or CONFIGURED)
    for count in range(1, 3):
        append(topic)
        assert written.call_count == count
    assert not topic.has_changed


def test_a_topic_that_another_process_creates_as_configured_is_written_to() -> None:
    registry = FakeRegistry()
    topic, written = made_topic(registry)
    registry.unseen = topic_of(CONFIGURED)
    append(topic)
    assert written.called
    assert not topic.has_changed


@pytest.mark.parametrize("count", [2, 20])
def test_a_topic_created_with_more_or_fewer_partitions_is_not_written_to(
    count: int,
) -> None:
    """Also if the other topic is found only when this one is to be created."""
    for seen in (True, False):
        registry = FakeRegistry()
        topic, written = made_topic(registry)
        if seen:
            registry.found = topic_of(count)
            assert topic.has_changed
        else:
            registry.unseen = topic_of(count)
        with pytest.raises(ApiError):
            append(topic)
        assert not written.called
        assert topic.has_changed
        assert topic.num_partitions == CONFIGURED  # what groups were divided by


def test_a_topic_that_was_deleted_is_not_made_again() -> None:
    """A new topic may have another number of partitions, so the process restarts."""
    registry = FakeRegistry()
    topic, written = made_topic(registry)
    append(topic)
    registry.found = None
    assert topic.has_changed
    with pytest.raises(ApiError):
        append(topic)
    registry.found = topic_of(CONFIGURED)  # another process did
    with pytest.raises(ApiError):
        append(topic)
    assert topic.has_changed
    assert written.call_count == 1


def test_a_topic_that_grows_is_another() -> None:
    registry = FakeRegistry(CONFIGURED)
    topic, written = made_topic(registry)
    registry.found.partitions.append(CONFIGURED)
    assert topic.has_changed
    with pytest.raises(ApiError):
        append(topic)
    assert not written.called


DAMAGE = {"codec": (22, 1), "count": (60, 9), "record": (61, 0x7F), "control": (22, 32)}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_batch_is_skipped_and_the_others_are_loaded(
    tmp_path: Path, what: str
) -> None:
    """Before, the broker did not start: each coordinator ended with an error."""
    table = PartitionTable.create()
    table.initialise_row(0)
    log = PartitionLog(str(tmp_path), table.row(0), LogConfig({}))
    topic = CoordinatorTopic(
        FakeRegistry(1),  # type: ignore[arg-type]
        lambda topic, partition: log,
        lambda topic, partition: True,
        NewTopic(OFFSETS_TOPIC, 1, {}),
        codec=Codec.NONE,
        load_bytes=1000,
    )
    for key in (b"a", b"b", b"c"):
        topic.append(0, [(key, b"v")], 1)
    path = tmp_path / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    first, *_ = iter_batches(data)
    place, value = DAMAGE[what]
    data[len(first[1]) + place] = value
    path.write_bytes(data)
    loaded = [record.key for records in topic.load(0) for record in records]
    assert loaded == [b"a", b"c"]
    log.close()
