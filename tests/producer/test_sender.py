"""The sender: what becomes of batches, answer by answer.

Mirrors Kafka's SenderTest (without transactions: test_transactions.py).
"""

from __future__ import annotations

import pytest

from mpbroker.producer.errors import (
    DeliveryTimeoutError,
    NetworkError,
    ProducerClosedError,
    RecordTooLargeError,
    RefusedError,
    RetriableError,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from tests.producer.rig import PRODUCER_ID, SenderRig


def test_a_record_is_sent_and_its_future_tells_the_offset():
    rig = SenderRig().ready()
    future = rig.send(b"hello")
    assert rig.values(rig.produces[0]) == [b"hello"]
    assert not future.done()
    rig.reply(base_offset=17)
    assert future.result(0).offset == 17
    assert future.result(0).topic == "t"
    assert rig.client.in_flight() == 0
    assert rig.pool.available_bytes == rig.pool.total_bytes
    assert not rig.accumulator.has_incomplete


def test_each_record_of_a_batch_has_its_own_offset_and_timestamp():
    rig = SenderRig(linger_ms=10).ready()
    futures = [rig.append(b"%d" % i) for i in range(5)]
    rig.pass_ms(10)
    rig.turns()
    rig.reply(base_offset=100)
    assert [f.result(0).offset for f in futures] == [100, 101, 102, 103, 104]
    assert all(f.result(0).timestamp > 0 for f in futures)


def test_callbacks_come_in_order_before_the_future_is_done_and_may_raise():
    rig = SenderRig(linger_ms=10).ready()
    seen = []

    def note(metadata, error):
        seen.append(metadata.offset)
        raise RuntimeError("the user's mistake")

    futures = [rig.append(callback=note) for _ in range(3)]
    rig.pass_ms(10)
    rig.turns()
    rig.reply(base_offset=5)
    assert seen == [5, 6, 7]
    assert futures[2].result(0).offset == 7


def test_without_acks_records_are_done_when_sent_and_have_no_offset():
    rig = SenderRig(acks=0).ready()
    future = rig.send()
    assert not rig.produces
    assert future.result(0).offset == -1
    assert not future.result(0).has_offset


@pytest.mark.parametrize("idempotence", [True, False])
def test_a_lost_connection_is_tried_again(idempotence):
    rig = SenderRig(enable_idempotence=idempotence).ready()
    future = rig.send()
    rig.wire.hang_up(0)
    rig.turns()
    assert not future.done()
    rig.pass_ms(1300)
    rig.turns(6)
    rig.reply(base_offset=3)
    assert future.result(0).offset == 3


def test_retries_are_counted_and_then_the_future_fails():
    rig = SenderRig(enable_idempotence=False, retries=1).ready()
    future = rig.send()
    for _ in range(2):
        rig.wire.hang_up(0)
        rig.turns()
        rig.pass_ms(1300)
        rig.turns(6)
    error = future.exception(0)
    assert isinstance(error, NetworkError)
    assert "may be written" in str(error)
    assert rig.metrics.snapshot(0)["producer-metrics"]["record-retry-total"] == 1


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
    ],
)
def test_retriable_refusals_wait_for_their_backoff(code):
    rig = SenderRig().ready()
    future = rig.send()
    rig.reply(code=code)
    rig.turns(3)
    assert not rig.produces
    rig.pass_ms(121)
    rig.turns(4)
    rig.reply(base_offset=0)
    assert future.result(0).offset == 0


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (ErrorCode.INVALID_RECORD, RefusedError, "INVALID_RECORD"),
        (ErrorCode.MESSAGE_TOO_LARGE, RecordTooLargeError, "max.message.bytes"),
        (ErrorCode.TOPIC_AUTHORIZATION_FAILED, RefusedError, "WRITE"),
        (ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT, RefusedError, "UNSUPPORTED"),
        (9999, RefusedError, "error code 9999"),
    ],
)
def test_other_refusals_fail_the_future_with_what_to_do(code, kind, words):
    rig = SenderRig().ready()
    future = rig.send()
    rig.reply(code=code, message="the broker's words")
    error = future.exception(0)
    assert isinstance(error, kind)
    assert words in str(error)
    assert "the broker's words" in str(error)
    assert "t-0" in str(error)


def test_errors_of_single_records_name_them_and_the_rest_can_be_sent_again():
    rig = SenderRig(linger_ms=10).ready()
    futures = [rig.append() for _ in range(3)]
    rig.pass_ms(10)
    rig.turns()
    rig.reply(code=ErrorCode.INVALID_RECORD, record_errors={1: "no key"})
    assert "no key" in str(futures[1].exception(0))
    assert "others of their batch" in str(futures[0].exception(0))


def test_a_partition_that_the_answer_forgets_is_not_taken_for_written():
    rig = SenderRig(enable_idempotence=False, retries=0).ready()
    future = rig.append(partition=0)
    rig.append(partition=1)
    rig.turns()
    (sent,) = rig.produces
    sent.request.topic_data[0].partition_data.pop(0)
    rig.reply(sent)
    assert "does not mention" in str(future.exception(0))


# -- leaders ---------------------------------------------------------------------------


def test_a_leader_that_moved_is_learnt_from_metadata_and_tried_at_once():
    rig = SenderRig().ready()
    future = rig.send()
    rig.wire.topics["t"] = [1, 1]
    rig.wire.epochs = {("t", 0): 1, ("t", 1): 1}
    rig.pass_ms(200)  # so that metadata may be asked for at once
    rig.reply(code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
    rig.turns(6)  # and no backoff is waited for
    (sent,) = rig.produces
    assert sent.node == 1
    rig.reply()
    assert future.result(0)


def test_a_leader_named_in_the_answer_is_tried_at_once_without_metadata():
    rig = SenderRig().ready()
    future = rig.send()
    asked = len([s for s in rig.wire.all_sent if s.key == ApiKey.METADATA])
    rig.reply(code=ErrorCode.NOT_LEADER_OR_FOLLOWER, leader=(1, 7))
    rig.turns(3)
    (sent,) = rig.produces
    assert sent.node == 1
    assert len([s for s in rig.wire.all_sent if s.key == ApiKey.METADATA]) == asked
    rig.reply()
    assert future.result(0)


def test_a_partition_without_a_leader_waits_for_one():
    rig = SenderRig({"t": [-1, 0]}).ready()
    future = rig.send()
    assert not rig.produces
    rig.wire.topics["t"] = [0, 0]
    for _ in range(10):
        rig.pass_ms(300)
        rig.turns(2)
    rig.reply()
    assert future.result(0)


# -- time ------------------------------------------------------------------------------


def test_a_batch_that_is_never_sent_fails_after_its_delivery_timeout():
    rig = SenderRig().ready()
    rig.wire.refuse_connect |= {-1, 0, 1}
    rig.wire.hang_up(0)
    rig.turns()
    future = rig.append()
    rig.pass_ms(119_999)
    rig.turns()
    assert not future.done()
    rig.pass_ms(1)
    rig.turns()
    error = future.exception(0)
    assert isinstance(error, DeliveryTimeoutError)
    assert "delivery.timeout.ms=120000" in str(error)
    assert "may be written" not in str(error)
    assert rig.pool.available_bytes == rig.pool.total_bytes


def test_a_batch_in_flight_fails_after_its_delivery_timeout_and_frees_memory_once():
    rig = SenderRig(delivery_timeout_ms=30_000).ready()
    future = rig.send()
    rig.pass_ms(29_999)
    rig.turns()
    assert not future.done()
    rig.pass_ms(1)
    (sent,) = rig.produces
    rig.reply(sent, turn=False)  # at the same moment: the answer is too late
    rig.sender._expire(rig.wire.now_ms)
    assert "may be written" in str(future.exception(0))
    rig.turns(2)
    assert rig.pool.available_bytes == rig.pool.total_bytes


def test_a_retriable_refusal_after_the_deadline_is_final():
    rig = SenderRig(delivery_timeout_ms=30_000, request_timeout_ms=30_000).ready()
    future = rig.send()
    rig.pass_ms(29_990)
    rig.turns()
    rig.pass_ms(10)
    rig.reply(code=ErrorCode.REQUEST_TIMED_OUT)
    assert isinstance(future.exception(0), RetriableError)


def test_an_expired_batch_says_why_the_last_try_failed():
    rig = SenderRig(delivery_timeout_ms=30_000, request_timeout_ms=30_000).ready()
    future = rig.send()
    rig.reply(code=ErrorCode.KAFKA_STORAGE_ERROR)
    rig.wire.refuse_connect |= {-1, 0, 1}
    rig.wire.hang_up(0)
    rig.pass_ms(30_000)
    rig.turns(3)
    assert isinstance(future.exception(0), DeliveryTimeoutError)
    assert "ended with KAFKA_STORAGE_ERROR" in str(future.exception(0))


def test_what_comes_after_an_expired_batch_is_held_until_its_fate_is_known():
    rig = SenderRig(delivery_timeout_ms=30_000).ready()
    lost = rig.send(b"0")
    rig.wire.hang_up(0)
    rig.turns()
    rig.wire.refuse_connect.add(0)
    rig.pass_ms(30_000)
    rig.turns(3)
    assert isinstance(lost.exception(0), DeliveryTimeoutError)
    kept = rig.append(b"1")
    rig.wire.refuse_connect.clear()
    for _ in range(6):
        rig.pass_ms(500)
        rig.turns(3)
    # It may or may not be written, so numbers begin again in another epoch.
    header = rig.header(rig.produces[0])
    assert (header.producer_epoch, header.base_sequence) == (1, 0)
    rig.reply()
    assert kept.result(0)


def test_an_unsent_batch_that_expires_holds_nothing_back():
    rig = SenderRig({"t": [0, -1]}, delivery_timeout_ms=30_000).ready()
    late = rig.append(partition=1)
    rig.pass_ms(30_000)
    rig.turns(3)
    assert late.exception(0)
    rig.send(partition=0)
    header = rig.header(rig.produces[0])
    assert (header.producer_epoch, header.base_sequence) == (0, 0)
    rig.reply()


def test_the_wait_ends_with_linger_and_with_the_next_expiry():
    rig = SenderRig(linger_ms=50).ready()
    rig.append()
    rig.turns()
    assert rig.wire.waits[-1] == 50
    rig.pass_ms(50)
    rig.turns(2)
    assert rig.wire.waits[-1] <= 30_000


def test_the_callback_of_an_expired_batch_may_send_again():
    rig = SenderRig({"t": [-1, 0]}).ready()
    again = []
    rig.append(callback=lambda metadata, error: again.append(rig.append(partition=1)))
    rig.pass_ms(120_000)
    rig.turns(2)
    rig.reply()
    assert again[0].result(0)


# -- too large -------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_batch_that_is_too_large_is_split_and_every_future_finds_its_offset(codec):
    rig = SenderRig(linger_ms=10, batch_size=4000, compression_type=codec).ready()
    seen = []
    futures = [
        rig.append(b"%03d" % i * 30, callback=lambda m, e: seen.append(m.offset))
        for i in range(20)
    ]
    rig.pass_ms(10)
    rig.turns()
    rig.reply(code=ErrorCode.MESSAGE_TOO_LARGE)
    stored = []
    for _ in range(40):
        rig.turns()
        if rig.produces:
            sent = rig.produces[0]
            assert rig.header(sent).base_sequence == len(stored)
            values = rig.values(sent)
            if len(values) > 4:
                rig.reply(code=ErrorCode.MESSAGE_TOO_LARGE)
                continue
            rig.reply(base_offset=len(stored))
            stored += values
    assert stored == [b"%03d" % i * 30 for i in range(20)]
    assert [f.result(0).offset for f in futures] == list(range(20))
    assert seen == list(range(20))
    assert rig.pool.available_bytes == rig.pool.total_bytes
    assert not rig.accumulator.has_incomplete


def test_a_single_record_that_is_too_large_fails_and_is_not_split():
    rig = SenderRig().ready()
    future = rig.send()
    rig.reply(code=ErrorCode.MESSAGE_TOO_LARGE)
    assert isinstance(future.exception(0), RecordTooLargeError)


# -- the end ---------------------------------------------------------------------------


def test_closing_sends_what_lingers_and_waits_for_it():
    rig = SenderRig(linger_ms=100_000).ready()
    future = rig.append()
    rig.turns()
    assert not rig.produces
    rig.sender.close()
    rig.turns()
    rig.reply(turn=False)
    rig.sender.run()
    assert future.result(0)
    assert rig.wire.is_shut_down


def test_closing_by_force_fails_what_is_not_acknowledged():
    rig = SenderRig().ready()
    sent, queued = rig.send(), rig.append()
    rig.sender.force_close()
    rig.sender.run()
    for future in (sent, queued):
        assert isinstance(future.exception(0), ProducerClosedError)
    assert rig.pool.available_bytes == rig.pool.total_bytes


def test_throttling_is_measured():
    rig = SenderRig().ready()
    for ms in (100, 400):
        rig.send()
        rig.reply(throttle_ms=ms)
        rig.pass_ms(ms)
    own = rig.metrics.snapshot(rig.wire.now_ms)["producer-metrics"]
    assert own["produce-throttle-time-avg"] == 250
    assert own["produce-throttle-time-max"] == 400
    assert rig.state.producer_id == PRODUCER_ID


def test_sizes_and_rates_are_those_of_first_tries():
    rig = SenderRig(linger_ms=10).ready()
    rig.append(b"x" * 100, partition=0)
    for _ in range(3):
        rig.append(b"x" * 900, partition=1)
    rig.pass_ms(10)
    rig.turns()
    sizes = [len(batch) for batch in rig.batches(rig.produces[0]).values()]
    for _ in range(2):
        own = rig.metrics.snapshot(rig.wire.now_ms)["producer-metrics"]
        assert own["record-send-total"] == 4
        assert own["byte-total"] == sum(sizes)
        assert own["batch-size-max"] == max(sizes)
        assert own["batch-size-avg"] == sum(sizes) / 2
        assert 700 < own["record-size-avg"] < 720
        assert 900 < own["record-size-max"] < 920
        assert own["record-queue-time-max"] == own["record-queue-time-avg"] == 10
        assert own["compression-rate-avg"] == 1
        assert own["records-per-request-max"] == 4
        rig.reply(codes=dict.fromkeys((0, 1), ErrorCode.NOT_LEADER_OR_FOLLOWER))
        rig.pass_ms(130)
        rig.turns(3)


def test_one_request_carries_a_batch_of_every_ready_partition():
    rig = SenderRig(linger_ms=10).ready()
    rig.append(partition=0)
    rig.append(partition=1)
    rig.pass_ms(10)
    rig.turns()
    (sent,) = rig.produces
    assert set(rig.batches(sent)) == {("t", 0), ("t", 1)}
    rig.reply(codes={1: ErrorCode.NOT_LEADER_OR_FOLLOWER})
    rig.pass_ms(130)
    rig.turns(3)
    (again,) = rig.produces
    assert set(rig.batches(again)) == {("t", 1)}
