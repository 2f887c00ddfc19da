"""Offsets in transactions of a cluster: one coordinator asks, another one answers."""

from __future__ import annotations

from typing import Any

import pytest

from mpbroker.cluster.groups.transaction_exchange import (
    Answered,
    Asked,
    Ended,
    OffsetsEnd,
    Question,
)
from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.outbox import Call, Markers
from mpbroker.coordinator.shard_transactions import ShardTransactions
from mpbroker.coordinator.transactions.transaction_markers import MarkerWriter
from mpbroker.coordinator.transactions.transaction_metadata import TransactionState
from mpbroker.coordinator.transactions.transaction_offsets import TransactionOffsets
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from tests.coordinator.rig import no_sessions
from tests.coordinator.transactions.transaction_asks import (
    end,
    offsets_request,
    started,
)
from tests.coordinator.transactions.transaction_rig import TransactionRig

E = ErrorCode
S = TransactionState
SHARD = 1


class FakeStore:
    """A thread of the test's own, with the tables of the database."""

    def __init__(self) -> None:
        self.asked: list[Question] = []
        self.forgotten: list[object] = []
        self.answers: list[tuple[object, int]] = []
        self.ends: list[OffsetsEnd] = []

    def ask(self, question: Question) -> None:
        self.asked.append(question)

    def forget(self, question_id: object) -> None:
        self.forgotten.append(question_id)

    def answer(self, question_id: object, code: int) -> None:
        self.answers.append((question_id, code))

    def end_offsets(self, found: OffsetsEnd) -> None:
        self.ends.append(found)

    def coordinate(self, is_coordinator: bool) -> None:
        return


class ClusterRig(TransactionRig):
    """A node that coordinates a group, and transactions, and talks to itself."""

    def _start(self) -> None:
        super()._start()
        self.store = FakeStore()
        self.shards = ShardTransactions(
            self.store,  # type: ignore[arg-type]
            self.timers,
            lambda: True,
            lambda: self.now_ms,
        )
        context = CoordinatorContext(self.out, self.timers, self.topics, no_sessions())
        offsets = TransactionOffsets(
            self.groups, self.coordinator, context, self.shards
        )
        self._apis.insert(0, offsets)
        self.shards.on_ended = self.coordinator.look_again
        for each in self._apis:
            if hasattr(each, "is_ending"):
                each.is_ending = self.shards.is_ending

    def _mark(self, markers: Markers) -> None:
        results = {
            each: MarkerWriter._end(self.shards, markers, each[1])
            for each in markers.partitions
        }
        markers.done(results, self.now_ms, [])

    def commit(self, producer: tuple[int, int], version: int = 5) -> Call:
        request = offsets_request(producer)
        return self.send("txn_offset_commit", request, version)

    def ask_coordinator(self) -> None:
        """Bring the newest question to the transaction's coordinator."""
        self.shards.take(Asked([self.store.asked[-1]]))
        self.collect()

    def bring_answer(self) -> None:
        """Bring the newest answer to the group's coordinator."""
        number, code = self.store.answers[-1]
        self.shards.take(Answered(number, code))  # type: ignore[arg-type]
        self.collect()

    def has_written(self) -> None:
        """Let the shard have written the newest end."""
        found = self.store.ends[-1]
        self.groups.replay_end_of_transaction(
            found.shard, found.producer_id, commit=found.commit
        )
        self.shards.take(Ended(found.shard, found.producer_id))
        self.collect()

    def state(self) -> S:
        transaction = self.coordinator.get("x")
        assert transaction is not None
        return transaction.state


def code_of(call: Call) -> Any:
    if call.request is None:
        return None
    return call.request.topics[0].partitions[0].error_code


@pytest.fixture
def rig() -> ClusterRig:
    made = ClusterRig()
    assert made.groups.partition_for("g") == SHARD, "another group's name is needed"
    return made


def test_offsets_are_written_when_the_transaction_has_their_shard_on_disk(rig):
    producer = started(rig)
    call = rig.commit(producer)
    (question,) = rig.store.asked
    assert question[1:] == ("x", *producer, SHARD, True)
    rig.holds = True
    rig.ask_coordinator()
    assert rig.store.answers == []
    rig.holds = False
    rig.collect()
    assert rig.store.answers == [(question.id, 0)]
    assert (code_of(call), rig.offsets_log) == (None, [])
    rig.bring_answer()
    assert code_of(call) == E.NONE
    assert [row[:2] for row in rig.offsets_log] == [(SHARD, producer[0])]


def test_before_version_5_the_shard_must_have_been_added(rig):
    producer = started(rig)
    call = rig.commit(producer, version=4)
    assert not rig.store.asked[-1].adds
    rig.ask_coordinator()
    rig.bring_answer()
    assert code_of(call) == E.INVALID_TXN_STATE
    request = AddOffsetsToTxnRequest(
        transactional_id="x",
        group_id="g",
        producer_id=producer[0],
        producer_epoch=producer[1],
    )
    assert rig.ask("add_offsets_to_txn", request, 3).error_code == E.NONE
    call = rig.commit(producer, version=4)
    rig.holds = True  # what the answer rests on must not be lost with the power
    rig.ask_coordinator()
    assert len(rig.store.answers) == 1
    rig.holds = False
    rig.collect()
    rig.bring_answer()
    assert code_of(call) == E.NONE


def test_offsets_do_not_come_behind_the_end_of_their_transaction(rig):
    producer = started(rig)
    call = rig.commit(producer)
    rig.ask_coordinator()  # the answer is on its way
    end(rig, producer, commit=False, version=3)
    (found,) = rig.store.ends
    rig.shards.refuse(found)
    rig.collect()
    assert code_of(call) == E.COORDINATOR_LOAD_IN_PROGRESS
    rig.bring_answer()
    assert rig.offsets_log == []


def test_a_later_transaction_is_not_refused_for_the_end_of_an_earlier_one(rig):
    id_, epoch = started(rig)
    call = rig.commit((id_, epoch))
    rig.shards.refuse(OffsetsEnd(SHARD, id_, epoch - 1, True))
    rig.shards.refuse(OffsetsEnd(SHARD, id_ + 1, epoch, True))
    rig.shards.refuse(OffsetsEnd(SHARD + 1, id_, epoch, True))
    rig.ask_coordinator()
    rig.bring_answer()
    assert code_of(call) == E.NONE


def test_offsets_are_not_written_when_the_shard_was_lost_meanwhile(rig):
    """Another node may have written the end, although the shard has come back."""
    call = rig.commit(started(rig))
    rig.ask_coordinator()
    rig.shards.lost(SHARD)
    rig.collect()
    assert code_of(call) == E.NOT_COORDINATOR
    rig.bring_answer()
    assert rig.offsets_log == []


def test_a_coordinator_that_does_not_answer_is_not_waited_for_for_ever(rig):
    call = rig.commit(started(rig))
    rig.advance(4999)
    assert code_of(call) is None
    rig.advance(1)
    assert code_of(call) == E.COORDINATOR_NOT_AVAILABLE
    assert rig.store.forgotten == [rig.store.asked[0].id]


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_is_complete_when_its_shard_has_written_the_end(rig, commit):
    producer = started(rig)
    rig.commit(producer)
    rig.ask_coordinator()
    rig.bring_answer()
    end(rig, producer, commit=commit, version=3)
    prepared = S.PREPARE_COMMIT if commit else S.PREPARE_ABORT
    assert rig.state() is prepared
    rig.advance(10_000)  # it is looked at again and again, but told once
    assert rig.store.ends == [OffsetsEnd(SHARD, *producer, commit)]
    assert rig.state() is prepared
    # What would begin the next transaction waits, and is not taken for this one's.
    later = rig.commit(producer)
    rig.ask_coordinator()
    assert len(rig.store.answers) == 1
    rig.has_written()
    rig.bring_answer()
    assert code_of(later) == E.NONE
    assert rig.state() is S.ONGOING


def test_a_coordinator_that_comes_back_tells_of_its_decision_again(rig):
    producer = started(rig)
    rig.commit(producer)
    rig.ask_coordinator()
    end(rig, producer, version=5)
    assert len(rig.store.ends) == 1
    rig.die()
    assert rig.store.ends == [OffsetsEnd(SHARD, producer[0], producer[1] + 1, True)]
    rig.has_written()
    assert rig.state() is S.COMPLETE_COMMIT


def test_an_end_that_nobody_waits_for_any_more_is_forgotten(rig):
    """A later one is told, though it looks the same."""
    found = OffsetsEnd(SHARD, 1, 2, True)
    assert not rig.shards.end(found)
    assert rig.shards.is_ending(SHARD, 1)
    rig.shards.take(Ended(SHARD, 1))
    assert not rig.shards.is_ending(SHARD, 1)
    assert not rig.shards.end(found)
    assert rig.store.ends == [found, found]


def test_a_shard_gets_no_marker_of_an_administrator(rig):
    by_hand = Markers(1, 2, True, 0, (), lambda *_: None, is_by_hand=True)
    code = MarkerWriter._end(rig.shards, by_hand, SHARD)
    assert code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert rig.store.ends == []
