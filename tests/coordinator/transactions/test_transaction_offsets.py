"""Offsets that a transaction commits: they count when it does."""

from __future__ import annotations

import pytest

from mpbroker.coordinator.groups.group_offsets import GroupOffsets, OffsetAndMetadata
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    TopicPartitions,
)
from mpbroker.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequestPartition,
)
from tests.coordinator.transactions.transaction_asks import (
    OFFSETS,
    commit_offsets,
    end,
    offsets_request,
    position,
    started,
)
from tests.coordinator.transactions.transaction_rig import TransactionRig

E = ErrorCode


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig()


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("version", [3, 5])
def test_offsets_count_if_their_transaction_commits(rig, version, commit, dies):
    producer = started(rig)
    if version < 5:
        request = AddOffsetsToTxnRequest(
            transactional_id="x",
            group_id="g",
            producer_id=producer[0],
            producer_epoch=producer[1],
        )
        assert rig.ask("add_offsets_to_txn", request, 3).error_code == 0
    assert commit_offsets(rig, producer, version) == 0
    assert position(rig) == (E.UNSTABLE_OFFSET_COMMIT, -1)
    if dies:
        rig.die()
        assert position(rig) == (E.UNSTABLE_OFFSET_COMMIT, -1)
    end(rig, producer, commit=commit, version=version)
    assert position(rig) == (0, 7 if commit else -1)
    assert [marker[0] for marker in rig.markers] == [OFFSETS]


@pytest.mark.parametrize("dies", [False, True])
def test_the_later_record_of_a_position_counts_and_not_the_later_marker(rig, dies):
    # Compaction of the log would leave that one alone.
    producer = started(rig)
    assert commit_offsets(rig, producer, 5) == 0
    rig.groups.offsets.put("g", "t", 0, OffsetAndMetadata(9, -1, "", rig.now_ms, -1))
    rig.collect()
    if dies:
        rig.die()
    assert position(rig) == (E.UNSTABLE_OFFSET_COMMIT, -1)
    end(rig, producer, version=5)
    assert position(rig) == (0, 9)


@pytest.mark.parametrize("first", [1, 2])
def test_of_two_transactions_the_one_counts_that_wrote_later(first):
    offsets = GroupOffsets()
    for producer in (1, 2):
        value = OffsetAndMetadata(producer, -1, "", 0, -1)
        offsets.put_pending(producer, "t", 0, value)
    offsets.complete(first, commit=True)
    offsets.complete(3 - first, commit=True)
    assert offsets.get("t", 0) == OffsetAndMetadata(2, -1, "", 0, -1)


def test_offsets_of_old_clients_must_have_been_announced(rig):
    producer = started(rig)
    assert commit_offsets(rig, producer, 4) == E.INVALID_TXN_STATE
    assert rig.offsets_log == []


@pytest.mark.parametrize(
    ("member", "code"),
    [
        ({"generation_id": 3, "member_id": "m"}, E.ILLEGAL_GENERATION),
        ({"generation_id": -1, "member_id": ""}, E.NONE),
    ],
)
def test_the_group_says_who_may_commit_offsets(rig, member, code):
    producer = started(rig)
    assert commit_offsets(rig, producer, 5, **member) == code


def test_a_member_with_an_older_epoch_commits_what_it_has_had_since_then(rig):
    def beat(member_id, epoch, owned):
        topic_id = rig.topics.topic_id("t")
        request = ConsumerGroupHeartbeatRequest(
            group_id="g",
            member_id=member_id,
            member_epoch=epoch,
            rebalance_timeout_ms=20_000,
            subscribed_topic_names=["t"],
            topic_partitions=[TopicPartitions(topic_id=topic_id, partitions=owned)]
            if owned
            else [],
        )
        return rig.ask("consumer_group_heartbeat", request, 1)

    first = beat("m", 0, [])
    (row,) = first.assignment.topic_partitions
    beat("o", 0, [])
    (kept,) = beat("m", first.member_epoch, row.partitions).assignment.topic_partitions
    second = beat("m", first.member_epoch, kept.partitions)
    assert second.member_epoch > first.member_epoch and 0 in kept.partitions
    for epoch, code in (
        (second.member_epoch, E.NONE),
        (first.member_epoch, E.NONE),
        (first.member_epoch - 1, E.ILLEGAL_GENERATION),
        (second.member_epoch + 1, E.ILLEGAL_GENERATION),
    ):
        member = {"member_id": "m", "generation_id": epoch}
        assert commit_offsets(rig, started(rig), 5, **member) == code


def test_a_refusal_says_which_partitions_do_not_exist(rig):
    producer = started(rig)
    request = offsets_request(producer, generation_id=3, member_id="m")
    (row,) = request.topics
    row.partitions.append(
        TxnOffsetCommitRequestPartition(partition_index=99, committed_offset=1)
    )
    answer = rig.ask("txn_offset_commit", request, 5)
    assert [part.error_code for part in answer.topics[0].partitions] == [
        E.ILLEGAL_GENERATION,
        E.UNKNOWN_TOPIC_OR_PARTITION,
    ]


def test_a_zombie_commits_no_offsets(rig):
    zombie = started(rig)
    started(rig)
    assert commit_offsets(rig, zombie, 5) == E.INVALID_PRODUCER_EPOCH
    assert rig.offsets_log == []


def test_a_group_that_commits_is_not_noted_as_one_that_is_being_loaded(rig):
    """Nothing would ever take the note away: there is no load that could end."""
    assert commit_offsets(rig, started(rig), 5) == 0
    assert rig.groups._replayed == set()


def test_offsets_that_are_not_written_are_forgotten_with_their_log(rig):
    """The log may come back as a shard of a cluster, in which the end is written."""
    producer = started(rig)
    committed = OffsetAndMetadata(7, -1, "", rig.now_ms, -1)
    rig.groups.commit_in_transaction("g", "t", 0, committed, producer)
    rig.groups.failed(rig.groups.partition_for("g"))
    assert not rig.out
    assert rig.groups.offsets.groups_of_producer(producer[0]) == []
