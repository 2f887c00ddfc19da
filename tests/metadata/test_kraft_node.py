"""A directory that Apache Kafka wrote is opened, gone on with, or refused in words."""

import json
from pathlib import Path

import pytest

from mpbroker.base.storage_errors import CorruptLogError, LogDirectoryError
from mpbroker.metadata.kraft_records import encode_control, encode_record
from mpbroker.metadata.metadata_files import segment_name, snapshot_name
from mpbroker.metadata.metadata_image import MetadataImage, config_record
from mpbroker.metadata.metadata_log import MetadataLog, recover_metadata_log
from mpbroker.protocol.acl import AclBinding
from mpbroker.protocol.records.record_batch import (
    RecordBatchBuilder,
    iter_batches,
)
from tests.support.kraft import kafka_log
from tests.support.metadata import NOW_MS, PlainCell, registry, start

TOPIC_ID = "5L6g3nShT-eMCtK--X86sw"
TOPIC = {"type": "TopicRecord", "name": "flights", "topicId": TOPIC_ID}
LEVEL = {"type": "FeatureLevelRecord", "name": "metadata.version", "featureLevel": 30}


def partition(index: int, *replicas: int) -> dict:
    return {
        "type": "PartitionRecord",
        "partitionId": index,
        "topicId": TOPIC_ID,
        "replicas": list(replicas),
        "isr": list(replicas),
        "leader": replicas[0],
    }


def change(index: int, **fields: object) -> dict:
    kind = "PartitionChangeRecord"
    return {"type": kind, "partitionId": index, "topicId": TOPIC_ID, **fields}


def batch(base_offset: int, *values: object, epoch: int = 3) -> bytes:
    builder = RecordBatchBuilder()
    for value in values:
        data = value if isinstance(value, bytes) else encode_record(value)
        builder.append(NOW_MS, None, data)
    return builder.build(base_offset=base_offset, partition_leader_epoch=epoch)


def voters_batch(base_offset: int, *ids: int) -> bytes:
    builder = RecordBatchBuilder(control=True)
    voters = [{"voterId": each, "kRaftVersionFeature": {}} for each in ids]
    builder.append(NOW_MS, b"\0\0\0\6", encode_control(6, {"voters": voters}))
    return builder.build(base_offset=base_offset, partition_leader_epoch=3)


def names(*found: str) -> list[dict]:
    return [config_record(4, "", name, "x") for name in found]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "__cluster_metadata-0"
    made.mkdir()
    return made


def recover(directory: Path) -> MetadataImage:
    parent = str(directory.parent)
    return recover_metadata_log(parent, PlainCell(), NOW_MS, node_id=1)


def contents(directory: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in directory.iterdir()}


def test_the_log_of_a_kafka_gives_its_topics_configs_acls_users_and_quotas(directory):
    (directory / segment_name(0)).write_bytes(kafka_log())
    image = recover(directory)
    assert {name: topic.partition_count for name, topic in image.topics.items()} == {
        "flights": 3,
        "planes": 2,
        "__consumer_offsets": 5,
        "__transaction_state": 50,
    }
    assert image.config(2, "flights") == {"retention.ms": "123456789"}
    assert image.config(2, "planes")["cleanup.policy"] == "compact"
    assert image.config(4, "1") == {"log.cleaner.threads": "2"}
    assert image.config(32, "crew") == {"consumer.session.timeout.ms": "45000"}
    assert [acl.resource_name for acl in image.acls] == ["flights", "crew"]
    assert all(isinstance(acl, AclBinding) for acl in image.acls)
    assert image.scram.users() == ["alice"]
    assert image.client_quotas.values({"user": "alice"}) == {
        "producer_byte_rate": 1048576.0,
        "consumer_byte_rate": 2097152.0,
    }
    assert image.next_producer_id == 1000
    assert contents(directory) == {segment_name(0): kafka_log()}


def test_what_is_changed_is_appended_in_kafkas_form(directory):
    path = directory / segment_name(0)
    path.write_bytes(kafka_log())
    one = start(directory.parent)
    made = one.create_topic("ours", 2, {"retention.ms": "5"})
    one.delete_topic("planes")
    batches = list(iter_batches(path.read_bytes()[len(kafka_log()) :]))
    assert [header.base_offset for header, _ in batches] == [169, 173]
    assert {header.partition_leader_epoch for header, _ in batches} == {1}
    again = start(directory.parent)
    topic = again.topic("ours")
    assert (topic.topic_id, len(topic.partitions)) == (made.topic_id, 2)
    assert topic.config.retention_ms == 5
    assert again.topic("planes") is None


def test_the_last_registration_with_a_controller_is_known(directory):
    fresh = directory.parent / "fresh"
    fresh.mkdir()
    assert start(fresh).broker_epoch == -1
    (directory / segment_name(0)).write_bytes(kafka_log())
    assert start(directory.parent).broker_epoch == 11
    again = start(directory.parent)
    again.replace_records()
    assert start(directory.parent).broker_epoch == 11


def test_a_snapshot_and_the_segments_behind_it_are_read_and_no_others(directory):
    (directory / segment_name(0)).write_bytes(b"replaced by the snapshot")
    (directory / snapshot_name(3, 2)).write_bytes(b"an older one")
    snapshot = batch(0, LEVEL, *names("a", "b"), epoch=0)
    (directory / snapshot_name(40, 3)).write_bytes(snapshot)
    straddling = batch(38, *names("old", "too")) + batch(40, *names("c"))
    (directory / segment_name(38)).write_bytes(straddling)
    (directory / segment_name(41)).write_bytes(batch(41, *names("d"), epoch=4))
    assert list(recover(directory).config(4, "")) == ["a", "b", "c", "d"]
    cell = PlainCell()
    recover_metadata_log(str(directory.parent), cell, NOW_MS, node_id=1)
    one, two = registry(directory.parent, cell), registry(directory.parent, cell)
    one.alter_broker_config("", lambda old: {**old, "e": "x"})
    two.catch_up()
    assert list(two.broker_overrides("")) == ["a", "b", "c", "d", "e"]
    (_, (header, _)) = iter_batches((directory / segment_name(41)).read_bytes())
    assert (header.base_offset, header.partition_leader_epoch) == (42, 4)


def test_a_snapshot_alone_gets_a_segment(directory):
    (directory / snapshot_name(0, 0)).write_bytes(batch(0, LEVEL) + voters_batch(1, 1))
    one = start(directory.parent)
    one.create_topic("flights", 1)
    assert (directory / segment_name(0)).stat().st_size > 0
    assert start(directory.parent).topic("flights") is not None


def test_records_that_are_missing_are_noticed(directory):
    (directory / segment_name(41)).write_bytes(batch(41, *names("d")))
    with pytest.raises(CorruptLogError, match="from offset 0 to 41 are missing"):
        recover(directory)
    (directory / snapshot_name(40, 3)).write_bytes(batch(0, LEVEL))
    with pytest.raises(CorruptLogError, match="from offset 40 to 41 are missing"):
        recover(directory)


@pytest.mark.parametrize("name", [snapshot_name(2, 3), segment_name(2)])
def test_a_file_that_others_follow_must_be_whole(directory, name):
    (directory / snapshot_name(2, 3)).write_bytes(batch(0, LEVEL))
    (directory / segment_name(2)).write_bytes(batch(2, *names("a")))
    (directory / segment_name(3)).write_bytes(batch(3, *names("b")))
    path = directory / name
    path.write_bytes(path.read_bytes()[:-1])
    before = contents(directory)
    with pytest.raises(CorruptLogError, match=rf"{name}.*other files follow"):
        recover(directory)
    assert contents(directory) == before


def test_a_transaction_of_the_controller_counts_when_it_has_ended(directory):
    begin, end = {"type": "BeginTransactionRecord"}, {"type": "EndTransactionRecord"}
    abort = {"type": "AbortTransactionRecord"}
    path = directory / segment_name(0)
    path.write_bytes(
        batch(0, LEVEL, begin, *names("a"))
        + batch(3, *names("b"), end)
        + batch(5, begin, *names("undone"), abort)
        + batch(8, begin, *names("open"))
    )
    assert list(recover(directory).config(4, "")) == ["a", "b"]
    # What is appended next must not be a part of the open one.
    one = start(directory.parent)
    one.alter_broker_config("", lambda old: {**old, "c": "x"})
    assert list(start(directory.parent).broker_overrides("")) == ["a", "b", "c"]


# -- refusals ------------------------------------------------------------------------


def test_a_partition_with_other_replicas_is_refused(directory):
    (directory / segment_name(0)).write_bytes(
        batch(0, LEVEL, TOPIC, partition(0, 1), partition(1, 2, 1))
    )
    before = contents(directory)
    with pytest.raises(LogDirectoryError, match=r"flights-1 has the replicas 2, 1,"):
        recover(directory)
    assert contents(directory) == before
    with (directory / segment_name(0)).open("ab") as file:
        file.write(batch(4, change(1, replicas=[1], isr=[1], leader=1)))
    assert recover(directory).topics["flights"].partition_count == 2
    with (directory / segment_name(0)).open("ab") as file:
        file.write(batch(5, change(0, replicas=[1, 3])))
    with pytest.raises(LogDirectoryError, match="flights-0 has the replicas 1, 3"):
        recover(directory)
    with (directory / segment_name(0)).open("ab") as file:
        file.write(batch(6, {"type": "RemoveTopicRecord", "topicId": TOPIC_ID}))
    assert not recover(directory).topics


def test_a_quorum_of_other_voters_is_refused(directory):
    (directory / segment_name(0)).write_bytes(batch(0, LEVEL))
    state = {"currentVoters": [{"voterId": 1}, {"voterId": 2}], "data_version": 0}
    (directory / "quorum-state").write_text(json.dumps(state))
    with pytest.raises(LogDirectoryError, match=r"the voters 1, 2, and node\.id is 1"):
        recover(directory)
    # Voters in the log decide, if there are any.
    with (directory / segment_name(0)).open("ab") as file:
        file.write(voters_batch(1, 1))
    recover(directory)
    with (directory / segment_name(0)).open("ab") as file:
        file.write(voters_batch(2, 1, 3))
    with pytest.raises(LogDirectoryError, match="the voters 1, 3"):
        recover(directory)


def test_a_quorum_state_that_is_no_json_is_named(directory):
    (directory / segment_name(0)).write_bytes(batch(0, LEVEL))
    (directory / "quorum-state").write_text("{")
    with pytest.raises(LogDirectoryError, match=r"cannot read .*quorum-state"):
        recover(directory)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (b"\x01\x63\x00\x00", r"newer Apache Kafka than 4\.4\.0.*record type 99"),
        (b"\x01\x02\x09\x00", "TopicRecord version 9"),
        (b"\x07\x02\x00\x00", "frame version 7"),
    ],
)
def test_a_record_of_a_newer_kafka_is_refused(directory, record, words):
    (directory / segment_name(0)).write_bytes(batch(0, LEVEL, record))
    before = contents(directory)
    with pytest.raises(LogDirectoryError, match=words):
        recover(directory)
    assert contents(directory) == before


@pytest.mark.parametrize(
    ("name", "level"), [("metadata.version", 35), ("warp.version", 1)]
)
def test_a_feature_that_is_too_new_is_refused(directory, name, level):
    newer = {"type": "FeatureLevelRecord", "name": name, "featureLevel": level}
    (directory / segment_name(0)).write_bytes(batch(0, newer))
    with pytest.raises(CorruptLogError, match=rf"{name} level {level}.*kafka-features"):
        recover(directory)


def test_malformed_bytes_in_a_whole_batch_are_named(directory):
    (directory / segment_name(0)).write_bytes(batch(0, LEVEL) + batch(1, b"\x01\x02"))
    with pytest.raises(CorruptLogError, match=r"batch at byte \d+: malformed"):
        recover(directory)


def test_a_reader_of_a_running_broker_reads_all_files(directory):
    (directory / snapshot_name(1, 3)).write_bytes(batch(0, LEVEL))
    (directory / segment_name(1)).write_bytes(batch(1, *names("a")))
    cell = PlainCell()
    recover_metadata_log(str(directory.parent), cell, NOW_MS)
    log = MetadataLog(str(directory.parent), cell)
    assert [record.get("name") for record in log.read_new()] == [
        "metadata.version",
        "a",
    ]
    assert log.position == cell.end == sum(map(len, contents(directory).values()))
    log.close()


def test_what_is_new_in_the_records_of_kafka_4_4_is_read(directory):
    levels = {"metadata.version": 33, "share.version": 2}
    records = [
        {"type": "FeatureLevelRecord", "name": name, "featureLevel": level}
        for name, level in levels.items()
    ]
    gone = {"type": "UnregisterControllerRecord", "controllerId": 3}
    (directory / segment_name(0)).write_bytes(batch(0, *records, gone, TOPIC))
    image = recover(directory)
    assert image.features == levels
    assert [*image.topics] == ["flights"]
