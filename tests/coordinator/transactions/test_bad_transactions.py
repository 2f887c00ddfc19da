"""Invalid requests about transactions: they get Kafka's errors and change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from tests.coordinator.transactions.transaction_asks import (
    T0,
    add,
    commit_offsets,
    end,
    init,
    offsets_request,
    position,
    produce,
    started,
    state,
)
from tests.coordinator.transactions.transaction_rig import TransactionRig

E = ErrorCode
METADATA_MAX = 4096


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig()


def everything(rig: TransactionRig, producer_id: int) -> tuple[Any, ...]:
    """What a refused request must leave as it is."""
    return (
        len(rig.log),
        len(rig.offsets_log),
        len(rig.markers),
        len(rig.given_back),
        state(rig),
        rig.coordinator.get("x").producer_epoch,
        rig.open.of(producer_id),
    )


def add_offsets(rig: TransactionRig, producer: tuple[int, int], group: str) -> int:
    request = AddOffsetsToTxnRequest(
        transactional_id="x",
        group_id=group,
        producer_id=producer[0],
        producer_epoch=producer[1],
    )
    code: int = rig.ask("add_offsets_to_txn", request, 3).error_code
    return code


@pytest.mark.parametrize("ahead", [1, 2, 100])
@pytest.mark.parametrize("begun", [True, False])
def test_an_epoch_from_the_future_is_refused(rig, begun, ahead):
    producer = started(rig)
    if begun:
        add(rig, producer, 0)
    before = everything(rig, producer[0])
    future = (producer[0], producer[1] + ahead)
    assert add(rig, future, 1) == [E.PRODUCER_FENCED]
    assert add_offsets(rig, future, "g") == E.PRODUCER_FENCED
    for version in (3, 5):
        for commit in (True, False):
            answer = end(rig, future, commit=commit, version=version)
            assert answer.error_code == E.PRODUCER_FENCED
        assert commit_offsets(rig, future, version) == E.INVALID_PRODUCER_EPOCH
    for version in (11, 12):
        refused = rig.send("produce", produce(future, 1), version).request
        (row,) = refused.responses[0].partition_responses
        assert row.error_code == E.INVALID_PRODUCER_EPOCH
    if not begun:  # else it first aborts what is open, as Kafka does
        assert init(rig, producer=future).error_code == E.PRODUCER_FENCED
    assert everything(rig, producer[0]) == before
    rig.die()
    assert everything(rig, producer[0])[4:] == before[4:]
    if begun:
        assert end(rig, producer).error_code == 0
        assert rig.markers == [(*T0, *producer, True)]


@pytest.mark.parametrize("version", [3, 5])
def test_offsets_that_no_group_would_take_are_refused_beside_the_others(rig, version):
    producer = started(rig)
    if version < 5:
        assert add_offsets(rig, producer, "g") == 0
    request = offsets_request(producer)
    (topic,) = request.topics
    (fine,) = topic.partitions
    huge = type(fine)(
        partition_index=1,
        committed_offset=1,
        committed_metadata="x" * (METADATA_MAX + 1),
    )
    missing = type(fine)(
        partition_index=99, committed_offset=1, committed_metadata=None
    )
    fine.committed_metadata = "x" * METADATA_MAX
    topic.partitions = [huge, fine, missing]
    answer = rig.ask("txn_offset_commit", request, version)
    assert [row.error_code for row in answer.topics[0].partitions] == [
        E.OFFSET_METADATA_TOO_LARGE,
        E.NONE,
        E.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    end(rig, producer, version=version)
    assert position(rig) == (0, 7)
    assert rig.groups.offsets.fetch("g", "t", [1], stable=True)[0].committed_offset < 0


def test_offsets_of_a_group_without_a_name_are_refused(rig):
    producer = started(rig)
    before = everything(rig, producer[0])
    assert add_offsets(rig, producer, "") == E.INVALID_GROUP_ID
    request = offsets_request(producer)
    request.group_id = ""
    answer = rig.ask("txn_offset_commit", request, 5)
    assert answer.topics[0].partitions[0].error_code == E.INVALID_GROUP_ID
    assert everything(rig, producer[0]) == before
