"""Transactions: what is sent when, and which error costs what.

The first part is answered by a script, mirroring Kafka's TransactionManagerTest; the
second runs where the broker under test has transactions.
"""

from __future__ import annotations

from itertools import product

import pytest

from mpbroker.client.cluster import TopicPartition
from mpbroker.producer import (
    AbortableError,
    BufferExhaustedError,
    DeliveryTimeoutError,
    FatalError,
    GroupMetadata,
    ProducerError,
    ProducerFencedError,
    TransactionAbortedError,
    TransactionStateError,
)
from mpbroker.producer.transactions import (
    TRANSITIONS,
    OffsetAndMetadata,
    TransactionManager,
    TransactionState,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnResponse
from mpbroker.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopicResult,
)
from mpbroker.protocol.messages.end_txn import EndTxnResponse
from mpbroker.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from tests.producer.rig import SenderRig


class TransactionRig(SenderRig):
    """A rig with transactions initialised and one begun."""

    def __init__(self, begin: bool = True, **settings: object) -> None:
        super().__init__(transactional_id="tx", **settings)
        self.manager = self.state
        assert isinstance(self.manager, TransactionManager)
        self.turns(4)
        operation = self.manager.begin_init()
        self.turns(8)
        operation.wait(0)
        self.client.ready(0, self.wire.now_ms)
        self.turns(3)
        if begin:
            self.manager.begin()

    def added(self, code: int = 0) -> None:
        (asked,) = self.wire.waiting(ApiKey.ADD_PARTITIONS_TO_TXN)
        self.wire.answer(
            AddPartitionsToTxnResponse(
                results_by_topic_v3_and_below=[
                    AddPartitionsToTxnTopicResult(
                        name=topic.name,
                        results_by_partition=[
                            AddPartitionsToTxnPartitionResult(
                                partition_index=index, partition_error_code=code
                            )
                            for index in topic.partitions
                        ],
                    )
                    for topic in asked.request.v3_and_below_topics
                ]
            ),
            asked,
        )
        self.turns(2)

    def ended(self, code: int = 0) -> bool:
        """Answer EndTxn; return whether it was to commit."""
        (asked,) = self.wire.waiting(ApiKey.END_TXN)
        self.wire.answer(EndTxnResponse(error_code=code), asked)
        self.turns(2)
        return asked.request.committed

    def send_added(self, value=b"x", **where):
        future = self.append(value, **where)
        self.turns(2)
        if self.wire.waiting(ApiKey.ADD_PARTITIONS_TO_TXN):
            self.added()
        return future


def test_a_partition_is_added_before_it_is_written_to_and_only_once():
    rig = TransactionRig()
    rig.append(b"0")
    rig.turns(2)
    assert not rig.produces
    rig.added()
    assert rig.values(rig.produces[0]) == [b"0"]
    assert rig.header(rig.produces[0]).is_transactional
    rig.reply()
    rig.send(b"1")
    assert not rig.wire.waiting(ApiKey.ADD_PARTITIONS_TO_TXN)
    assert rig.values(rig.produces[0]) == [b"1"]


def test_the_end_waits_for_all_records_and_linger_does_not():
    rig = TransactionRig(linger_ms=60_000)
    future = rig.send_added()
    assert not rig.produces
    operation = rig.manager.begin_commit()
    rig.turns(2)
    assert len(rig.produces) == 1
    assert not rig.wire.waiting(ApiKey.END_TXN)
    rig.reply()
    rig.turns()
    assert rig.ended() is True
    operation.wait(0)
    assert future.result(0)
    assert rig.manager.state is TransactionState.READY


def test_a_batch_that_is_split_stays_in_its_transaction():
    rig = TransactionRig(linger_ms=10, batch_size=4000)
    futures = [rig.append(b"%03d" % number * 30) for number in range(8)]
    rig.turns(2)
    rig.added()
    rig.pass_ms(10)
    rig.turns(2)
    rig.reply(code=ErrorCode.MESSAGE_TOO_LARGE)
    operation = rig.manager.begin_commit()
    rig.turns(2)
    written: list[bytes | None] = []
    while rig.produces:
        assert not rig.wire.waiting(ApiKey.END_TXN)
        (sent, *_) = rig.produces
        header = rig.header(sent)
        assert header.is_transactional
        assert header.base_sequence == len(written)
        values = rig.values(sent)
        assert len(values) < 8
        rig.reply(base_offset=len(written))
        written += values
        rig.turns(2)
    assert written == [b"%03d" % number * 30 for number in range(8)]
    assert rig.ended()
    operation.wait(0)
    assert [future.result(0).offset for future in futures] == list(range(8))


def test_a_transaction_without_records_ends_without_the_broker():
    rig = TransactionRig()
    operation = rig.manager.begin_commit()
    rig.turns(2)
    operation.wait(0)
    assert not [s for s in rig.wire.all_sent if s.key == ApiKey.END_TXN]


def test_an_abort_drops_what_was_not_sent_and_waits_for_what_was():
    rig = TransactionRig()
    sent = rig.send_added(b"sent", partition=0)
    queued = rig.append(b"queued", partition=1)
    operation = rig.manager.begin_abort()
    rig.turns(2)
    assert isinstance(queued.exception(0), TransactionAbortedError)
    assert not rig.wire.waiting(ApiKey.END_TXN)
    rig.reply()
    rig.turns()
    assert rig.ended() is False
    operation.wait(0)
    assert sent.result(0)


def meanwhile(rig, happens):
    """Have a sender's turn be interrupted where it asks what is to be sent."""
    ask = rig.manager.next_pending

    def interrupted(*known):
        rig.manager.next_pending = ask
        happens()
        return ask(*known)

    rig.manager.next_pending = interrupted
    rig.turns(2)
    assert rig.manager.next_pending is ask


def test_what_is_sent_and_aborted_amid_a_turn_is_not_of_the_next_transaction():
    rig = TransactionRig(begin=False, linger_ms=60_000)
    futures = []

    def send_and_abort():
        rig.manager.begin()
        futures.append(rig.append(b"aborted"))
        futures.append(rig.manager.begin_abort())

    meanwhile(rig, send_and_abort)
    record, abort = futures
    abort.wait(0)
    assert isinstance(record.exception(0), TransactionAbortedError)
    rig.manager.begin()
    rig.send_added(b"committed")
    rig.manager.begin_commit()
    rig.turns(2)
    assert rig.values(rig.produces[0]) == [b"committed"]


def test_what_is_sent_amid_a_turn_is_acknowledged_before_its_commit_is_sent():
    rig = TransactionRig()
    rig.send_added(b"0")
    rig.reply()

    def send_and_commit():
        rig.append(b"1")
        rig.manager.begin_commit()

    meanwhile(rig, send_and_commit)
    assert rig.values(rig.produces[0]) == [b"1"]
    assert not rig.wire.waiting(ApiKey.END_TXN)
    rig.reply()
    rig.turns()
    assert rig.ended() is True


def test_a_lost_record_makes_commit_fail_and_abort_raise_the_epoch():
    rig = TransactionRig()
    future = rig.send_added()
    operation = rig.manager.begin_commit()
    rig.turns()
    rig.reply(code=ErrorCode.INVALID_RECORD)
    rig.turns()
    with pytest.raises(AbortableError, match="abort_transaction"):
        operation.wait(0)
    assert future.exception(0)
    with pytest.raises(AbortableError):
        rig.manager.check_open("send()")
    rig.epoch = 1
    abort = rig.manager.begin_abort()
    rig.turns(2)
    assert rig.ended() is False
    rig.turns(4)
    abort.wait(0)
    asked = [s for s in rig.wire.all_sent if s.key == ApiKey.INIT_PRODUCER_ID][-1]
    assert asked.request.producer_id == 4000
    rig.manager.begin()
    rig.send_added()
    header = rig.header(rig.produces[0])
    assert (header.producer_epoch, header.base_sequence) == (1, 0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.PRODUCER_FENCED, ProducerFencedError),
        (ErrorCode.INVALID_PRODUCER_EPOCH, ProducerFencedError),
        (ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, FatalError),
        (ErrorCode.UNKNOWN_SERVER_ERROR, FatalError),
        (ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT, FatalError),
        (ErrorCode.TOPIC_AUTHORIZATION_FAILED, AbortableError),
        (ErrorCode.TRANSACTION_ABORTABLE, AbortableError),
        (ErrorCode.INVALID_TXN_STATE, AbortableError),
    ],
)
def test_an_error_of_the_coordinator_is_fatal_or_abortable(code, kind):
    rig = TransactionRig()
    future = rig.append()
    rig.turns(2)
    rig.added(code)
    rig.turns(2)
    assert future.exception(0) is not None
    with pytest.raises(kind):
        rig.manager.check_open("send()")
    if kind is AbortableError:
        operation = rig.manager.begin_abort()
        rig.turns(6)
        operation.wait(0)
        rig.manager.begin()
    else:
        with pytest.raises(kind):
            rig.manager.begin_abort()
    if kind is ProducerFencedError:  # mostly because it was too slow
        assert "transaction.timeout.ms" in str(future.exception(0))


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.NOT_COORDINATOR,
    ],
)
def test_a_coordinator_that_is_not_ready_is_asked_again_after_a_backoff(code):
    rig = TransactionRig()
    rig.append()
    rig.turns(2)
    rig.added(code)
    rig.turns(2)
    assert not rig.wire.waiting(ApiKey.ADD_PARTITIONS_TO_TXN)
    rig.pass_ms(100)
    rig.turns(6)
    rig.added()
    rig.turns()
    assert rig.produces


def test_a_lost_coordinator_is_looked_for_and_asked_again():
    rig = TransactionRig()
    rig.append()
    rig.turns(2)
    assert rig.wire.waiting(ApiKey.ADD_PARTITIONS_TO_TXN)
    rig.wire.hang_up(1)
    for _ in range(6):
        rig.turns(3)
        rig.pass_ms(100)
    rig.added()
    rig.turns()
    assert rig.produces
    finds = [s for s in rig.wire.all_sent if s.key == ApiKey.FIND_COORDINATOR]
    assert len(finds) == 2


def test_an_abortable_error_while_aborting_is_fatal():
    rig = TransactionRig()
    rig.send_added()
    rig.reply()
    operation = rig.manager.begin_abort()
    rig.turns(2)
    rig.ended(ErrorCode.TRANSACTION_ABORTABLE)
    with pytest.raises(ProducerError):
        operation.wait(0)
    assert rig.manager.state is TransactionState.FATAL_ERROR


def test_offsets_go_to_the_transactions_and_then_to_the_groups_coordinator():
    rig = TransactionRig()
    member = GroupMetadata("g", 3, "m-1")
    operation = rig.manager.add_offsets(
        {TopicPartition("in", 2): OffsetAndMetadata(55, "note")}, member
    )
    rig.turns(2)
    (asked,) = rig.wire.waiting(ApiKey.ADD_OFFSETS_TO_TXN)
    assert asked.request.group_id == "g"
    rig.wire.answer(AddOffsetsToTxnResponse(), asked)
    rig.turns(5)
    (asked,) = rig.wire.waiting(ApiKey.TXN_OFFSET_COMMIT)
    request = asked.request
    assert (request.group_id, request.generation_id, request.member_id) == (
        "g",
        3,
        "m-1",
    )
    assert request.topics[0].partitions[0].committed_offset == 55
    rig.wire.answer(
        TxnOffsetCommitResponse(
            topics=[
                TxnOffsetCommitResponseTopic(
                    name="in",
                    partitions=[TxnOffsetCommitResponsePartition(partition_index=2)],
                )
            ]
        ),
        asked,
    )
    rig.turns(2)
    operation.wait(0)
    # And the transaction has something to commit at the broker.
    rig.manager.begin_commit()
    rig.turns(2)
    assert rig.ended() is True


def test_closing_aborts_what_is_open():
    rig = TransactionRig()
    rig.send_added()
    rig.reply()
    rig.sender.close()
    assert rig.sender._has_work()
    rig.turns(2)
    assert rig.ended() is False
    assert not rig.sender._has_work()


def test_closing_by_force_does_not():
    rig = TransactionRig()
    rig.send_added()
    rig.sender.force_close()
    rig.sender.run()
    assert not [s for s in rig.wire.all_sent if s.key == ApiKey.END_TXN]


def test_every_transition_that_is_not_listed_is_refused():
    for before, after in product(TransactionState, TransactionState):
        manager = TransactionManager("tx", 1)
        manager.state = before
        manager.error = manager.fatal_error = FatalError("it failed")
        if (before, after) in TRANSITIONS:
            manager._move(after, "a call")
            assert manager.state is after
        else:
            with pytest.raises((TransactionStateError, AbortableError, FatalError)):
                manager._move(after, "a call")
            assert manager.state is before


def answer_late(rig, begin, answer):
    """Begin something, wait in vain, have it answered, and begin it again."""
    with pytest.raises(DeliveryTimeoutError, match="call it again"):
        begin().wait(0)
    answer()
    again = begin()
    again.wait(0)
    return again


def test_who_calls_again_as_told_hears_what_was_answered_meanwhile():
    rig = TransactionRig()
    rig.send_added()
    rig.reply()

    def ended():
        rig.turns(2)
        assert rig.ended()

    commit = answer_late(rig, rig.manager.begin_commit, ended)
    with pytest.raises(TransactionStateError):  # it is told once
        rig.manager.begin_commit()
    rig.manager.begin()
    with pytest.raises(DeliveryTimeoutError):
        rig.manager.begin_abort().wait(0)
    rig.turns(2)  # nothing was written: no answer is needed
    rig.manager.begin_abort().wait(0)
    rig.manager.begin()
    assert rig.manager.begin_commit() is not commit


def test_the_end_of_a_transaction_that_nobody_waited_for_is_not_the_next_ones():
    rig = TransactionRig()
    first = rig.manager.begin_commit()
    rig.turns(2)
    rig.manager.begin()
    rig.send_added()
    assert rig.manager.begin_commit() is not first


# -- with a broker ---------------------------------------------------------------------


@pytest.fixture
def transactional(make_producer, topic_name):
    producer = make_producer(transactional_id=f"tx-{topic_name}")
    producer.init_transactions()
    return producer


def test_readers_see_what_was_committed_and_nothing_else(
    transactional, new_topic, read
):
    topic = new_topic(2)
    for name, end in (
        (b"committed", transactional.commit_transaction),
        (b"aborted", transactional.abort_transaction),
        (b"again", transactional.commit_transaction),
    ):
        transactional.begin_transaction()
        futures = [transactional.send(topic, name, partition=i % 2) for i in range(20)]
        transactional.flush(30)
        assert all(f.result(0) for f in futures)
        end()
    for records in read(topic).values():
        assert [r.value for r in records] == [b"committed"] * 10 + [b"again"] * 10


def test_a_second_producer_of_the_same_id_fences_the_first(
    transactional, make_producer, new_topic, topic_name, read
):
    topic = new_topic()
    transactional.begin_transaction()
    transactional.send(topic, b"lost").result(30)
    heir = make_producer(transactional_id=f"tx-{topic_name}")
    heir.init_transactions()
    future = transactional.send(topic, b"too late")
    assert isinstance(future.exception(30), ProducerFencedError)
    with pytest.raises(FatalError):
        transactional.commit_transaction()
    heir.begin_transaction()
    heir.send(topic, b"heir")
    heir.commit_transaction()
    assert [r.value for r in read(topic)[0]] == [b"heir"]


def test_a_record_that_waits_while_its_transaction_ends_is_not_of_the_next(
    transactional, new_topic, read, monkeypatch
):
    """As another thread ends it, or a coroutine that has given send() up."""
    topic = new_topic()
    take = transactional._pool.try_take
    transactional.begin_transaction()

    def meanwhile(grant):
        monkeypatch.undo()
        transactional.abort_transaction()
        transactional.begin_transaction()
        return take(grant)

    monkeypatch.setattr(transactional._pool, "try_take", meanwhile)
    free = transactional._pool.available_bytes
    with pytest.raises(TransactionStateError, match="another thread"):
        transactional.send(topic, b"of the aborted one")
    assert transactional._pool.available_bytes == free
    transactional.send(topic, b"next")
    transactional.commit_transaction()
    assert [r.value for r in read(topic)[0]] == [b"next"]


def test_a_record_that_was_late_is_not_put_to_those_of_the_next_transaction(
    make_producer, topic_name, new_topic, read, monkeypatch
):
    topic = new_topic()
    producer = make_producer(transactional_id=f"tx-{topic_name}", linger_ms=60_000)
    producer.init_transactions()
    producer.begin_transaction()
    choose = producer._choose

    def meanwhile(*arguments):
        monkeypatch.undo()
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send(topic, b"next")
        return choose(*arguments)

    monkeypatch.setattr(producer, "_choose", meanwhile)
    with pytest.raises(TransactionStateError, match="another thread"):
        producer.send(topic, b"of the aborted one")
    producer.commit_transaction()
    assert [r.value for r in read(topic)[0]] == [b"next"]


def test_a_record_that_fails_while_its_transaction_ends_does_not_fail_the_next(
    transactional, new_topic, read, monkeypatch
):
    topic = new_topic()
    transactional.begin_transaction()

    def exhausted(grant):
        monkeypatch.undo()
        transactional.abort_transaction()
        transactional.begin_transaction()
        raise BufferExhaustedError("no memory")

    monkeypatch.setattr(transactional._pool, "try_take", exhausted)
    future = transactional.send(topic, b"of the aborted one")
    assert isinstance(future.exception(0), BufferExhaustedError)
    transactional.send(topic, b"next")
    transactional.commit_transaction()
    assert [r.value for r in read(topic)[0]] == [b"next"]


def test_what_a_callback_sends_is_written_before_others_may_end_the_transaction(
    transactional, new_topic
):
    topic = new_topic()
    transactional.begin_transaction()
    more = []

    def send_more(metadata, error):
        more.append(transactional.send(topic, b"2"))

    transactional.send(topic, b"1", callback=send_more)
    transactional.prepare_transaction()
    assert more[0].result(0).offset == 1


def test_calls_in_the_wrong_order_say_what_to_do(make_producer):
    producer = make_producer(transactional_id="x")
    with pytest.raises(TransactionStateError, match="init_transactions"):
        producer.begin_transaction()
    with pytest.raises(TransactionStateError, match="begin_transaction"):
        producer.send("t", b"x")
    plain = make_producer()
    with pytest.raises(TransactionStateError, match=r"transactional\.id"):
        plain.init_transactions()
