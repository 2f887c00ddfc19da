"""The sender: sequences and order, whatever is lost, refused or sent again."""

from __future__ import annotations

import pytest

from mpbroker.producer.accumulator import GATHER_MS
from mpbroker.producer.errors import (
    FatalError,
    OutOfOrderSequenceError,
    RefusedError,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.init_producer_id import InitProducerIdResponse
from tests.producer.rig import SenderRig

SEQUENCE = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_the_producer_id_comes_before_the_first_batch():
    rig = SenderRig()
    rig.wire.silent.add(ApiKey.INIT_PRODUCER_ID)
    rig.append()
    rig.turns(8)
    assert not rig.produces
    rig.wire.answer(InitProducerIdResponse(producer_id=9, producer_epoch=3))
    rig.turns(2)
    header = rig.header(rig.produces[0])
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (
        9,
        3,
        0,
    )


def test_no_permission_for_a_producer_id_is_fatal_and_says_so():
    rig = SenderRig()
    rig.wire.silent.add(ApiKey.INIT_PRODUCER_ID)
    future = rig.append()
    rig.turns(8)
    rig.wire.answer(
        InitProducerIdResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    )
    rig.turns(2)
    error = future.exception(0)
    assert isinstance(error, FatalError)
    # WRITE of any topic is enough for an id (KIP-679), and is what is mostly missing.
    assert "give this client WRITE on the topic, or IDEMPOTENT_WRITE" in str(error)
    assert "enable.idempotence=false" in str(error)


def test_a_producer_id_that_is_not_given_yet_is_asked_for_again():
    rig = SenderRig()
    rig.wire.silent.add(ApiKey.INIT_PRODUCER_ID)
    rig.append()
    rig.turns(8)
    rig.wire.answer(InitProducerIdResponse(error_code=15))
    rig.turns(2)
    assert not rig.wire.waiting(ApiKey.INIT_PRODUCER_ID)
    rig.pass_ms(100)
    rig.turns(2)
    assert rig.wire.waiting(ApiKey.INIT_PRODUCER_ID)


def test_sequences_count_records_by_partition():
    rig = SenderRig(linger_ms=10).ready().introduce()
    for count in (3, 2):
        for _ in range(count):
            rig.append(partition=0)
        rig.append(partition=1)
        rig.pass_ms(10)
        rig.turns()
    first, second = rig.produces
    assert [rig.header(s, 0).base_sequence for s in (first, second)] == [1, 4]
    assert [rig.header(s, 1).base_sequence for s in (first, second)] == [1, 2]


def test_until_a_broker_knows_the_producer_one_batch_of_a_partition_is_in_flight():
    rig = SenderRig().ready()
    rig.send(b"0")
    rig.send(b"1")
    assert [rig.values(s) for s in rig.produces] == [[b"0"]]
    # A leader that has just become one refuses the first, and would take the second.
    rig.reply(code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
    rig.turns(3)
    assert not rig.produces
    rig.pass_ms(130)
    rig.turns(3)
    assert [rig.values(s) for s in rig.produces] == [[b"0"]]
    rig.reply()
    rig.turns()
    assert [rig.values(s) for s in rig.produces] == [[b"1"]]


def test_a_batch_whose_place_is_taken_fails_instead_of_being_tried_for_ever():
    rig = SenderRig().ready().introduce()
    late, after = rig.send(b"late"), rig.send(b"after")
    first, second = rig.produces
    rig.reply(first, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    rig.reply(second)
    rig.pass_ms(130)
    rig.turns(3)
    rig.reply(code=SEQUENCE)
    assert isinstance(late.exception(0), OutOfOrderSequenceError)
    assert "read the topic before" in str(late.exception(0))
    assert after.result(0)


def test_no_more_than_five_batches_of_a_partition_are_in_flight():
    rig = SenderRig().ready().introduce()
    for _ in range(7):
        rig.send()
    assert len(rig.produces) == 5
    assert [rig.header(s).base_sequence for s in rig.produces] == [1, 2, 3, 4, 5]


def test_what_comes_for_a_node_that_has_all_it_takes_need_not_wake_the_sender():
    rig = SenderRig({"t": [0, 1]}).ready().introduce()
    rig.reply()
    for _ in range(5):
        rig.send()
    last = rig.append()
    rig.turns()
    busy, idle = (rig.accumulator.topic("t").queue(number) for number in (0, 1))
    assert rig.accumulator.must_wait(busy, rig.metadata.snapshot)
    assert not rig.accumulator.must_wait(idle, rig.metadata.snapshot)
    rig.pass_ms(GATHER_MS)
    rig.reply()
    rig.turns()
    # There was room, and it went without being asked for.
    assert rig.header(rig.produces[-1]).base_sequence == 6
    while rig.produces:
        rig.reply()
    assert not rig.accumulator.must_wait(busy, rig.metadata.snapshot)
    assert last.result(0).has_offset


def test_no_turn_is_spent_on_a_node_that_has_just_been_given_all_there_is():
    rig = SenderRig(batch_size=200).ready().introduce()
    rig.send()
    assert rig.wire.waits[-1] > 0
    for _ in range(2):
        rig.append(b"x" * 100)
    rig.turns()
    assert rig.wire.waits[-1] == 0  # there is another batch, and room for it
    rig.turns()
    assert rig.wire.waits[-1] > 0


def test_no_turn_is_spent_on_a_node_that_has_just_been_given_all_it_takes():
    rig = SenderRig(batch_size=200).ready().introduce()
    for _ in range(4):
        rig.send()
    for _ in range(2):
        rig.append(b"x" * 100)
    rig.turns()
    assert len(rig.produces) == 5
    assert rig.accumulator.has_undrained
    assert rig.wire.waits[-1] > 0


def test_batches_in_flight_that_fail_are_sent_again_in_order_one_by_one():
    rig = SenderRig().ready().introduce()
    futures = [rig.send(b"%d" % i) for i in range(3)]
    first, second, third = rig.produces
    rig.reply(first, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    rig.reply(second, SEQUENCE)
    rig.reply(third, SEQUENCE)
    order = []
    for _ in range(30):
        rig.pass_ms(100)
        rig.turns(2)
        if rig.produces:
            assert len(rig.produces) == 1
            order += rig.values(rig.produces[0])
            rig.reply()
    assert order == [b"0", b"1", b"2"]
    assert [f.result(0).offset for f in futures] == [1, 2, 3]


def test_a_lost_connection_with_many_in_flight_keeps_sequences_and_order():
    rig = SenderRig().ready().introduce()
    futures = [rig.send(b"%d" % i) for i in range(5)]
    rig.wire.hang_up(0)
    rig.turns()
    sent = []
    for _ in range(40):
        rig.pass_ms(200)
        rig.turns(3)
        if rig.produces:
            header = rig.header(rig.produces[0])
            sent.append((header.producer_epoch, header.base_sequence))
            rig.reply()
    assert sent == [(0, i) for i in range(1, 6)]
    assert [f.result(0).offset for f in futures] == [1, 2, 3, 4, 5]


def test_a_batch_that_is_there_already_counts_as_written_without_an_offset():
    rig = SenderRig().ready()
    future = rig.send()
    rig.reply(code=ErrorCode.DUPLICATE_SEQUENCE_NUMBER)
    assert future.result(0).offset == -1


def test_a_fatal_first_batch_has_later_ones_begin_a_new_epoch_at_zero():
    rig = SenderRig().ready().introduce()
    lost = rig.send(b"0")
    kept = rig.send(b"1")
    first, second = rig.produces
    rig.reply(first, ErrorCode.INVALID_RECORD)
    rig.reply(second, SEQUENCE)
    rig.pass_ms(130)
    rig.turns(4)
    header = rig.header(rig.produces[0])
    assert (header.producer_epoch, header.base_sequence) == (1, 0)
    rig.reply(base_offset=0)
    assert isinstance(lost.exception(0), RefusedError)
    assert kept.result(0).offset == 0


def test_a_gap_the_broker_sees_and_we_do_not_raises_the_epoch():
    rig = SenderRig().ready()
    rig.send()
    rig.reply()
    future = rig.send()
    rig.reply(code=SEQUENCE)
    rig.pass_ms(130)
    rig.turns(4)
    header = rig.header(rig.produces[0])
    assert (header.producer_epoch, header.base_sequence) == (1, 0)
    rig.reply()
    assert future.result(0)


def test_when_epochs_are_used_up_another_id_is_asked_for():
    rig = SenderRig().ready()
    rig.state.epoch = 0x7FFF
    rig.send()
    rig.reply()
    future = rig.send()
    rig.reply(code=SEQUENCE)
    rig.pass_ms(130)
    rig.turns(6)
    header = rig.header(rig.produces[0])
    assert (header.producer_epoch, header.base_sequence) == (0, 0)
    rig.reply()
    assert future.result(0)


def test_sequences_go_on_at_zero_after_the_highest():
    rig = SenderRig().ready()
    rig.send()
    rig.reply()
    rig.state._partitions["t", 0].next = 0x7FFFFFFF
    rig.state._partitions["t", 0].last_acked = 0x7FFFFFFE
    rig.send()
    assert rig.header(rig.produces[0]).base_sequence == 0x7FFFFFFF
    rig.reply()
    rig.send()
    assert rig.header(rig.produces[0]).base_sequence == 0
    rig.reply()


@pytest.mark.parametrize("log_start_offset", [-1, 500])
def test_a_broker_that_forgot_the_producer_is_written_to_all_the_same(log_start_offset):
    rig = SenderRig().ready()
    rig.send()
    rig.reply(base_offset=10)
    future = rig.send()
    rig.reply(code=ErrorCode.UNKNOWN_PRODUCER_ID, log_start_offset=log_start_offset)
    rig.pass_ms(130)
    rig.turns(4)
    header = rig.header(rig.produces[0])
    expected = (0, 1) if log_start_offset < 0 else (1, 0)
    assert (header.producer_epoch, header.base_sequence) == expected
    rig.reply(base_offset=500)
    assert future.result(0).offset == 500


def test_with_one_in_flight_a_partition_waits_though_the_leader_moves():
    rig = SenderRig(
        enable_idempotence=False, max_in_flight_requests_per_connection=1
    ).ready()
    rig.send(b"first")
    rig.wire.topics["t"] = [1, 1]
    rig.wire.epochs["t", 0] = 1
    rig.metadata.request_update()
    rig.pass_ms(200)
    rig.turns(5)
    rig.send(b"second")
    rig.turns(3)
    assert [rig.values(s) for s in rig.produces] == [[b"first"]]
    rig.reply()
    rig.turns(3)
    assert [rig.values(s) for s in rig.produces] == [[b"second"]]
