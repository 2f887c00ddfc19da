"""The coordinator dies at any line of an EndTxn, and its client asks once more.

Also: what a lost log leaves, and what is deleted while a transaction would change it.
"""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from mpbroker.coordinator.groups.group_records import offset_key
from mpbroker.coordinator.outbox import Call, Markers
from mpbroker.coordinator.transactions.open_transactions import SharedOpenTransactions
from mpbroker.coordinator.transactions.transaction_metadata import (
    MAX_EPOCH,
    TransactionState,
)
from mpbroker.coordinator.transactions.transaction_records import (
    read_markers,
    read_transaction,
)
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.delete_groups import DeleteGroupsRequest
from mpbroker.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from tests.coordinator.transactions.transaction_asks import (
    OFFSETS,
    T0,
    T1,
    add,
    adding,
    commit_offsets,
    end,
    ending,
    position,
    started,
    state,
)
from tests.coordinator.transactions.transaction_rig import PARTITIONS, TransactionRig

S = TransactionState
E = ErrorCode


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig()


class Died(BaseException):
    """The coordinator was killed; nothing of ours may catch it."""


class DyingAt:
    """Dies when so many lines of the coordinator have been executed."""

    def __init__(self, lines: int) -> None:
        self._left = lines

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_exc: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if "/mpbroker/coordinator/" in frame.f_code.co_filename:
            return self._line
        return None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._left -= 1
            if not self._left:
                raise Died
        return self._line


def is_next(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Say whether a producer may go on so after its transaction has ended."""
    if before[1] < MAX_EPOCH - 1:
        return after == (before[0], before[1] + 1)
    return after[0] > before[0] and after[1] == 0


@pytest.mark.parametrize(
    ("version", "commit", "epoch"),
    [(3, True, 0), (5, True, 0), (5, False, 0), (5, True, MAX_EPOCH - 1)],
)
def test_an_end_is_answered_alike_whichever_line_its_coordinator_died_at(
    version, commit, epoch
):
    """The same request again, until a coordinator has lived through it."""
    lines = 0
    while True:
        lines += 1
        rig = TransactionRig()
        producer_id, _ = started(rig)
        transaction = rig.coordinator.get("x")
        transaction.producer_epoch = epoch
        producer = producer_id, epoch
        add(rig, producer, 0, 1)
        request = ending(producer, commit)
        try:
            with DyingAt(lines):
                rig.send("end_txn", request, version)
            lived = True
        except Died:
            lived = False
        rig.die()
        answer = rig.ask("end_txn", request, version)
        assert answer.error_code == 0, lines
        after = producer
        if version >= 5:
            after = answer.producer_id, answer.producer_epoch
            assert is_next(producer, after), lines
        assert state(rig) is (S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT)
        assert {each[:2] for each in rig.markers} == {T0, T1}
        assert {each[-1] for each in rig.markers} == {commit}
        assert not rig.open.of(producer_id)
        # And so it goes on.
        if version < 5:
            assert add(rig, after, 0) == [0]
        else:
            assert commit_offsets(rig, after, 5) == 0
        assert end(rig, after, version=version).error_code == 0
        if lived:
            break
    assert lines > 100  # or nobody died


class SharingRig(TransactionRig):
    """Its table of open transactions outlives it, as the others see it."""

    def __init__(self) -> None:
        self.segment = TransactionTable.create_segment()
        self.table = TransactionTable(self.segment)
        super().__init__()

    def _open_transactions(self) -> SharedOpenTransactions:
        topic = SimpleNamespace(partitions=[10, 11, 12, 13])
        registry: Any = SimpleNamespace(topic={"t": topic}.get)
        return SharedOpenTransactions(self.table, registry)

    def _mark(self, markers: Markers) -> None:
        producer = markers.producer_id, markers.producer_epoch
        assert not any(self.table.contains(*producer, row) for row in range(10, 14))
        super()._mark(markers)


def test_a_transaction_decided_before_a_death_takes_no_record_behind_its_markers():
    """Though other partitions of the log are still to be loaded."""
    rig = SharingRig()
    producer = started(rig)
    assert add(rig, producer, 0, 1) == [0, 0]
    assert rig.table.contains(*producer, 11)
    call = Call(5, "c", "/host")
    rig.coordinator.end_txn(call, ending(producer, True), rig.now_ms)
    rig._append()  # and no more: it is killed before it closes the partitions
    assert state(rig) is S.PREPARE_COMMIT
    assert rig.table.contains(*producer, 11)
    rig.die()
    assert {each[:2] for each in rig.markers} == {T0, T1}
    assert not rig.table.contains(*producer, 10)
    assert not rig.table.contains(*producer, 11)


def test_the_end_of_loading_opens_no_partition_whose_record_is_not_appended():
    """Requests are served meanwhile; and it may be killed before it appends."""
    rig = SharingRig()
    producer = started(rig)
    assert add(rig, producer, 0) == [0]
    rig.die()
    call = Call(3, "c", "/host")
    apis = next(each for each in rig._apis if hasattr(each, "add_partitions_to_txn"))
    apis.add_partitions_to_txn(call, adding(producer, 1), rig.now_ms)
    rig.table.open(99, 0, 12)  # which no log knows
    rig.open.keep_only(rig.coordinator.open_partitions())
    assert rig.table.contains(*producer, 10)
    assert not rig.table.contains(*producer, 11)
    assert not rig.table.contains(99, 0, 12)
    rig.collect()
    assert rig.table.contains(*producer, 11)


def test_an_end_whose_opposite_was_decided_is_refused_after_a_death_too(rig):
    producer = started(rig)
    add(rig, producer, 0)
    end(rig, producer, commit=True, version=5)
    rig.die()
    assert end(rig, producer, commit=False, version=5).error_code == E.INVALID_TXN_STATE
    assert end(rig, producer, commit=True, version=5).error_code == 0


def test_an_abort_without_a_transaction_is_refused_to_old_clients(rig):
    """As by Kafka: it cannot know that this is not about the commit before.

    librdkafka asks for this when its AddPartitionsToTxn did not get through while the
    broker was away, and takes the answer for fatal.
    """
    producer = started(rig)
    assert end(rig, producer, commit=False).error_code == E.INVALID_TXN_STATE
    add(rig, producer, 0)
    assert end(rig, producer).error_code == 0
    assert end(rig, producer, commit=False).error_code == E.INVALID_TXN_STATE


def test_a_lost_log_is_loaded_again_and_its_open_transactions_go_on(rig):
    producer = started(rig)
    add(rig, producer, 0)
    partition = rig.coordinator.partition_for("x")
    rig.coordinator.failed(partition)
    rig.collect()
    assert not rig.open.of(producer[0])
    assert add(rig, producer, 0) == [E.COORDINATOR_NOT_AVAILABLE]
    rig.load(partition)
    assert rig.open.of(producer[0]) == {T0: producer[1]}
    assert add(rig, producer, 1) == [0]
    assert end(rig, producer).error_code == 0
    assert {each[:2] for each in rig.markers} == {T0, T1}


def test_a_partly_loaded_transaction_does_not_time_out_or_expire(rig):
    """It was open once, and long ago: the rest of the log says what became of it."""
    producer = started(rig)
    add(rig, producer, 0)
    opened = len(rig.log)
    assert end(rig, producer).error_code == 0
    written, markers = list(rig.log), list(rig.markers)
    for half in (1, opened, len(written)):
        rig.forget()
        rig.replay(written[:half])
        rig.advance(rig.config.transactional_id_expiration_ms + 3_600_000)
        assert rig.log == written
        rig.replay(written[half:])
        rig.loaded()
        assert (rig.log, rig.markers) == (written, markers)
        assert state(rig) is S.COMPLETE_COMMIT


def test_a_decision_whose_log_was_lost_is_carried_out_when_it_is_loaded_again(rig):
    producer = started(rig)
    add(rig, producer, 0)
    rig.refused = {T0: E.KAFKA_STORAGE_ERROR}
    end(rig, producer)
    waits = rig.send("add_partitions_to_txn", adding(producer, 1), 3)
    partition = rig.coordinator.partition_for("x")
    rig.coordinator.failed(partition)
    rig.collect()
    assert waits.request is not None
    rig.refused = {}
    rig.load(partition)
    assert rig.markers == [(*T0, *producer, True)]
    assert state(rig) is S.COMPLETE_COMMIT


# -- deleted, and then committed -----------------------------------------------------


def delete_group(rig: TransactionRig) -> int:
    request = DeleteGroupsRequest(groups_names=["g"])
    (row,) = rig.ask("delete_groups", request, 2).results
    code: int = row.error_code
    return code


def delete_offset(rig: TransactionRig) -> int:
    partition = OffsetDeleteRequestPartition(partition_index=0)
    topic = OffsetDeleteRequestTopic(name="t", partitions=[partition])
    request = OffsetDeleteRequest(group_id="g", topics=[topic])
    code: int = rig.ask("offset_delete", request, 0).error_code
    return code


def delete_topic(rig: TransactionRig) -> int:
    rig.groups.topic_deleted("t")
    rig.collect()
    return 0


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("delete", [delete_group, delete_offset, delete_topic])
def test_a_deleted_offset_does_not_come_back_with_the_end_of_a_transaction(
    rig, delete, dies
):
    producer = started(rig)
    assert commit_offsets(rig, producer, 5) == 0
    assert position(rig)[0] == E.UNSTABLE_OFFSET_COMMIT
    assert delete(rig) == 0
    assert position(rig) == (0, -1)
    number, _, key, value = rig.offsets_log[-2 if delete is delete_group else -1]
    assert (key, value) == (offset_key("g", "t", 0), None)
    assert number == rig.groups.partition_for("g") < PARTITIONS
    if dies:
        rig.die()
        assert position(rig) == (0, -1)
    assert end(rig, producer, version=5).error_code == 0
    assert [each[0] for each in rig.markers] == [OFFSETS]
    assert position(rig) == (0, -1)


def test_a_topic_that_goes_with_its_coordinator_takes_pending_offsets_along(rig):
    producer = started(rig)
    assert commit_offsets(rig, producer, 5) == 0
    count = rig.topics.counts.pop("t")
    rig.die()
    rig.topics.counts["t"] = count  # another one of this name
    assert position(rig) == (0, -1)
    rig.die()
    assert end(rig, producer, version=5).error_code == 0
    assert position(rig) == (0, -1)


# -- markers that need not be on disk --------------------------------------------------


def named(rig: TransactionRig) -> list[tuple[TransactionState, list[int]]]:
    """What each record of the log says: the state, and the offsets of its markers."""
    found = []
    for key, value in rig.log:
        read = read_transaction(key, value)
        assert read is not None
        assert read[1] is not None
        offsets = [marker.offset for marker in read_markers(read[1].unsynced_markers)]
        found.append((TransactionState(read[1].transaction_status), offsets))
    return found


def test_records_name_the_markers_that_need_not_be_on_disk(rig):
    producer = started(rig)
    add(rig, producer, 0, 1)
    assert end(rig, producer).error_code == 0
    add(rig, producer, 0)
    assert named(rig)[1:] == [
        (S.ONGOING, []),
        (S.PREPARE_COMMIT, []),
        (S.COMPLETE_COMMIT, [1, 2]),
        (S.ONGOING, [1, 2]),
    ]
    unsynced = rig.coordinator.get("x").unsynced
    rig.die()
    assert rig.coordinator.get("x").unsynced == unsynced
    rig.on_disk.add(unsynced[0])  # by the sync of what was written behind it
    assert end(rig, producer, commit=False).error_code == 0
    assert named(rig)[-2:] == [(S.PREPARE_ABORT, [2]), (S.COMPLETE_ABORT, [2, 3])]


def test_markers_of_a_producer_that_is_idle_are_put_on_disk(rig):
    producer = started(rig)
    add(rig, producer, 0)
    end(rig, producer)
    rig.advance(500)
    add(rig, producer, 1)
    end(rig, producer)
    rig.advance(500)
    assert not rig.on_disk  # it may go on
    assert named(rig)[-1] == (S.COMPLETE_COMMIT, [1, 2])
    rig.advance(5000)
    assert len(rig.on_disk) == 2
    assert named(rig)[-1] == (S.COMPLETE_COMMIT, [])
    count = len(rig.log)
    rig.advance(5000)
    assert len(rig.log) == count


def test_markers_that_a_dead_coordinator_has_left_are_put_on_disk(rig):
    producer = started(rig)
    add(rig, producer, 0)
    end(rig, producer)
    rig.die()
    assert rig.coordinator.get("x").unsynced
    rig.advance(5000)
    assert len(rig.on_disk) == 1
    assert named(rig)[-1] == (S.COMPLETE_COMMIT, [])


def test_an_id_does_not_expire_while_its_record_alone_knows_of_markers():
    rig = TransactionRig(
        transactional_id_expiration_ms=100,
        transaction_remove_expired_transaction_cleanup_interval_ms=300,
    )
    producer = started(rig)
    add(rig, producer, 0)
    end(rig, producer)
    rig.advance(900)
    assert rig.log[-1][1] is not None
    assert rig.coordinator.get("x") is not None
    rig.advance(2000)
    assert len(rig.on_disk) == 1
    assert rig.log[-1][1] is None
    assert rig.coordinator.get("x") is None


def test_very_many_markers_are_waited_for(rig):
    producer = started(rig)
    for number in range(100):
        add(rig, producer, number % 3)
        end(rig, producer)
    most = max(len(offsets) for _, offsets in named(rig))
    assert most == 32
    assert len(rig.on_disk) > 60


def test_markers_are_waited_for_without_partition_verification():
    rig = TransactionRig(transaction_partition_verification_enable=False)
    producer = started(rig)
    add(rig, producer, 0, 1)
    end(rig, producer)
    assert len(rig.on_disk) == 2
    assert named(rig)[-1] == (S.COMPLETE_COMMIT, [])
