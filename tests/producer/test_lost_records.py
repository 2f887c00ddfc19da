"""A record that is lost is told of, and costs neither another one nor a busy loop.

What `test_sender` and `test_transactions` do not reach: records that fail before they
are sent, splits that expire, numbers that begin again, and callbacks that end a thread.
"""

from __future__ import annotations

import sys
import traceback

import pytest

from mpbroker.producer import (
    AbortableError,
    DeliveryTimeoutError,
    ProducerClosedError,
    ProducerError,
    RecordTooLargeError,
)
from mpbroker.producer.batch import ProducerBatch
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.find_coordinator import FindCoordinatorResponse
from tests.producer.rig import SenderRig
from tests.producer.test_transactions import TransactionRig

SHORT = {"delivery_timeout_ms": 1000, "request_timeout_ms": 500}


def pass_time(rig, seconds):
    for _ in range(seconds * 10):
        rig.pass_ms(100)
        rig.turns()


# -- transactions ----------------------------------------------------------------------


def test_a_record_that_was_never_sent_keeps_its_transaction_from_committing():
    rig = TransactionRig(**SHORT)
    rig.wire.topics["t"] = [-1, 0]
    rig.metadata.request_update()
    rig.pass_ms(200)
    rig.turns(3)
    future = rig.append(b"nowhere to go")
    rig.turns(2)
    rig.added()
    operation = rig.manager.begin_commit()
    pass_time(rig, 2)
    assert isinstance(future.exception(0), DeliveryTimeoutError)
    with pytest.raises(AbortableError, match="abort_transaction"):
        operation.wait(0)
    assert not rig.wire.waiting(ApiKey.END_TXN)


def test_a_record_refused_by_send_keeps_its_transaction_from_committing(
    make_producer, new_topic, read
):
    topic = new_topic()
    producer = make_producer(transactional_id=topic)
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(topic, b"small")
    large = producer.send(topic, b"x" * 2_000_000)
    with pytest.raises(AbortableError, match=r"max\.request\.size"):
        producer.commit_transaction()
    assert isinstance(large.exception(0), RecordTooLargeError)
    producer.abort_transaction()
    producer.begin_transaction()
    producer.send(topic, b"again")
    producer.commit_transaction()
    assert [record.value for record in read(topic)[0]] == [b"again"]


def test_what_the_coordinator_may_have_begun_is_ended_there_when_it_is_aborted():
    rig = TransactionRig()
    rig.append(b"x")
    rig.turns(2)
    assert rig.wire.waiting(ApiKey.ADD_PARTITIONS_TO_TXN)
    operation = rig.manager.begin_abort()
    rig.wire.hang_up(1)  # with its answer
    for _ in range(20):
        rig.pass_ms(500)
        rig.turns(2)
    rig.added()
    assert rig.ended() is False
    operation.wait(0)


def test_a_coordinator_that_metadata_does_not_know_is_waited_for_without_spinning():
    rig = SenderRig(transactional_id="tx")
    rig.wire.silent.add(ApiKey.FIND_COORDINATOR)
    answered = 0
    rig.turns(4)
    operation = rig.state.begin_init()
    rig.wire.waits.clear()
    for _ in range(60):
        rig.turns()
        for asked in rig.wire.waiting(ApiKey.FIND_COORDINATOR):
            answered += 1
            if answered == 3:  # by now, metadata would tell
                rig.wire.nodes[7] = rig.wire.nodes[0]._replace(host="b7")
            rig.wire.answer(FindCoordinatorResponse(node_id=7), asked)
        rig.pass_ms(min(rig.wire.waits[-1], 1000))
    operation.wait(0)
    assert rig.wire.waits.count(0.0) < 10


def test_closing_waits_for_a_transactions_end_as_long_as_for_a_record():
    rig = TransactionRig(**SHORT)
    rig.send_added()
    rig.reply()
    rig.wire.silent.add(ApiKey.FIND_COORDINATOR)
    rig.wire.refuse_connect = {0, 1}
    rig.wire.hang_up(0)
    rig.wire.hang_up(1)
    rig.sender.close()
    waited_ms = 0
    while rig.sender._has_work():
        rig.turns()
        rig.pass_ms(100)
        waited_ms += 100
        assert waited_ms < 60_000
    assert waited_ms >= 1000


def test_who_waits_for_a_transactions_end_is_told_that_the_producer_was_closed():
    rig = TransactionRig()
    rig.send_added()
    commit = rig.manager.begin_commit()
    rig.turns()
    rig.sender.force_close()
    rig.sender.run()
    with pytest.raises(ProducerClosedError):
        commit.wait(0)


# -- idempotence -----------------------------------------------------------------------


def test_parts_of_a_split_batch_that_expire_leave_no_gap_behind():
    rig = SenderRig(delivery_timeout_ms=10_000, request_timeout_ms=500)
    rig.ready().introduce()
    futures = [rig.append(b"%d" % i) for i in range(4)]
    rig.turns()
    rig.wire.refuse_connect = {0, 1}
    rig.reply(code=ErrorCode.MESSAGE_TOO_LARGE, turn=False)
    rig.wire.hang_up(0)
    rig.wire.hang_up(1)
    pass_time(rig, 20)
    assert all(
        isinstance(future.exception(0), DeliveryTimeoutError) for future in futures
    )
    assert rig.pool.available_bytes == rig.pool.total_bytes
    rig.wire.refuse_connect = set()
    later = rig.append(b"later")
    pass_time(rig, 5)
    header = rig.header(rig.produces[0])
    assert (header.producer_epoch, header.base_sequence) == (1, 0)
    rig.reply()
    assert later.exception(0) is None


def test_batches_are_sent_again_in_order_though_numbers_begin_again_between_them():
    rig = SenderRig().ready().introduce()
    sequences = rig.state._partitions["t", 0]
    sequences.next, sequences.last_acked = 0x7FFFFFFF, 0x7FFFFFFE
    futures = [rig.send(value) for value in (b"first", b"second")]
    assert len(rig.produces) == 2
    rig.wire.hang_up(0)
    for future, value in zip(futures, (b"first", b"second"), strict=True):
        pass_time(rig, 10)
        assert rig.values(rig.produces[0]) == [value]
        rig.reply()
        assert future.exception(0) is None


# -- the loop --------------------------------------------------------------------------


def test_while_no_broker_is_known_the_sender_sleeps():
    rig = SenderRig(delivery_timeout_ms=1_000_000).ready().introduce()
    rig.wire.refuse_connect = set(range(-5, 5))
    future = rig.append(b"x")
    rig.wire.hang_up(0)
    rig.wire.hang_up(1)
    rig.turns(2)
    rig.wire.waits.clear()
    for _ in range(200):
        rig.turns()
        rig.pass_ms(max(1, min(rig.wire.waits[-1], 1000)))
    assert not rig.metadata.snapshot.nodes  # so the leader has no address
    assert rig.wire.waits.count(0.0) < 20
    rig.wire.refuse_connect = set()
    pass_time(rig, 5)
    rig.reply()
    assert future.exception(0) is None


def test_a_callback_that_exits_ends_neither_the_sender_nor_other_callbacks(caplog):
    rig = SenderRig().ready()
    called = []
    futures = [
        rig.append(b"1", callback=lambda *_: sys.exit(1)),
        rig.append(b"2", callback=lambda *_: called.append(2)),
    ]
    rig.turns()
    rig.reply()
    assert called == [2]
    assert all(future.exception(0) is None for future in futures)
    assert rig.pool.available_bytes == rig.pool.total_bytes
    assert "SystemExit" in caplog.text


def test_an_error_that_many_records_share_does_not_grow_with_each():
    rig = SenderRig().ready()
    futures = [rig.append(b"x") for _ in range(50)]
    rig.turns()
    rig.reply(code=ErrorCode.INVALID_RECORD)
    depths = set()
    for future in futures:
        with pytest.raises(ProducerError) as caught:
            future.result(0)
        depths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(depths) == 1


def test_a_batch_that_cannot_be_encoded_now_is_tried_again(monkeypatch, caplog):
    rig = SenderRig().ready().introduce()
    future = rig.append(b"x")
    with monkeypatch.context() as patched:
        patched.setattr(ProducerBatch, "seal", no_memory)
        rig.turns(2)
    assert "no memory left" in caplog.text
    assert not future.done()
    for _ in range(5):
        rig.pass_ms(500)
        rig.turns()
    rig.reply()
    assert future.exception(0) is None


def test_a_batch_that_can_never_be_encoded_expires_and_gives_its_memory_back(
    monkeypatch,
):
    rig = SenderRig(**SHORT).ready().introduce()
    future = rig.append(b"x")
    monkeypatch.setattr(ProducerBatch, "seal", no_memory)
    pass_time(rig, 5)
    assert "no memory left" in str(future.exception(0))
    assert "they were sent" not in str(future.exception(0))
    assert rig.pool.available_bytes == rig.pool.total_bytes


def test_a_batch_that_cannot_be_split_fails_and_keeps_nobody_waiting(monkeypatch):
    rig = SenderRig().ready().introduce()
    large = [rig.append(b"%d" % number) for number in range(4)]
    other = rig.append(b"x", partition=1)
    rig.turns()
    monkeypatch.setattr(ProducerBatch, "split", no_memory)
    rig.reply(codes={0: ErrorCode.MESSAGE_TOO_LARGE})
    assert other.exception(0) is None
    for future in large:
        assert "MESSAGE_TOO_LARGE" in str(future.exception(0))
    assert rig.pool.available_bytes == rig.pool.total_bytes
    later = rig.append(b"later")
    rig.turns(3)
    rig.reply()
    assert later.exception(0) is None


def no_memory(*_):
    raise MemoryError("no memory left")
