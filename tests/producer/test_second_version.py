"""Transactions of the second version (KIP-890 part 2).

The first part is answered by a script; the second runs with the broker under test.
"""

from __future__ import annotations

import pytest

from mpbroker.client.admin.admin_client import AdminClient
from mpbroker.client.cluster import TopicPartition
from mpbroker.producer import AbortableError, GroupMetadata
from mpbroker.producer.transactions import OffsetAndMetadata
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.end_txn import EndTxnResponse
from mpbroker.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from tests.producer.conftest import read_all
from tests.producer.rig import PRODUCER_ID
from tests.producer.test_transactions import TransactionRig


class SecondRig(TransactionRig):
    """A rig with a transaction of the second version."""

    def __init__(self, **settings: object) -> None:
        super().__init__(begin=False, **settings)
        self.manager.begin(2)

    def ended(self, code: int = 0) -> bool:
        """Answer EndTxn with the next epoch; return whether it was to commit."""
        (asked,) = self.wire.waiting(ApiKey.END_TXN)
        assert asked.version == 5
        answer = EndTxnResponse(
            error_code=code,
            producer_id=-1 if code else asked.request.producer_id,
            producer_epoch=-1 if code else asked.request.producer_epoch + 1,
        )
        self.wire.answer(answer, asked)
        self.turns(2)
        return asked.request.committed


def test_partitions_are_written_to_without_being_added():
    rig = SecondRig()
    rig.append(b"0")
    rig.turns()
    assert not rig.wire.waiting(ApiKey.ADD_PARTITIONS_TO_TXN)
    assert rig.produces[0].version == 12
    assert rig.header(rig.produces[0]).is_transactional
    rig.reply()


def test_a_commit_gives_the_next_epoch_and_sequences_begin_again():
    rig = SecondRig()
    for epoch in range(3):
        rig.append(b"x")
        rig.turns()
        header = rig.header(rig.produces[0])
        assert (header.producer_id, header.producer_epoch) == (PRODUCER_ID, epoch)
        assert header.base_sequence == 0
        rig.reply()
        operation = rig.manager.begin_commit()
        rig.turns(2)
        assert rig.ended()
        operation.wait(0)
        rig.manager.begin(2)
    assert len([s for s in rig.wire.all_sent if s.key == ApiKey.INIT_PRODUCER_ID]) == 1


def test_an_end_whose_answer_was_lost_is_asked_again_with_the_same_epoch():
    rig = SecondRig()
    rig.append(b"x")
    rig.turns()
    rig.reply()
    operation = rig.manager.begin_commit()
    rig.turns(2)
    (asked,) = rig.wire.waiting(ApiKey.END_TXN)
    rig.wire.hang_up(asked.node)
    for _ in range(4):
        rig.pass_ms(200)
        rig.turns(4)
    (again,) = rig.wire.waiting(ApiKey.END_TXN)
    assert again.request == asked.request
    assert rig.ended()
    operation.wait(0)


def test_a_lost_record_is_aborted_and_the_abort_raises_the_epoch():
    rig = SecondRig()
    future = rig.append(b"x")
    rig.turns()
    rig.reply(code=ErrorCode.INVALID_RECORD)
    assert future.exception(0) is not None
    with pytest.raises(AbortableError):
        rig.manager.begin_commit()
    operation = rig.manager.begin_abort()
    rig.turns(2)
    assert not rig.ended()
    operation.wait(0)  # without another InitProducerId
    rig.manager.begin(2)
    rig.append(b"y")
    rig.turns()
    header = rig.header(rig.produces[0])
    assert (header.producer_epoch, header.base_sequence) == (1, 0)


def test_what_was_not_sent_is_aborted_without_the_broker():
    rig = SecondRig(linger_ms=60_000)
    rig.append(b"x")
    rig.turns()
    operation = rig.manager.begin_abort()
    rig.turns(2)
    operation.wait(0)
    assert not [s for s in rig.wire.all_sent if s.key == ApiKey.END_TXN]


def test_offsets_go_to_the_groups_coordinator_at_once():
    rig = SecondRig()
    offsets = {TopicPartition("in", 1): OffsetAndMetadata(7)}
    operation = rig.manager.add_offsets(offsets, GroupMetadata("g"))
    rig.turns(4)
    assert not rig.wire.waiting(ApiKey.ADD_OFFSETS_TO_TXN)
    (asked,) = rig.wire.waiting(ApiKey.TXN_OFFSET_COMMIT)
    assert asked.version == 5
    part = TxnOffsetCommitResponsePartition(partition_index=1, error_code=0)
    topic = TxnOffsetCommitResponseTopic(name="in", partitions=[part])
    rig.wire.answer(TxnOffsetCommitResponse(topics=[topic]), asked)
    rig.turns(2)
    operation.wait(0)
    commit = rig.manager.begin_commit()
    rig.turns(2)
    assert rig.ended()
    commit.wait(0)


def test_the_level_of_a_feature_is_learnt_from_the_brokers():
    rig = TransactionRig()
    assert rig.client.feature_level("transaction.version") == 0
    rig.wire.features["transaction.version"] = 2
    rig.wire.hang_up(0)
    rig.turns()
    rig.pass_ms(200)
    rig.client.ready(0, rig.wire.now_ms)
    rig.turns(3)
    assert rig.client.feature_level("transaction.version") == 2


# -- with a broker ---------------------------------------------------------------------


def test_each_transaction_has_an_epoch_of_its_own(
    make_producer, new_topic, bootstrap, topic_name
):
    topic = new_topic(2)
    producer = make_producer(transactional_id=topic_name)
    producer.init_transactions()
    first = producer._transactions.epoch
    for value in (b"a", b"b", b"dropped", b"c"):
        producer.begin_transaction()
        producer.send(topic, value, partition=0)
        group = GroupMetadata(topic_name)
        producer.send_offsets_to_transaction({(topic, 1): value[0]}, group)
        if value == b"dropped":
            producer.flush()
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    assert producer._transactions.version == 2
    assert producer._transactions.epoch == first + 4
    found = [record.value for record in read_all(bootstrap, topic)[0]]
    assert found == [b"a", b"b", b"c"]
    with AdminClient(bootstrap_servers=bootstrap) as admin:
        assert admin.list_group_offsets(topic_name) == {(topic, 1): ord("c")}


def test_a_transaction_to_prepare_keeps_its_epoch(make_producer, new_topic, topic_name):
    topic = new_topic()
    producer = make_producer(transactional_id=topic_name)
    producer.init_transactions()
    first = producer._transactions.epoch
    producer.begin_transaction(to_prepare=True)
    producer.send(topic, b"x")
    producer.commit_transaction()
    assert producer._transactions.version == 1
    assert producer._transactions.epoch == first
