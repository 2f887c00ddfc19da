"""Transactions that are aborted while their coordinator is being asked something.

And calls that are interrupted themselves.
"""

from __future__ import annotations

from itertools import count

import pytest

from mpbroker.client.cluster import TopicPartition
from mpbroker.producer import GroupMetadata, ProducerError, ProducerFencedError
from mpbroker.producer.transactions import OffsetAndMetadata, TransactionState
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnResponse
from mpbroker.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from tests.producer.interrupts import interrupted_at
from tests.producer.rig import SenderRig
from tests.producer.test_transactions import TransactionRig


def add_offsets(rig):
    operation = rig.manager.add_offsets(
        {TopicPartition("in", 2): OffsetAndMetadata(55)}, GroupMetadata("g", 3, "m-1")
    )
    rig.turns(2)
    return operation


def offsets_added(rig, code=0):
    (asked,) = rig.wire.waiting(ApiKey.ADD_OFFSETS_TO_TXN)
    rig.wire.answer(AddOffsetsToTxnResponse(error_code=code), asked)
    rig.turns(2)


def pass_time(rig, seconds=10):
    for _ in range(seconds * 2):
        rig.pass_ms(500)
        rig.turns(2)


def assert_usable(rig):
    """Have another transaction commit."""
    rig.manager.begin()
    rig.send_added(b"next")
    commit = rig.manager.begin_commit()
    rig.reply()
    rig.turns()
    assert rig.ended() is True
    commit.wait(0)


def test_partitions_refused_while_aborting_cost_the_transaction_only():
    rig = TransactionRig()
    rig.append(b"x")
    rig.turns(2)
    abort = rig.manager.begin_abort()
    rig.added(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    rig.turns(4)
    abort.wait(0)
    assert_usable(rig)


def test_partitions_refused_when_asked_a_second_time_cost_the_transaction_only():
    rig = TransactionRig()
    rig.append(b"x")
    rig.turns(2)
    rig.wire.hang_up(1)  # with the first answer
    pass_time(rig)
    rig.added(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    rig.turns(2)
    assert rig.manager.state is TransactionState.ABORTABLE_ERROR
    abort = rig.manager.begin_abort()
    rig.turns(4)
    rig.added(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    rig.turns(4)
    abort.wait(0)
    assert_usable(rig)


def test_a_group_refused_while_aborting_costs_the_transaction_only():
    rig = TransactionRig()
    operation = add_offsets(rig)
    abort = rig.manager.begin_abort()
    offsets_added(rig, ErrorCode.GROUP_AUTHORIZATION_FAILED)
    rig.turns(4)
    with pytest.raises(ProducerError):
        operation.wait(0)
    abort.wait(0)
    assert_usable(rig)


def test_a_member_that_was_replaced_while_aborting_costs_the_transaction_only():
    rig = TransactionRig()
    operation = add_offsets(rig)
    offsets_added(rig)
    rig.turns(5)
    (asked,) = rig.wire.waiting(ApiKey.TXN_OFFSET_COMMIT)
    abort = rig.manager.begin_abort()
    entry = TxnOffsetCommitResponsePartition(
        partition_index=2, error_code=ErrorCode.ILLEGAL_GENERATION
    )
    topic = TxnOffsetCommitResponseTopic(name="in", partitions=[entry])
    rig.wire.answer(TxnOffsetCommitResponse(topics=[topic]), asked)
    rig.turns(4)
    with pytest.raises(ProducerError, match="ILLEGAL_GENERATION"):
        operation.wait(0)
    assert rig.ended() is False
    abort.wait(0)
    assert_usable(rig)


@pytest.mark.parametrize("lost_first", [True, False])
def test_what_offsets_may_have_begun_is_ended_when_it_is_aborted(lost_first):
    rig = TransactionRig()
    operation = add_offsets(rig)
    assert rig.wire.waiting(ApiKey.ADD_OFFSETS_TO_TXN)
    if lost_first:
        rig.wire.hang_up(1)  # with its answer
        rig.turns(2)
    abort = rig.manager.begin_abort()
    if not lost_first:
        rig.wire.hang_up(1)
    pass_time(rig)
    offsets_added(rig)
    pass_time(rig, 2)
    assert not rig.wire.waiting(ApiKey.TXN_OFFSET_COMMIT)
    assert rig.ended() is False
    abort.wait(0)
    with pytest.raises(ProducerError):
        operation.wait(0)
    assert_usable(rig)


def test_offsets_that_nobody_heard_of_are_not_added_when_it_is_aborted():
    rig = TransactionRig()
    rig.wire.silent.add(ApiKey.FIND_COORDINATOR)
    rig.wire.hang_up(1)
    rig.turns(2)
    operation = add_offsets(rig)
    abort = rig.manager.begin_abort()
    rig.wire.silent.clear()
    pass_time(rig)
    with pytest.raises(ProducerError):
        operation.wait(0)
    abort.wait(0)
    assert not [s for s in rig.wire.all_sent if s.key == ApiKey.ADD_OFFSETS_TO_TXN]


@pytest.mark.parametrize("answer", ["good", "none"])
def test_offsets_asked_for_by_who_is_fenced_meanwhile_are_not_waited_for(answer):
    rig = TransactionRig()
    rig.send_added()
    operation = add_offsets(rig)
    rig.reply(code=ErrorCode.INVALID_PRODUCER_EPOCH)
    assert rig.manager.state is TransactionState.FATAL_ERROR
    if answer == "good":
        offsets_added(rig)
    else:
        rig.wire.hang_up(1)
        rig.turns(2)
    with pytest.raises(ProducerFencedError):
        operation.wait(0)


def test_the_parts_of_a_batch_that_was_too_large_are_of_its_transaction():
    rig = TransactionRig()
    futures = [rig.append(b"%d" % number) for number in range(4)]
    rig.turns(2)
    rig.added()
    commit = rig.manager.begin_commit()
    rig.reply(code=ErrorCode.MESSAGE_TOO_LARGE)
    written = []
    for _ in range(20):
        rig.turns()
        for sent in rig.produces:
            header = rig.header(sent)
            assert header.is_transactional
            assert header.base_sequence == len(written)
            assert not rig.wire.waiting(ApiKey.END_TXN)
            if len(rig.values(sent)) > 2:
                rig.reply(sent, code=ErrorCode.MESSAGE_TOO_LARGE)
                break
            written += rig.values(sent)
            rig.reply(sent)
    assert written == [b"0", b"1", b"2", b"3"]
    assert rig.ended() is True
    commit.wait(0)
    assert all(future.exception(0) is None for future in futures)


def test_a_coordinator_that_throttles_is_waited_for_and_not_looked_for():
    rig = TransactionRig()
    rig.append(b"x")
    rig.turns(2)
    rig.added()
    rig.reply()
    # As for a quota: of the coordinator, which leads nothing that is written to here.
    rig.client._node(1).throttled_until_ms = rig.wire.now_ms + 5000
    finds = len([s for s in rig.wire.all_sent if s.key == ApiKey.FIND_COORDINATOR])
    commit = rig.manager.begin_commit()
    for _ in range(40):
        rig.pass_ms(100)
        rig.turns(2)
        assert not rig.wire.waiting(ApiKey.END_TXN)
    assert finds == len(
        [s for s in rig.wire.all_sent if s.key == ApiKey.FIND_COORDINATOR]
    )
    pass_time(rig, 5)
    assert rig.ended() is True
    commit.wait(0)


def test_a_commit_that_comes_just_before_an_abort_by_close_does_not_end_the_thread(
    monkeypatch,
):
    rig = TransactionRig()
    rig.send_added()
    rig.reply()
    abort = rig.manager.begin_abort
    commits = []

    def begin_abort():
        if not commits:
            commits.append(rig.manager.begin_commit())  # by another thread
        return abort()

    monkeypatch.setattr(rig.manager, "begin_abort", begin_abort)
    rig.sender.close()
    assert rig.sender._has_work()
    rig.turns(2)
    assert rig.ended() is True
    commits[0].wait(0)
    assert not rig.sender._has_work()


@pytest.mark.parametrize("what", ["begin_init", "begin_commit", "begin_abort"])
def test_a_call_that_was_interrupted_may_be_made_again(what):
    for nth in count(1):
        offsets = None
        if what == "begin_init":
            rig: SenderRig = SenderRig(transactional_id="tx")
            rig.turns(4)
        else:
            rig = TransactionRig()
            rig.send_added()
            rig.reply()
            offsets = rig.manager.add_offsets(
                {TopicPartition("in", 2): OffsetAndMetadata(55)}, GroupMetadata("g")
            )
        call = getattr(rig.state, what)
        with interrupted_at(nth) as interrupted:
            call()
        operation = call()
        rig.turns(8)
        if rig.wire.waiting(ApiKey.ADD_OFFSETS_TO_TXN):
            offsets_added(rig)
            rig.turns(8)
        for asked in rig.wire.waiting(ApiKey.TXN_OFFSET_COMMIT):
            rig.wire.answer(TxnOffsetCommitResponse(), asked)
            rig.turns(2)
        if offsets is not None:
            assert offsets.is_done, interrupted.where
            assert rig.ended() is (what == "begin_commit"), interrupted.where
        operation.wait(0)
        if not interrupted.where:
            break
    assert nth > 5
