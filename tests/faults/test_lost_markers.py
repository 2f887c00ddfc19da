"""A power cut takes the ends of transactions of which their clients were told.

Cut by hand: of a partition's log what had not to be on disk yet, the marker; of
__transaction_state all that came later than what had to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mpbroker.coordinator.transactions.transaction_metadata import TransactionState
from mpbroker.coordinator.transactions.transaction_records import (
    read_markers,
    read_transaction,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from mpbroker.protocol.messages.produce import ProduceResponse
from mpbroker.protocol.records.batch_header import (
    BatchHeader,
    iter_batches,
    set_base_offset,
)
from mpbroker.protocol.records.record_batch import iter_records
from tests.bench import wire
from tests.bench.transactions import RECORDS, RawProducer
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker
from tests.support.children import wait_until

S = TransactionState
TOPIC, NAME = "ends", "x"
LAST = RECORDS[0] - 1  # of partition 0, of one transaction


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "data", {"transaction.state.log.num.partitions": 1})
    broker.start()
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic(TOPIC, len(RECORDS))
    try:
        yield broker
    finally:
        broker.kill()


class Client(RawProducer):
    """A producer that survives its broker."""

    def __init__(self, broker: Broker, version: int) -> None:
        super().__init__(wire.Connection(address_of(broker)), TOPIC, NAME, version)

    def reconnect(self, broker: Broker) -> None:
        self.close()
        self._connection = wire.Connection(address_of(broker))

        def is_open() -> bool:
            with suppress(wire.AnswerError):
                return self._connection.end_offset(TOPIC, 0) > 0
            return False

        wait_until(is_open)  # behind an unclean stop it is closed at first

    def close(self) -> None:
        self._connection.close()

    def begin(self) -> None:
        """Begin a transaction: on disk when this returns."""
        self._add_partitions()

    def write(self) -> None:
        answer = self._ask(self._produce, self._records(), ProduceResponse)
        for topic in answer.responses:
            assert [row.error_code for row in topic.partition_responses] == [0, 0, 0]

    def end(self, *, commit: bool) -> None:
        request = EndTxnRequest(
            transactional_id=NAME,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            committed=commit,
        )
        answer = self._until_done(self._end, request, EndTxnResponse)
        if self._implicit:
            self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch
            self._sequences = [0] * len(RECORDS)


def log_of(broker: Broker, name: str) -> Path:
    return broker.data_dir / name / f"{0:020d}.log"


def batches(path: Path) -> list[tuple[int, BatchHeader, memoryview]]:
    """Each batch of a file, with the position behind it."""
    found, end = [], 0
    for header, batch in iter_batches(path.read_bytes()):
        end += len(batch)
        found.append((end, header, batch))
    return found


def cut_off_marker(path: Path) -> None:
    """Take all of a log but its first batch: the last is a marker."""
    first, *_, last = batches(path)
    assert last[1].is_control
    with open(path, "r+b") as file:
        file.truncate(first[0])


def states(path: Path) -> list[tuple[int, TransactionState, int]]:
    """Of each record of __transaction_state: the end of its batch, what it says."""
    found = []
    for end, _, batch in batches(path):
        for record in iter_records(batch):
            read = read_transaction(record.key, record.value)
            assert read is not None
            assert read[1] is not None
            value = read[1]
            state = S(value.transaction_status)
            found.append((end, state, len(read_markers(value.unsynced_markers))))
    return found


def cut_behind(path: Path, wanted: TransactionState) -> None:
    """Take what followed the first such record that names markers, or the first."""
    found = [(end, left) for end, state, left in states(path) if state is wanted]
    end = next((end for end, left in found if left), found[0][0])
    with open(path, "r+b") as file:
        file.truncate(end)


def repeat_last(path: Path, count: int) -> None:
    """Let a log say its last batch many times more: it is long to load."""
    _, header, batch = batches(path)[-1]
    data = bytearray(batch)
    with open(path, "ab") as file:
        for offset in range(header.base_offset + 1, header.base_offset + 1 + count):
            set_base_offset(memoryview(data), offset)
            file.write(data)


def kinds(broker: Broker) -> list[tuple[int, int | None]]:
    """Offset and kind of each batch of partition 0: None, or 1 for commit, 0 abort."""
    found: list[tuple[int, int | None]] = []
    for _, header, batch in batches(log_of(broker, f"{TOPIC}-0")):
        kind = None
        if header.is_control:
            (record,) = iter_records(batch)
            assert record.key is not None
            kind = record.key[3]
        found.append((header.base_offset, kind))
    return found


def wait_for_marker(broker: Broker, offset: int) -> None:
    with wire.Connection(address_of(broker)) as connection:

        def is_there() -> bool:
            # Behind an unclean stop it is refused at first.
            with suppress(wire.AnswerError):
                return connection.end_offset(TOPIC, 0) == offset + 1
            return False

        wait_until(is_there)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("commit", [True, False])
def test_a_marker_that_a_power_cut_took_is_written_by_the_next_start(
    broker, version, commit
):
    client = Client(broker, version)
    if version < 2:
        client.begin()
    client.write()
    client.end(commit=commit)
    wait_for_marker(broker, LAST + 1)
    state = log_of(broker, "__transaction_state-0")
    complete = S.COMPLETE_COMMIT if commit else S.COMPLETE_ABORT
    wait_until(lambda: complete in [each[1] for each in states(state)])
    broker.kill()
    cut_off_marker(log_of(broker, f"{TOPIC}-0"))
    cut_behind(state, complete)
    broker.start()
    wait_for_marker(broker, LAST + 1)
    ended = [(0, None), (LAST + 1, int(commit))]
    assert kinds(broker) == ended
    # And once: the same start again, and one after everything was there.
    broker.kill()
    broker.start()
    client.reconnect(broker)
    client.transact()
    wait_for_marker(broker, 2 * LAST + 3)
    assert kinds(broker) == [*ended, (LAST + 2, None), (2 * LAST + 3, 1)]
    client.close()
    broker.stop()


@pytest.mark.parametrize("last", [S.COMPLETE_COMMIT, S.PREPARE_COMMIT])
def test_who_has_read_behind_a_lost_marker_is_not_told_that_it_is_nowhere(broker, last):
    client = Client(broker, 1)
    client.transact()
    client.close()
    behind = LAST + 2
    wait_for_marker(broker, LAST + 1)
    broker.kill()
    cut_off_marker(log_of(broker, f"{TOPIC}-0"))
    state = log_of(broker, "__transaction_state-0")
    cut_behind(state, last)
    repeat_last(state, 200_000)
    broker.start()
    told = []
    with wire.Connection(address_of(broker)) as connection:
        while not told or told[-1] == ErrorCode.NOT_LEADER_OR_FOLLOWER:
            answer = connection.ask(wire.fetch(TOPIC, 0, behind, max_bytes=1000))
            told.append(wire.parse_fetch(answer).error_code)
    assert len(told) > 1
    assert told[-1] == ErrorCode.NONE
    broker.stop()


def test_what_the_next_transaction_writes_is_not_of_the_one_whose_marker_was_lost(
    broker,
):
    client = Client(broker, 1)
    client.begin()
    client.write()
    others = wire.record_batch([wire.RecordSpec(b"acks=1")] * 10)
    with wire.Connection(address_of(broker)) as connection:
        connection.ask(wire.produce(TOPIC, 0, others))
    client.end(commit=True)
    wait_for_marker(broker, LAST + 11)
    client.begin()  # while the marker need not be on disk
    state = log_of(broker, "__transaction_state-0")
    broker.kill()
    cut_off_marker(log_of(broker, f"{TOPIC}-0"))
    cut_behind(state, S.ONGOING)
    broker.start()
    client.reconnect(broker)
    client.write()
    # The record that named the marker has been replaced: a death changes nothing.
    broker.kill()
    broker.start()
    client.reconnect(broker)
    client.end(commit=False)
    wait_for_marker(broker, 2 * LAST + 3)
    assert kinds(broker) == [
        (0, None),
        (LAST + 1, 1),
        (LAST + 2, None),
        (2 * LAST + 3, 0),
    ]
    client.close()
    broker.stop()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("last", [S.COMPLETE_COMMIT, S.PREPARE_COMMIT])
@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_of_which_only_the_records_are_left_goes_on(
    broker, version, last, commit
):
    """It began where the last one was: that need not have been on disk."""
    client = Client(broker, version)
    client.transact()
    if version < 2:
        client.begin()
    client.write()
    state = log_of(broker, "__transaction_state-0")
    wait_until(lambda: states(state)[-1][1] is S.ONGOING)
    broker.kill()
    cut_behind(state, last)
    assert states(state)[-1][1] is last
    broker.start()
    client.reconnect(broker)
    client.write()
    client.end(commit=commit)
    end = 3 * (LAST + 1) + 1
    wait_for_marker(broker, end)
    assert kinds(broker) == [
        (0, None),
        (LAST + 1, 1),
        (LAST + 2, None),
        (2 * LAST + 3, None),
        (end, int(commit)),
    ]
    client.transact()
    client.close()
    broker.stop()


def test_markers_of_an_idle_producer_are_put_on_disk_and_forgotten(broker):
    client = Client(broker, 1)
    client.transact()
    state = log_of(broker, "__transaction_state-0")
    wait_until(lambda: states(state)[-1][1:] == (S.COMPLETE_COMMIT, 0))
    assert (S.COMPLETE_COMMIT, len(RECORDS)) in [each[1:] for each in states(state)]
    client.close()
    broker.stop()
