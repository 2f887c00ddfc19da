"""Metadata logs whose records are JSON, which earlier versions of mpbroker wrote."""

import json
import os
import signal
from pathlib import Path

import pytest

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.metadata import metadata_log
from mpbroker.metadata.metadata_log import metadata_log_path, recover_metadata_log
from mpbroker.protocol.records.record_batch import (
    RecordBatchBuilder,
    iter_batches,
    iter_records,
)
from tests.support.metadata import NOW_MS, PlainCell, contents, in_child, registry

TOPIC_ID = "5L6g3nShT-eMCtK--X86sw"
ACL = {
    "type": "AccessControlEntryRecord",
    "id": "BBlzjV8BQkyNbyVDVvnMsA",
    "resourceType": 2,
    "resourceName": "flights",
    "patternType": 3,
    "principal": "User:alice",
    "host": "*",
    "operation": 3,
    "permissionType": 3,
}
# As version 0.1 wrote them.
RECORDS = [
    {"type": "FeatureLevelRecord", "name": "metadata.version", "featureLevel": 1},
    {"type": "TopicRecord", "name": "flights", "topicId": TOPIC_ID},
    {
        "type": "PartitionRecord",
        "partitionId": 0,
        "topicId": TOPIC_ID,
        "replicas": [1],
        "isr": [1],
        "leader": 1,
        "leaderEpoch": 0,
        "partitionEpoch": 0,
    },
    {
        "type": "ConfigRecord",
        "resourceType": 2,
        "resourceName": "flights",
        "name": "retention.ms",
        "value": "7",
    },
    {"type": "ProducerIdsRecord", "brokerId": 1, "brokerEpoch": 0, "nextProducerId": 9},
    ACL,
]


def write_log(tmp_path: Path, *records: object) -> Path:
    path = Path(metadata_log_path(str(tmp_path)))
    path.parent.mkdir(exist_ok=True)
    builder = RecordBatchBuilder()
    for record in records:
        builder.append(NOW_MS, None, json.dumps(record).encode())
    path.write_bytes(builder.build(base_offset=0, partition_leader_epoch=0))
    return path


def first_bytes(path: Path) -> set[bytes]:
    """Return the first byte of every record's value."""
    batches = iter_batches(path.read_bytes())
    return {bytes(r.value)[:1] for _, batch in batches for r in iter_records(batch)}


def start(tmp_path: Path, **options: object):
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS, node_id=1, **options)
    return registry(tmp_path, cell)


def everything(one) -> object:
    image = one.image
    return contents(one), list(image.acls), image.next_producer_id, image.features


def test_a_program_that_is_not_alone_goes_on_in_json(tmp_path):
    path = write_log(tmp_path, *RECORDS)
    one = start(tmp_path, may_rewrite=False)
    one.create_topic("more", 2)
    assert first_bytes(path) == {b"{"}
    again = start(tmp_path, may_rewrite=False)
    assert contents(again) == contents(one)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_start_writes_kafkas_records_once_and_keeps_a_copy(tmp_path):
    path = write_log(tmp_path, *RECORDS)
    before = path.read_bytes()
    old = start(tmp_path, may_rewrite=False)
    new = start(tmp_path)
    assert contents(new) == contents(old)
    assert everything(new)[1:3] == everything(old)[1:3]
    assert new.image.features["metadata.version"] == 25
    assert first_bytes(path) == {b"\x01"}
    assert path.with_name(path.name + ".json").read_bytes() == before
    converted = path.read_bytes()
    assert everything(start(tmp_path)) == everything(new)
    assert path.read_bytes() == converted


@pytest.mark.parametrize("step", ["link", "fsync", "replace"])
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_each_step_nothing_is_lost(tmp_path, monkeypatch, step, after):
    path = write_log(tmp_path, *RECORDS)
    before = path.read_bytes()
    old = everything(start(tmp_path, may_rewrite=False))
    done = getattr(os, step)

    def die(*arguments: object) -> None:
        if after:
            done(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        metadata_log._sync = lambda path: None
        setattr(os, step, die)
        start(tmp_path)

    assert in_child(work) == -signal.SIGKILL
    assert everything(start(tmp_path))[:3] == old[:3]
    assert path.with_name(path.name + ".json").read_bytes() == before


@pytest.mark.parametrize(
    "record",
    [
        {"type": "WarpRecord"},
        {"no": "type"},
        {"type": ["TopicRecord"]},
        {"type": "TopicRecord", "name": "t"},
        {"type": "TopicRecord", "name": "t", "topicId": "short"},
    ],
)
def test_a_record_of_another_release_stops_the_start(tmp_path, record):
    path = write_log(tmp_path, *RECORDS, record)
    before = path.read_bytes()
    with pytest.raises(CorruptLogError, match="metadata record"):
        start(tmp_path)
    assert path.read_bytes() == before
