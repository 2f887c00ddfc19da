"""The log start offset of a tiered log outlives stops and upgrades."""

from __future__ import annotations

import pytest

from mpbroker.storage.cleaning.retention import apply_retention
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.remote_partition import RemotePartition
from mpbroker.storage.remote.remote_plan import PartitionPlan
from tests.storage.batches import batch
from tests.storage.broker_rig import Broker, Start, Topics


@pytest.fixture
def broker(start: Start, topics: Topics, store: ObjectStore) -> Broker:
    """A broker whose log has its closed segments in the store only."""
    topic = topics.create(
        "t",
        segment_bytes=500,
        retention_ms=-1,
        remote_storage_enable=True,
        local_retention_bytes=1,
    )
    running = start(topics)
    log = running.manager.log("t", 0)
    for number in range(20):
        log.append(batch(b"%03d" % number * 30), now_ms=1)
    below = log.row.snapshot().active_base_offset
    plan = PartitionPlan("t", topic.topic_id, 0, log.directory, below, 0)
    RemotePartition(store, "t", topic.topic_id, 0).run(plan)
    apply_retention(log, 1)
    assert log.view.first_base_offset() == below
    return running


def start_offset(broker: Broker) -> int:
    log = broker.manager.log("t", 0)
    log.view.require_online()  # loads it
    return log.row.log_start_offset


@pytest.mark.parametrize("where", ["in the store", "at the first local segment"])
def test_records_that_were_deleted_stay_deleted_after_an_upgrade(
    broker: Broker, start: Start, topics: Topics, where: str
) -> None:
    log = broker.manager.log("t", 0)
    first = log.view.first_base_offset()
    offset = 2 if where == "in the store" else first
    log.delete_records(offset)
    broker.die()
    again = start(topics.again(), logs=[("t", 0, offset, 20)])
    assert start_offset(again) == offset
    again.die()


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("where", ["in the store", "at the first local segment"])
def test_records_that_were_deleted_stay_deleted_after_a_restart(
    broker: Broker, start: Start, topics: Topics, where: str, stops: bool
) -> None:
    log = broker.manager.log("t", 0)
    first = log.view.first_base_offset()
    offset = 2 if where == "in the store" else first
    log.delete_records(offset)
    if stops:
        broker.stop()
    else:
        broker.upkeep.write_checkpoints()
        broker.die()
    again = start(topics.again())
    assert start_offset(again) == offset
    again.die()
