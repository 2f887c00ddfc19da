"""The end of a transaction in a partition: once, and nothing of it behind it."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.record_batch import iter_records
from mpbroker.storage.cleaning.compaction import Compaction
from mpbroker.storage.cleaning.log_cleaner import assess
from mpbroker.storage.files.txn_index import (
    ENTRY_BYTES,
    AbortedTransaction,
    append_aborted,
)
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.log.log_reader import LogReader
from mpbroker.storage.log.partition_log import PartitionLog
from tests.storage.batches import Validated, batch, batches_in, validated
from tests.storage.conftest import OpenLog
from tests.storage.forks import kill_at_line
from tests.support import children

PRODUCER = 7
# A marker's append runs some 300 lines; each of these kills at another of them.
STEPS = range(1, 420, 13)


def marker(
    producer: int = PRODUCER, *, epoch: int = 0, commit: bool = True
) -> Validated:
    end = EndTransactionMarker(commit, 0)
    return validated(build_end_transaction_marker(producer, epoch, end, 1_000))


def records(epoch: int = 0, sequence: int = 0) -> Validated:
    return batch(b"t", producer=(PRODUCER, epoch, sequence), transactional=True)


def test_a_marker_that_ends_nothing_is_not_appended(open_log: OpenLog) -> None:
    log = open_log()
    log.append(records(), now_ms=1)
    first = log.append(marker(), now_ms=1)
    again = log.append(marker(), now_ms=1)
    assert (first.duplicate, again.duplicate) == (False, True)
    assert log.lookup.latest() == again.last_offset + 1 == 2


@pytest.mark.parametrize("epoch", [0, 1])
def test_the_next_transaction_has_an_end_of_its_own(
    open_log: OpenLog, epoch: int
) -> None:
    log = open_log()
    log.append(records(), now_ms=1)
    log.append(marker(epoch=epoch), now_ms=1)
    log.append(records(epoch, 1 - epoch), now_ms=1)
    assert log.lookup.last_stable_offset() == 2
    assert not log.append(marker(epoch=2 * epoch), now_ms=1).duplicate
    assert log.lookup.last_stable_offset() == log.lookup.latest() == 4


def test_a_partition_without_records_takes_a_marker_that_fences(
    open_log: OpenLog,
) -> None:
    log = open_log()
    assert not log.append(marker(epoch=3), now_ms=1).duplicate
    with pytest.raises(ApiError) as refused:
        log.append(records(epoch=2), now_ms=1)
    assert refused.value.error_code == ErrorCode.INVALID_PRODUCER_EPOCH


def test_a_batch_that_comes_after_its_transaction_is_refused(open_log: OpenLog) -> None:
    log, open_ones = open_log(), {(PRODUCER, 0)}

    def is_open(producer: int, epoch: int, row: int) -> bool:
        return (producer, epoch) in open_ones

    log.append(records(), now_ms=1, is_open=is_open)
    open_ones.clear()  # as the coordinator does before it writes the marker
    # What has begun goes on until the marker comes.
    log.append(records(sequence=1), now_ms=1, is_open=is_open)
    log.append(marker(), now_ms=1)
    with pytest.raises(ApiError) as refused:
        log.append(records(sequence=2), now_ms=1, is_open=is_open)
    assert refused.value.error_code == ErrorCode.INVALID_TXN_STATE
    assert log.lookup.last_stable_offset() == log.lookup.latest() == 3
    # A resent one is what it was, whatever has happened since.
    again = log.append(records(sequence=1), now_ms=1, is_open=is_open)
    assert again.duplicate


def test_an_abort_is_in_the_index_before_its_marker_can_be_found_by_the_next_start(
    open_log: OpenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    log.append(records(), now_ms=1)
    end = marker(commit=False)
    write = os.pwrite

    def write_and_die(fd: int, data: memoryview, position: int) -> int:
        written = write(fd, data, position)
        if len(data) == len(end.data):
            # This is all that there is if the whole broker is killed here.
            shutil.copytree(tmp_path / "t-0", tmp_path / "killed-0")
        return written

    monkeypatch.setattr(os, "pwrite", write_and_die)
    log.append(end, now_ms=1)
    monkeypatch.undo()
    again = open_log(name="killed-0")
    assert again.lookup.last_stable_offset() == again.lookup.latest() == 2
    found = again.reader.read(0, 1_000, min_one_batch=True, read_committed=True)
    assert found.aborted_transactions == [(PRODUCER, 0)]


def test_an_index_entry_whose_marker_was_never_written_is_no_harm(
    open_log: OpenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    log.append(records(), now_ms=1)
    end = marker(commit=False)

    write = os.pwrite

    def die_and_write(fd: int, data: memoryview, position: int) -> int:
        if len(data) == len(end.data):
            shutil.copytree(tmp_path / "t-0", tmp_path / "killed-0")
        return write(fd, data, position)

    monkeypatch.setattr(os, "pwrite", die_and_write)
    log.append(end, now_ms=1)
    monkeypatch.undo()
    again = open_log(name="killed-0")
    assert again.lookup.last_stable_offset() == 0
    again.append(batch(b"another's"), now_ms=1)
    again.append(marker(commit=False), now_ms=1)
    assert again.lookup.last_stable_offset() == again.lookup.latest() == 3
    for offset in (0, 1, 2):
        found = again.reader.read(
            offset, 1_000, min_one_batch=True, read_committed=True
        )
        assert found.aborted_transactions is not None
        assert set(found.aborted_transactions) == {(PRODUCER, 0)}


def test_an_abort_that_was_indexed_twice_is_named_to_readers_once(
    open_log: OpenLog, tmp_path: Path
) -> None:
    """A client that counts them would hide the producer's next transaction, too."""
    log = open_log()
    log.append(records(), now_ms=1)
    index = tmp_path / "t-0" / f"{0:020d}.txnindex"
    # Its writer was killed before the marker, and somebody else's records came.
    append_aborted(str(index), AbortedTransaction(PRODUCER, 0, 1, 2), 1)
    log.append(batch(b"another's"), now_ms=1)
    log.append(marker(commit=False), now_ms=1)
    log.append(records(sequence=1), now_ms=1)
    log.append(marker(commit=True), now_ms=1)
    found = log.reader.read(0, 1_000, min_one_batch=True, read_committed=True)
    assert found.aborted_transactions == [(PRODUCER, 0)]


def test_an_abort_behind_an_index_entry_without_a_marker_is_named_too(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log()
    log.append(records(), now_ms=1)
    index = tmp_path / "t-0" / f"{0:020d}.txnindex"
    # Its writer was killed before the marker, and others' transactions began there.
    append_aborted(str(index), AbortedTransaction(PRODUCER, 0, 1, 2), 1)
    for producer in (8, 9):
        sent = batch(b"t", producer=(producer, 0, 0), transactional=True)
        log.append(sent, now_ms=1)
    log.append(marker(8, commit=False), now_ms=1)
    log.append(marker(commit=False), now_ms=1)
    assert log.lookup.last_stable_offset() == 2
    found = log.reader.read(0, 1_000, min_one_batch=True, read_committed=True)
    assert found.aborted_transactions is not None
    assert set(found.aborted_transactions) == {(PRODUCER, 0), (8, 1)}


def committed_values(content: bytes, aborted: list[tuple[int, int]]) -> list[bytes]:
    """What a client hands on of a region, as Kafka's consumer decides it."""
    coming = sorted(aborted, key=lambda each: each[1])
    ongoing: set[int] = set()
    found = []
    for header, body in batches_in(content):
        while coming and coming[0][1] <= header.last_offset:
            ongoing.add(coming.pop(0)[0])
        if header.is_control:
            ongoing.discard(header.producer_id)
        elif header.producer_id not in ongoing:
            found += [bytes(record.value or b"") for record in iter_records(body)]
    return found


@pytest.mark.parametrize("seed", range(6))
def test_each_read_names_the_aborts_that_its_records_need_and_few_others(
    open_log: OpenLog, seed: int
) -> None:
    picker = random.Random(seed)
    log = open_log(segment_bytes=4_000, index_interval_bytes=300)
    sequences = dict.fromkeys(range(4), 0)
    begun: dict[int, list[bytes]] = {}
    committed: dict[bytes, bool] = {}
    for number in range(300):
        producer = picker.randrange(4)
        if producer in begun and picker.random() < 0.4:
            commit = picker.random() < 0.3
            log.append(marker(producer, commit=commit), now_ms=1)
            committed.update(dict.fromkeys(begun.pop(producer), commit))
            continue
        value = b"%d" % number
        sent = batch(
            value, producer=(producer, 0, sequences[producer]), transactional=True
        )
        log.append(sent, now_ms=1)
        sequences[producer] += 1
        begun.setdefault(producer, []).append(value)
    for producer in list(begun):
        log.append(marker(producer, commit=False), now_ms=1)
        committed.update(dict.fromkeys(begun.pop(producer), False))
    offset, seen, named = 0, [], []
    while offset < log.lookup.latest():
        size = picker.randrange(100, 900)
        found = log.reader.read(offset, size, min_one_batch=True, read_committed=True)
        content = os.pread(found.fd, found.length, found.position)
        batches = batches_in(content)
        aborted = found.aborted_transactions
        assert aborted is not None
        seen += committed_values(content, aborted)
        named.append(len(aborted))
        offset = batches[-1][0].next_offset
    assert sorted(seen) == sorted(value for value in committed if committed[value])
    assert max(named) < 20


def test_a_long_history_of_aborts_costs_neither_reader_nor_writer(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    for sequence in range(300):
        log.append(batch(b"t", producer=(7, 0, sequence), transactional=True), now_ms=1)
        log.append(marker(7, commit=False), now_ms=1)
    read = 0
    pread = os.pread

    def counted(fd: int, size: int, position: int) -> bytes:
        nonlocal read
        content = pread(fd, size, position)
        read += len(content)
        return content

    monkeypatch.setattr(os, "pread", counted)
    found = log.reader.read(300, 200, min_one_batch=True, read_committed=True)
    assert found.aborted_transactions
    assert found.aborted_transactions[0] == (7, 300)
    assert len(found.aborted_transactions) < 300 // 2
    path = log.view.segments.get(0).txn_index_path
    read = 0
    append_aborted(path, AbortedTransaction(7, 600, 601, 602), 602)
    assert read < 20 * ENTRY_BYTES


def test_a_compaction_in_the_middle_of_a_read_shows_nothing_that_was_aborted(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"cleanup_policy": ("compact",), "delete_retention_ms": 0}
    log = open_log(**config)
    sent = batch((b"k", b"aborted"), producer=(7, 0, 0), transactional=True)
    log.append(sent, now_ms=1)
    log.append(marker(7, commit=False), now_ms=1)
    sent = batch((b"k", b"v"), producer=(7, 0, 1), transactional=True)
    log.append(sent, now_ms=1)
    log.append(marker(7, commit=True), now_ms=1)
    with log.row.locked():
        log.roll_locked(1)
    other = open_log(row=log.row.index, **config)
    find = LogReader._aborted

    def compact_first(*arguments: Any) -> list[tuple[int, int]]:
        monkeypatch.setattr(LogReader, "_aborted", find)
        for now_ms in (1, 2):  # data goes, then its marker
            chosen = assess(other, None, now_ms)
            Compaction(other, now_ms, 10).run(
                chosen.first_dirty, chosen.first_uncleanable
            )
        return find(*arguments)

    monkeypatch.setattr(LogReader, "_aborted", compact_first)
    found = log.reader.read(0, 1_000, min_one_batch=True, read_committed=True)
    content = os.pread(found.fd, found.length, found.position)
    assert committed_values(content, found.aborted_transactions or []) == [b"v"]


def test_the_last_stable_offset_is_not_below_the_log_start(open_log: OpenLog) -> None:
    log = open_log()
    log.append(batch(b"t", producer=(7, 0, 0), transactional=True), now_ms=1)
    for _ in range(9):
        log.append(batch(b"plain"), now_ms=1)
    assert log.delete_records(5) == 5
    assert log.lookup.last_stable_offset() == 5
    found = log.reader.read(5, 1_000, min_one_batch=True, read_committed=True)
    assert (found.last_stable_offset, found.length) == (5, 0)
    log.append(marker(7, commit=True), now_ms=1)
    assert log.lookup.last_stable_offset() == 11


@pytest.mark.parametrize("lost", ["all of it", "its end", "nothing, but it lies"])
@pytest.mark.parametrize("rolled", [False, True])
def test_what_a_power_cut_took_of_the_index_of_aborts_is_made_anew(
    open_log: OpenLog, tmp_path: Path, lost: str, rolled: bool
) -> None:
    log = open_log()
    for first in (0, 2):
        log.append(records(sequence=first // 2), now_ms=1)
        log.append(marker(commit=False), now_ms=1)
    if rolled:  # a snapshot of the producers is taken, above the recovery point
        with log.row.locked():
            log.roll_locked(now_ms=1)
    index = tmp_path / "t-0" / f"{0:020d}.txnindex"
    entries = index.read_bytes()
    half = len(entries) // 2
    changed = {"all of it": b"", "its end": entries[:half]}
    index.write_bytes(changed.get(lost, bytes(reversed(entries))))
    if lost == "all of it":
        index.unlink()
    again = open_log()
    assert again.lookup.last_stable_offset() == again.lookup.latest() == 4
    assert index.read_bytes() == entries
    found = again.reader.read(0, 1_000, min_one_batch=True, read_committed=True)
    assert found.aborted_transactions == [(PRODUCER, 0), (PRODUCER, 2)]


def test_zeros_that_a_power_cut_left_in_the_index_of_aborts_are_no_entries(
    open_log: OpenLog, tmp_path: Path
) -> None:
    """A file system may force the size of a file to disk, and not what was added."""
    log = open_log()
    for number in range(4):
        log.append(records(sequence=number), now_ms=1)
        log.append(marker(commit=False), now_ms=1)
    index = tmp_path / "t-0" / f"{0:020d}.txnindex"
    entries = index.read_bytes()
    synced = entries[:ENTRY_BYTES]
    index.write_bytes(synced + bytes(len(entries) - len(synced)))
    again = open_log(hints=LoadHints(recovery_point=2))
    found = again.reader.read(0, 1_000, min_one_batch=True, read_committed=True)
    assert index.read_bytes() == entries
    assert found.aborted_transactions == [(PRODUCER, first) for first in (0, 2, 4, 6)]


def test_aborts_below_the_recovery_point_are_on_disk_before_it_is_noted(
    open_log: OpenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    log.append(records(), now_ms=1)
    log.append(marker(commit=False), now_ms=1)
    synced = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    log.sync.flush()
    assert log.sync.flush_indexes() == 2
    index = tmp_path / "t-0" / f"{0:020d}.txnindex"
    assert str(index) in synced and str(index.parent) in synced


@pytest.mark.parametrize("commit", [True, False])
def test_a_coordinator_killed_at_any_line_leaves_each_marker_to_be_written_once(
    open_log: OpenLog, tmp_path: Path, commit: bool
) -> None:
    died = 0
    for step in STEPS:
        names = [f"{commit}{step}-{number}" for number in range(2)]
        logs: list[PartitionLog] = [open_log(name=name) for name in names]
        for log in logs:
            log.append(records(), now_ms=1)

        def mark(logs: list[PartitionLog] = logs, step: int = step) -> None:
            kill_at_line(step)
            for log in logs:
                log.append(marker(commit=commit), now_ms=1)

        died += children.fork(mark) == -signal.SIGKILL
        for log in logs:  # its successor
            log.append(marker(commit=commit), now_ms=1)
        for name, log in zip(names, logs, strict=True):
            content = (tmp_path / name / f"{0:020d}.log").read_bytes()
            found = [header.is_control for header, _ in batches_in(content)]
            assert found == [False, True], step
            assert log.lookup.last_stable_offset() == log.lookup.latest() == 2
            read = log.reader.read(0, 1_000, min_one_batch=True, read_committed=True)
            aborted = [] if commit else [(PRODUCER, 0)]
            assert read.aborted_transactions == aborted, step
    assert died > len(STEPS) // 2
