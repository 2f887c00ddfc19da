"""Appenders killed at any line: what was acknowledged is there, once, in its place."""

import os
import random
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from mpbroker.ipc.layout import (
    SLOT_INTENT,
    SLOT_PROGRESS,
    SLOT_PROGRESS_OFFSET,
    RowStatus,
    slot_row,
)
from mpbroker.metadata.log_config import LogConfig
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.log.partition_log import PartitionLog
from tests.storage.batches import Validated, batch, read_all
from tests.storage.conftest import OpenLog
from tests.storage.dump_checks import check_directory
from tests.storage.forks import kill_at_line
from tests.support.children import fork
from tests.support.memory import broker_memory
from tests.support.promises import promised

# Hundreds of processes each: 20 to 60 s and more, as the machine is loaded.
pytestmark = pytest.mark.timeout(600)

_ACK = struct.Struct("qq")
_CONFIG = {"segment_bytes": 1_200, "index_interval_bytes": 150}


class Ledger:
    """What children were told: a pipe that outlives them."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.acked: dict[int, int] = {}

    def acknowledge(self, number: int, offset: int) -> None:
        os.write(self._writer, _ACK.pack(number, offset))

    def collect(self) -> None:
        try:
            content = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return
        self.acked.update(_ACK.iter_unpack(content))

    @promised("the log holds every acknowledged record once")
    def check(self, log: PartitionLog) -> None:
        """Every offset once; what was acknowledged once, where it was said to be."""
        self.collect()
        records = read_all(log)
        assert [offset for offset, _ in records] == list(range(log.lookup.latest()))
        numbers = [int(value) for _, value in records]
        assert len(set(numbers)) == len(numbers)
        for number, offset in self.acked.items():
            assert numbers[offset] == number


def test_what_was_acknowledged_survives_appenders_killed_at_any_line(
    open_log: OpenLog,
) -> None:
    ledger = Ledger()
    log = open_log(**_CONFIG)
    row = log.row.index
    picker = random.Random(2)
    number = 0
    for _ in range(150):

        def append_until_death(first: int = number) -> None:
            mine = open_log(row=row, **_CONFIG)
            kill_at_line(picker.randrange(20, 2_500))
            for value in range(first, first + 50):
                found = mine.append(batch(b"%d" % value), now_ms=1)
                ledger.acknowledge(value, found.base_offset)

        assert fork(append_until_death) in (-signal.SIGKILL, 0)
        picker.random()
        number += 50
        ledger.check(log)
    assert len(ledger.acked) > 500
    # Counted with the commit: neither what the dead had only begun, nor anything twice.
    assert log.row.snapshot().bytes_in == log.view.size_in_bytes()
    # And as if the machine had been reset too: nothing is left but the files.
    ledger.check(open_log(**_CONFIG))
    check_directory(log.directory)


def test_a_copier_killed_at_any_line_leaves_the_log_to_its_successor(
    open_log: OpenLog,
) -> None:
    log = open_log(**_CONFIG)
    log.view.require_online()
    picker = random.Random(4)
    for _ in range(40):

        def copy_until_death() -> None:
            mine = open_log(row=log.row.index, **_CONFIG)
            mine.view.require_online()
            kill_at_line(picker.randrange(20, 5_000))
            for offset in range(mine.row.log_end_offset, 10**6):
                copied = batch(b"%d" % offset, producer=(7, 0, offset))
                assert mine.append_at(copied, offset, now_ms=1)

        assert fork(copy_until_death) == -signal.SIGKILL
        picker.random()
    end = log.row.log_end_offset
    assert end > 100
    assert log.row.snapshot().bytes_in == log.view.size_in_bytes()
    for each in (log, open_log(**_CONFIG)):
        assert read_all(each) == [(offset, b"%d" % offset) for offset in range(end)]
        last = each.producers.at(each.view.state()).entries[7].batches[-1]
        assert last.base_offset == last.last_sequence == end - 1
    check_directory(log.directory)


def test_two_processes_that_append_at_once_never_share_an_offset(
    open_log: OpenLog,
) -> None:
    ledger = Ledger()
    log = open_log(**_CONFIG)
    log.append(batch(b"0"), now_ms=1)

    def append(first: int) -> Callable[[], None]:
        def work() -> None:
            mine = open_log(row=log.row.index, **_CONFIG)
            for value in range(first, first + 300):
                found = mine.append(batch(b"%d" % value), now_ms=1)
                ledger.acknowledge(value, found.base_offset)

        return work

    other = os.fork()
    if other == 0:
        os._exit(fork(append(1_000)))
    assert fork(append(2_000)) == 0
    assert os.waitpid(other, 0)[1] == 0
    ledger.check(log)
    assert len(ledger.acked) == 600


def test_two_idempotent_producers_over_two_processes_are_never_out_of_order(
    open_log: OpenLog,
) -> None:
    log = open_log(**_CONFIG)

    def append(mine: PartitionLog, producer: int, sequence: int) -> int:
        content = b"%d" % (producer * 1_000 + sequence)
        sent = batch(content, producer=(producer, 0, sequence))
        return mine.append(sent, now_ms=1).base_offset

    for sequence in range(0, 60, 2):
        # Each producer's batches alternate between two processes.
        append(log, 1, sequence)

        def in_another_process(sequence: int = sequence) -> None:
            mine = open_log(row=log.row.index, **_CONFIG)
            append(mine, 1, sequence + 1)
            append(mine, 2, sequence)
            append(mine, 2, sequence + 1)

        assert fork(in_another_process) == 0
    values = [int(value) for _, value in read_all(log)]
    for producer in (1, 2):
        mine = [v - producer * 1_000 for v in values if v // 1_000 == producer]
        assert mine == list(range(60))


def test_an_appender_killed_between_the_batch_and_the_commit_appended_nothing(
    open_log: OpenLog,
) -> None:
    log = open_log(**_CONFIG)
    log.append(batch(b"0"), now_ms=1)

    def die_in_the_write() -> None:
        mine = open_log(row=log.row.index, **_CONFIG)
        real = os.pwrite

        def write_and_die(fd: int, content: bytes, at: int) -> int:
            real(fd, content, at)
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        os.pwrite = write_and_die  # type: ignore[assignment]
        mine.append(batch(b"lost" * 20), now_ms=1)

    assert fork(die_in_the_write) == -signal.SIGKILL
    assert log.lookup.latest() == 1
    assert log.append(batch(b"1"), now_ms=1).base_offset == 1
    assert read_all(log) == [(0, b"0"), (1, b"1")]
    # The dead writer's longer batch must not be found behind the shorter one.
    assert read_all(open_log(**_CONFIG)) == [(0, b"0"), (1, b"1")]


def test_a_roll_that_died_before_its_commit_is_done_again(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=200)
    log.append(batch(b"a" * 60), now_ms=1)

    def die_in_the_roll() -> None:
        mine = open_log(row=log.row.index, segment_bytes=200)
        real = LogSegment.create

        def create_and_die(segment: LogSegment) -> None:
            real(segment)
            os.kill(os.getpid(), signal.SIGKILL)

        LogSegment.create = create_and_die  # type: ignore[method-assign]
        mine.append(batch(b"b" * 60), now_ms=1)

    assert fork(die_in_the_roll) == -signal.SIGKILL
    assert read_all(log) == [(0, b"a" * 60)]
    assert log.append(batch(b"c" * 60), now_ms=1).base_offset == 1
    assert read_all(log) == [(0, b"a" * 60), (1, b"c" * 60)]


def test_a_loader_killed_at_any_line_leaves_the_work_to_the_next(
    open_log: OpenLog,
) -> None:
    log = open_log(**_CONFIG)
    for number in range(40):
        log.append(batch(b"%d" % number), now_ms=1)
    state = log.view.state()
    path = log.reader.read(39, 1, min_one_batch=True).segment_path
    picker = random.Random(5)
    died = 0
    for _ in range(40):
        with open(path, "ab") as torn:
            torn.write(b"torn" * 5)
        again = open_log(**_CONFIG)

        def load(row: int = again.row.index) -> None:
            mine = open_log(row=row, **_CONFIG)
            kill_at_line(picker.randrange(1, 1_500))
            mine.view.require_online()

        died += fork(load) == -signal.SIGKILL
        picker.random()
        assert again.row.status in (RowStatus.UNLOADED, RowStatus.ONLINE)
        assert again.lookup.latest() == 40
        assert again.view.state().active_size == state.active_size
        assert len(read_all(again)) == 40
    assert died > 10


def test_an_idempotent_producer_that_resends_after_every_death_is_stored_once(
    open_log: OpenLog,
) -> None:
    log = open_log(**_CONFIG)
    picker = random.Random(7)
    died = 0
    for sequence in range(60):
        sent = batch(b"%d" % sequence, producer=(3, 0, sequence))

        def send(sent: Validated = sent) -> None:
            mine = open_log(row=log.row.index, **_CONFIG)
            mine.lookup.latest()
            mine.sync.take_snapshot()
            kill_at_line(picker.randrange(20, 200))
            mine.append(sent, now_ms=1)

        for _ in range(3):
            died += fork(send) == -signal.SIGKILL
            picker.random()
        # All answers may have been lost: what is stored is found again.
        assert log.append(sent, now_ms=1).base_offset == sequence
    assert died > 20
    assert read_all(log) == [(n, b"%d" % n) for n in range(60)]


def test_an_append_is_noted_in_its_request_if_and_only_if_it_is_in_the_log(
    tmp_path: Path,
) -> None:
    slot, ordinal = 5, 2
    with broker_memory() as memory:
        memory.table.initialise_row(0)
        row, slots = memory.table.row(0), memory.control.words
        where = memory.arena_layout.block(slot) + 13 * 1024
        slots[slot_row(slot) + SLOT_PROGRESS_OFFSET] = where
        config = LogConfig({"segment.bytes": 400})
        log = PartitionLog(str(tmp_path), row, config)
        log.append(batch(b"first"), now_ms=1)
        picker = random.Random(8)
        outcomes = set()
        for _ in range(80):
            before = log.lookup.latest()
            slots[slot_row(slot) + SLOT_PROGRESS] = 0
            slots[slot_row(slot) + SLOT_INTENT] = 0

            def append() -> None:
                mine = PartitionLog(str(tmp_path), row, config)
                kill_at_line(picker.randrange(40, 320))
                mine.append(batch(b"a" * 60), slot=slot, ordinal=ordinal, now_ms=1)

            fork(append)
            picker.random()
            row.settle()
            appended = log.lookup.latest() == before + 1
            assert slots[slot_row(slot) + SLOT_PROGRESS] == (
                ordinal + 1 if appended else 0
            )
            if appended:
                assert memory.arena.words[where // 8 + ordinal] == before
            outcomes.add(appended)
        assert outcomes == {True, False}
        # One that fails and lives leaves nothing behind either.
        slots[slot_row(slot) + SLOT_PROGRESS] = 0
        log.view.config = LogConfig({"segment.bytes": 100})
        with pytest.raises(ApiError):
            log.append(batch(b"a" * 60), slot=slot, ordinal=ordinal, now_ms=1)
        assert slots[slot_row(slot) + SLOT_PROGRESS] == 0
        log.close()
