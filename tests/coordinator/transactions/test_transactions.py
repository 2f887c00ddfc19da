"""The transaction coordinator: it answers as Kafka does, also after a death."""

from __future__ import annotations

from typing import Any

import pytest

from mpbroker.coordinator.transactions.transaction_metadata import TransactionState
from mpbroker.coordinator.transactions.transaction_records import transaction_key
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from mpbroker.protocol.messages.describe_transactions import DescribeTransactionsRequest
from mpbroker.protocol.messages.list_transactions import ListTransactionsRequest
from mpbroker.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from tests.coordinator.transactions.transaction_asks import (
    T0,
    T1,
    add,
    adding,
    end,
    ending,
    init,
    produce,
    started,
    state,
)
from tests.coordinator.transactions.transaction_rig import TransactionRig

S = TransactionState
E = ErrorCode


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig()


# -- producers -------------------------------------------------------------------------


def test_each_new_producer_of_an_id_has_the_next_epoch(rig):
    first = started(rig)
    assert first[1] == 0
    assert started(rig) == (first[0], 1)
    assert started(rig, "y")[0] != first[0]


@pytest.mark.parametrize(
    ("name", "timeout_ms", "producer", "code"),
    [
        ("", 1000, (-1, -1), E.INVALID_REQUEST),
        ("x", 0, (-1, -1), E.INVALID_TRANSACTION_TIMEOUT),
        ("x", 900_001, (-1, -1), E.INVALID_TRANSACTION_TIMEOUT),
        ("x", 1000, (5, -1), E.INVALID_REQUEST),
    ],
)
def test_a_producer_that_asks_for_nonsense_is_refused(
    rig, name, timeout_ms, producer, code
):
    answer = init(rig, name, timeout_ms=timeout_ms, producer=producer)
    assert (answer.error_code, answer.producer_id) == (code, -1)
    assert not rig.log


def test_a_producer_may_ask_again_for_the_epoch_whose_answer_it_missed(rig):
    producer = started(rig)
    assert init(rig, producer=producer).producer_epoch == 1
    rig.die()
    again = init(rig, producer=producer)
    assert (again.error_code, again.producer_epoch) == (0, 1)


@pytest.mark.parametrize(
    ("version", "code"), [(3, E.INVALID_PRODUCER_EPOCH), (4, E.PRODUCER_FENCED)]
)
def test_a_producer_of_old_gets_no_new_epoch(rig, version, code):
    producer = started(rig)
    started(rig)
    started(rig)
    assert init(rig, producer=producer, version=version).error_code == code


def test_an_id_whose_epochs_are_used_up_gets_a_new_producer_id(rig):
    producer = started(rig)
    rig.coordinator.get("x").producer_epoch = 0x7FFE
    answer = init(rig, producer=(producer[0], 0x7FFE))
    assert answer.producer_id != producer[0]
    assert answer.producer_epoch == 0
    # And if it missed that: the same once more.
    again = init(rig, producer=(producer[0], 0x7FFE))
    assert again.producer_id == answer.producer_id


# -- the life of a transaction ---------------------------------------------------------


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_is_decided_marked_and_complete(rig, commit):
    producer = started(rig)
    assert add(rig, producer, 0, 1) == [0, 0]
    assert rig.open.of(producer[0]) == {T0: 0, T1: 0}
    assert end(rig, producer, commit=commit).error_code == 0
    assert rig.markers == [(*T0, *producer, commit), (*T1, *producer, commit)]
    assert rig.open.of(producer[0]) == {}
    assert state(rig) is (S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT)


@pytest.mark.parametrize("version", [3, 5])
def test_nothing_is_answered_or_marked_before_the_decision_is_on_disk(rig, version):
    producer = started(rig)
    add(rig, producer, 0)
    rig.holds = True
    ended = rig.send("end_txn", ending(producer, True), version)
    assert ended.request is None
    assert rig.markers == []
    # What comes now is told from the next transaction's by its epoch, or not at all.
    assert bool(rig.open.of(producer[0])) is (version >= 5)
    rig.holds = False
    rig.collect()
    assert ended.request.error_code == 0
    assert len(rig.markers) == 1


@pytest.mark.parametrize("commit", [True, False])
def test_a_decision_outlives_its_coordinator_and_nothing_else_is_decided(rig, commit):
    producer = started(rig)
    add(rig, producer, 0, 1)
    rig.refused = {T0: E.KAFKA_STORAGE_ERROR, T1: E.KAFKA_STORAGE_ERROR}
    end(rig, producer, commit=commit)
    assert rig.markers == []
    rig.refused = {}
    rig.die()
    assert rig.markers == [(*T0, *producer, commit), (*T1, *producer, commit)]
    assert state(rig) is (S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT)


def test_a_transaction_that_was_open_is_open_after_a_death(rig):
    producer = started(rig)
    add(rig, producer, 0)
    rig.die()
    assert list(rig.coordinator.open_partitions()) == [(*producer, T0)]
    assert rig.markers == []
    assert end(rig, producer).error_code == 0


def test_a_transaction_that_begins_while_markers_are_written_waits_for_them(rig):
    producer = started(rig)
    add(rig, producer, 0)
    rig.refused = {T0: E.KAFKA_STORAGE_ERROR}
    end(rig, producer)
    waits = rig.send("add_partitions_to_txn", adding(producer, 1), 3)
    assert waits.request is None
    rig.advance(499)
    assert waits.request is None
    rig.advance(1)
    (topic,) = waits.request.results_by_topic_v3_and_below
    (row,) = topic.results_by_partition
    assert row.partition_error_code == E.CONCURRENT_TRANSACTIONS
    rig.advance(100)
    waits = rig.send("add_partitions_to_txn", adding(producer, 1), 3)
    rig.refused = {}
    rig.advance(400)  # the markers are tried again after a second
    (topic,) = waits.request.results_by_topic_v3_and_below
    assert topic.results_by_partition[0].partition_error_code == 0
    assert state(rig) is S.ONGOING


@pytest.mark.parametrize("code", [E.UNKNOWN_TOPIC_OR_PARTITION])
def test_a_deleted_partition_holds_no_transaction_up(rig, code):
    producer = started(rig)
    add(rig, producer, 0, 1)
    rig.refused = {T0: code}
    assert end(rig, producer).error_code == 0
    assert state(rig) is S.COMPLETE_COMMIT


@pytest.mark.parametrize(
    ("before", "commit", "code"),
    [
        (None, True, E.INVALID_TXN_STATE),
        (None, False, E.INVALID_TXN_STATE),
        (True, True, E.NONE),
        (True, False, E.INVALID_TXN_STATE),
        (False, True, E.INVALID_TXN_STATE),
        (False, False, E.NONE),
    ],
)
def test_an_end_that_comes_twice_is_the_same_end(rig, before, commit, code):
    producer = started(rig)
    if before is not None:
        add(rig, producer, 0)
        end(rig, producer, commit=before)
    assert end(rig, producer, commit=commit).error_code == code
    assert len(rig.markers) == (before is not None)


@pytest.mark.parametrize("version", [1, 3])
def test_a_zombie_is_fenced_in_every_request(rig, version):
    zombie = started(rig)
    started(rig)
    code = E.PRODUCER_FENCED if version >= 2 else E.INVALID_PRODUCER_EPOCH
    assert add(rig, zombie, 0, version=version) == [code]
    assert end(rig, zombie, version=version).error_code == code
    other = (zombie[0] + 1000, 0)
    assert add(rig, other, 0) == [E.INVALID_PRODUCER_ID_MAPPING]
    assert end(rig, other).error_code == E.INVALID_PRODUCER_ID_MAPPING
    assert add(rig, zombie, 0, name="nobody") == [E.INVALID_PRODUCER_ID_MAPPING]


def test_a_new_producer_aborts_the_open_transaction_of_the_old_one(rig):
    zombie = started(rig)
    add(rig, zombie, 0)
    successor = started(rig)
    assert rig.markers == [(*T0, zombie[0], 1, False)]
    assert successor == (zombie[0], 2)
    assert end(rig, zombie).error_code == E.PRODUCER_FENCED


def timed_out(rig, version):
    """Return a producer whose transaction was open for too long."""
    producer = started(rig)
    if version < 5:
        add(rig, producer, 0)
    else:
        rig.send("produce", produce(producer, 0), 12)
    rig.advance(60_000)
    assert rig.markers == []
    rig.advance(10_000)
    assert rig.markers == [(*T0, producer[0], 1, False)]
    return producer


def test_a_transaction_that_takes_too_long_is_aborted_and_its_producer_fenced(rig):
    producer = timed_out(rig, 3)
    for commit in (True, False):
        answer = end(rig, producer, commit=commit, version=3)
        assert answer.error_code == E.PRODUCER_FENCED


@pytest.mark.parametrize("dies", [False, True])
def test_a_transaction_that_has_timed_out_may_be_aborted_late_and_not_committed(
    rig, dies
):
    """Java's abortTransaction() does so, and its producer goes on (KIP-890)."""
    producer = timed_out(rig, 5)
    if dies:
        rig.die()
    answer = end(rig, producer, commit=True, version=5)
    assert answer.error_code == E.INVALID_TXN_STATE
    answer = end(rig, producer, commit=False, version=5)
    assert answer.error_code == E.NONE
    assert (answer.producer_id, answer.producer_epoch) == (producer[0], 1)
    producer = (answer.producer_id, answer.producer_epoch)
    rig.send("produce", produce(producer, 0), 12)
    assert end(rig, producer, version=5).error_code == E.NONE
    assert rig.markers[-1] == (*T0, producer[0], 2, True)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("version", [3, 5])
def test_a_producer_whose_transaction_has_timed_out_asks_for_its_new_epoch(
    rig, version, dies
):
    """KIP-588. A producer that was replaced since then is fenced all the same."""
    producer = timed_out(rig, version)
    if dies:
        rig.die()
    for _ in range(2):  # the answer may be lost
        answer = init(rig, producer=producer)
        assert answer.error_code == E.NONE
        assert (answer.producer_id, answer.producer_epoch) == (producer[0], 1)
    started(rig)
    assert init(rig, producer=producer).error_code == E.PRODUCER_FENCED
    assert init(rig, producer=(producer[0], 1)).error_code == E.PRODUCER_FENCED


@pytest.mark.parametrize("dies", [False, True])
def test_a_producer_with_the_last_epoch_gets_a_new_id_when_it_times_out(rig, dies):
    producer = started(rig)
    rig.coordinator.get("x").producer_epoch = 32_766
    last = (producer[0], 32_766)
    rig.send("produce", produce(last, 0), 12)
    rig.advance(70_000)
    assert rig.markers == [(*T0, producer[0], 32_767, False)]
    if dies:
        rig.die()
    answer = init(rig, producer=last)
    assert (answer.error_code, answer.producer_epoch) == (E.NONE, 0)
    assert answer.producer_id != producer[0]
    late = end(rig, last, commit=False, version=5)
    assert (late.producer_id, late.producer_epoch) == (answer.producer_id, 0)


def test_all_partitions_are_added_or_none(rig):
    producer = started(rig)
    codes = add(rig, producer, 0, 99)
    assert codes == [E.OPERATION_NOT_ATTEMPTED, E.UNKNOWN_TOPIC_OR_PARTITION]
    assert state(rig) is S.EMPTY
    assert rig.open.of(producer[0]) == {}


def test_a_partition_that_a_cluster_shares_is_in_no_transaction(rig):
    producer = started(rig)
    rig.topics.shared.add("t")
    assert add(rig, producer, 0) == [E.POLICY_VIOLATION]
    assert state(rig) is S.EMPTY
    # A handler refuses what is produced without asking.
    rig.send("produce", produce(producer, 0), 12)
    assert state(rig) is S.EMPTY
    assert rig.open.of(producer[0]) == {}


def test_more_open_partitions_than_there_is_room_for_have_to_wait(rig):
    producer = started(rig)
    rig.open.is_full = True
    assert add(rig, producer, 0) == [E.CONCURRENT_TRANSACTIONS]
    assert state(rig) is S.EMPTY


def test_an_unused_transactional_id_is_forgotten(rig):
    producer = started(rig)
    add(rig, producer, 0)
    end(rig, producer)
    started(rig, "busy")
    add(rig, started(rig, "busy"), 0, name="busy")
    rig.coordinator.get("busy").timeout_ms = 1 << 50
    rig.advance(rig.config.transactional_id_expiration_ms + 3_600_000)
    assert rig.coordinator.get("x") is None
    assert rig.coordinator.get("busy") is not None
    assert rig.log[-1] == (transaction_key("x"), None)
    rig.die()
    assert rig.coordinator.get("x") is None


# -- transaction version 2 -------------------------------------------------------------


def test_every_end_brings_a_new_epoch(rig):
    producer = started(rig)
    call = rig.send("produce", produce(producer, 0), 12)
    assert rig.given_back == [call]
    answer = end(rig, producer, version=5)
    assert (answer.error_code, answer.producer_epoch) == (0, 1)
    assert rig.markers == [(*T0, producer[0], 1, True)]
    # Whose answer was lost: it asks again, and is told the same.
    again = end(rig, producer, version=5)
    assert (again.error_code, again.producer_epoch) == (0, 1)
    assert end(rig, producer, commit=False, version=5).error_code == E.INVALID_TXN_STATE
    assert len(rig.markers) == 1


def test_an_abort_of_nothing_brings_a_new_epoch_and_a_commit_of_nothing_does_not(rig):
    producer = started(rig)
    assert end(rig, producer, version=5).error_code == E.INVALID_TXN_STATE
    answer = end(rig, producer, commit=False, version=5)
    assert (answer.error_code, answer.producer_epoch) == (0, 1)
    assert state(rig) is S.COMPLETE_ABORT
    assert rig.markers == []


def test_after_the_last_epoch_comes_a_new_producer_id(rig):
    producer = (started(rig)[0], 0x7FFE)
    rig.coordinator.get("x").producer_epoch = 0x7FFE
    rig.send("produce", produce(producer, 0), 12)
    answer = end(rig, producer, version=5)
    assert rig.markers == [(*T0, producer[0], 0x7FFF, True)]
    assert answer.producer_id not in (-1, producer[0])
    assert answer.producer_epoch == 0
    again = end(rig, producer, version=5)
    assert (again.error_code, again.producer_id) == (0, answer.producer_id)
    rig.die()
    successor = (answer.producer_id, 0)
    rig.send("produce", produce(successor, 0), 12)
    assert end(rig, successor, version=5).error_code == 0


@pytest.mark.parametrize(
    ("version", "code"), [(10, E.INVALID_TXN_STATE), (11, E.TRANSACTION_ABORTABLE)]
)
def test_a_produce_of_old_must_have_been_announced(rig, version, code):
    producer = started(rig)
    add(rig, producer, 0)
    rig.send("produce", produce(producer, 0), version)
    assert len(rig.given_back) == 1
    refused = rig.send("produce", produce(producer, 1), version)
    assert len(rig.given_back) == 1
    (topic,) = refused.request.responses
    assert [row.error_code for row in topic.partition_responses] == [code]


def test_a_produce_of_a_zombie_is_refused(rig):
    zombie = started(rig)
    started(rig)
    refused = rig.send("produce", produce(zombie, 0), 12)
    (topic,) = refused.request.responses
    assert topic.partition_responses[0].error_code == E.INVALID_PRODUCER_EPOCH
    assert rig.given_back == []


def test_a_produce_waits_until_its_transaction_is_on_disk(rig):
    producer = started(rig)
    rig.holds = True
    rig.send("produce", produce(producer, 0), 12)
    assert rig.given_back == []
    rig.holds = False
    rig.collect()
    assert len(rig.given_back) == 1


# -- what brokers and administrators ask -----------------------------------------------


@pytest.mark.parametrize(
    ("version", "code"), [(4, E.INVALID_TXN_STATE), (5, E.TRANSACTION_ABORTABLE)]
)
def test_partitions_of_several_transactions_are_verified_at_once(rig, version, code):
    first, second = started(rig), started(rig, "y")
    add(rig, first, 0)
    rows = [
        AddPartitionsToTxnTransaction(
            transactional_id=name,
            producer_id=producer[0],
            producer_epoch=producer[1],
            verify_only=True,
            topics=[AddPartitionsToTxnTopic(name="t", partitions=[0])],
        )
        for name, producer in (("x", first), ("y", second))
    ]
    request = AddPartitionsToTxnRequest(transactions=rows)
    answer = rig.ask("add_partitions_to_txn", request, version)
    assert [
        row.topic_results[0].results_by_partition[0].partition_error_code
        for row in answer.results_by_transaction
    ] == [0, code]


def test_transactions_are_described_and_listed(rig):
    producer = started(rig)
    add(rig, producer, 0, 1)
    idle = started(rig, "y")
    answer = rig.ask(
        "describe_transactions",
        # A name that comes again is answered once, or the answer could be very large.
        DescribeTransactionsRequest(transactional_ids=["x", "z", "", "x", "x", "z"]),
        0,
    )
    found, missing, empty = answer.transaction_states
    assert (found.transaction_state, found.producer_id) == ("Ongoing", producer[0])
    assert [(row.topic, row.partitions) for row in found.topics] == [("t", [0, 1])]
    assert missing.error_code == E.TRANSACTIONAL_ID_NOT_FOUND
    assert empty.error_code == E.INVALID_REQUEST

    def listed(**filters: Any) -> list[str]:
        request = ListTransactionsRequest(**filters)
        rows = rig.ask("list_transactions", request, 2).transaction_states
        return sorted(row.transactional_id for row in rows)

    assert listed() == ["x", "y"]
    assert listed(state_filters=["Ongoing"]) == ["x"]
    assert listed(producer_id_filters=[idle[0]]) == ["y"]
    assert listed(transactional_id_pattern="[yz]") == ["y"]
    assert listed(transactional_id_pattern="(?i)Y|xx*y") == ["y"]
    assert listed(transactional_id_pattern="") == ["x", "y"]
    rig.advance(5_000)
    assert listed(duration_filter=4_000, state_filters=["Ongoing"]) == ["x"]
    assert listed(duration_filter=6_000, state_filters=["Ongoing"]) == []
    bad = ListTransactionsRequest(transactional_id_pattern="(")
    code = rig.ask("list_transactions", bad, 2).error_code
    assert code == E.INVALID_REGULAR_EXPRESSION
    odd = ListTransactionsRequest(state_filters=["Odd"])
    assert rig.ask("list_transactions", odd, 0).unknown_state_filters == ["Odd"]


def test_markers_are_written_for_an_administrator(rig):
    rig.refused = {T1: E.INVALID_PRODUCER_EPOCH}
    marker = WritableTxnMarker(
        producer_id=9,
        producer_epoch=1,
        transaction_result=False,
        topics=[WritableTxnMarkerTopic(name="t", partition_indexes=[0, 1])],
        coordinator_epoch=0,
    )
    request = WriteTxnMarkersRequest(markers=[marker])
    (row,) = rig.ask("write_txn_markers", request, 1).markers
    codes = [each.error_code for each in row.topics[0].partitions]
    assert codes == [0, E.INVALID_PRODUCER_EPOCH]
    assert rig.markers == [(*T0, 9, 1, False)]


def test_a_log_that_cannot_be_written_makes_its_ids_unavailable(rig):
    producer = started(rig)
    add(rig, producer, 0)
    rig.coordinator.failed(rig.coordinator.partition_for("x"))
    assert add(rig, producer, 0) == [E.COORDINATOR_NOT_AVAILABLE]
    assert rig.open.of(producer[0]) == {}
    rig.coordinator.begin_loading([rig.coordinator.partition_for("x")])
    assert init(rig).error_code == E.COORDINATOR_LOAD_IN_PROGRESS


def test_no_producer_may_write_before_the_log_has_the_open_transaction(
    rig, monkeypatch
):
    producer = started(rig)
    before, opened = len(rig.log), []
    monkeypatch.setattr(rig.open, "open", lambda *_: opened.append(len(rig.log)))
    assert add(rig, producer, 0) == [E.NONE]
    assert opened == [before + 1]  # a coordinator that dies before leaves no entry
