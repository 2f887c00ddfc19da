"""Compaction keeps the newest value of each key, at its offset, and nothing breaks."""

import errno
import itertools
import os
import random
import signal
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.record_batch import BatchHeader, Codec, iter_records
from mpbroker.storage.cleaning import compaction
from mpbroker.storage.cleaning.compaction import Compaction
from mpbroker.storage.cleaning.key_map import KeyMap
from mpbroker.storage.cleaning.log_cleaner import assess
from mpbroker.storage.cleaning.retention import apply_retention, rename_deleted
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.log.partition_log import PartitionLog
from tests.storage.batches import (
    batch,
    batches_in,
    read_all,
    read_bytes,
    validated,
)
from tests.storage.conftest import OpenLog
from tests.storage.dump_checks import check_directory
from tests.storage.forks import kill_at_line
from tests.support.children import fork, running

_names = itertools.count()
Rec = tuple[int, bytes | None, bytes | None]
_COMPACT = {
    "cleanup_policy": ("compact",),
    "segment_bytes": 600,
    "index_interval_bytes": 100,
    "delete_retention_ms": 1_000,
}


def stored(log: PartitionLog) -> list[tuple[BatchHeader, bytes]]:
    """Every batch of the log, empty ones too."""
    found = []
    offset = log.lookup.earliest()
    while offset < log.lookup.latest():
        content = read_bytes(log, offset)
        if not content:
            break
        for header, body in batches_in(content):
            found.append((header, body))
            offset = header.next_offset
    return found


def records(log: PartitionLog) -> list[Rec]:
    return [
        (record.offset, record.key, record.value)
        for header, body in stored(log)
        if not header.is_control
        for record in iter_records(body)
    ]


def compact(
    log: PartitionLog, now_ms: int = 0, clean: int | None = None, max_keys: int = 10_000
) -> int:
    chosen = assess(log, clean, now_ms)
    run = Compaction(log, now_ms, max_keys).run
    return run(chosen.first_dirty, chosen.first_uncleanable).clean_offset


def roll(log: PartitionLog) -> None:
    with log.row.locked():
        log.roll_locked(0)


def put(log: PartitionLog, key: str, value: str | None, **more: object) -> None:
    content = None if value is None else value.encode()
    log.append(batch((key.encode(), content), **more), now_ms=1)  # type: ignore[arg-type]


def test_the_newest_record_of_each_key_stays_at_its_offset(open_log: OpenLog) -> None:
    log = open_log(**_COMPACT)
    for number in range(20):
        put(log, f"k{number % 3}", str(number))
    roll(log)
    assert compact(log) == 20
    assert records(log) == [
        (17, b"k2", b"17"),
        (18, b"k0", b"18"),
        (19, b"k1", b"19"),
    ]
    assert log.lookup.latest() == 20
    assert log.append(batch((b"k", b"v")), now_ms=1).base_offset == 20


def test_no_record_goes_before_the_one_that_replaces_it_is_on_disk(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut between two groups of segments would take both."""
    log = open_log(**_COMPACT)
    put(log, "k", "acknowledged")
    log.sync.flush()
    for number in range(10):
        put(log, f"other{number}", "x" * 200)
    put(log, "k", "not forced to disk by anybody")
    newest = log.lookup.latest() - 1
    roll(log)
    replace = Compaction._replace
    on_disk: list[int] = []

    def note(self: Compaction, *rest: object) -> list[str]:
        on_disk.append(log.row.durable_end_offset)
        return replace(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Compaction, "_replace", note)
    compact(log)
    assert len(on_disk) > 1
    assert on_disk[0] > newest


def test_the_active_segment_is_never_cleaned(open_log: OpenLog) -> None:
    log = open_log(**_COMPACT)
    put(log, "k", "1")
    put(log, "k", "2")
    assert assess(log, None, 0).cleanable_bytes == 0
    assert len(records(log)) == 2


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    appended=st.lists(
        st.lists(
            st.tuples(st.integers(0, 6), st.none() | st.integers(0, 99)),
            min_size=1,
            max_size=5,
        ),
        min_size=1,
        max_size=20,
    ),
    codec=st.sampled_from([Codec.NONE, Codec.LZ4, Codec.GZIP]),
    segment_bytes=st.integers(300, 900),
    rounds=st.integers(1, 3),
    max_keys=st.integers(5, 20),
)
def test_a_reader_of_a_compacted_log_ends_with_the_same_table(
    open_log: OpenLog,
    appended: list[list[tuple[int, int | None]]],
    codec: Codec,
    segment_bytes: int,
    rounds: int,
    max_keys: int,
) -> None:
    config = {**_COMPACT, "segment_bytes": segment_bytes, "name": str(next(_names))}
    log = open_log(**config)
    newest: dict[bytes, tuple[int, bytes | None]] = {}
    offset = 0
    for pairs in appended:
        content: list[tuple[bytes | None, bytes | None]] = []
        for key, value in pairs:
            encoded = None if value is None else b"%d" % value
            content.append((b"%d" % key, encoded))
            newest[b"%d" % key] = (offset, encoded)
            offset += 1
        log.append(batch(*content, codec=codec), now_ms=1)
    roll(log)
    clean = 0
    for _ in range(rounds):
        clean = compact(log, now_ms=0, clean=clean, max_keys=max_keys)
    while clean < offset:
        clean = compact(log, now_ms=0, clean=clean, max_keys=max_keys)
    found = {key: (at, value) for at, key, value in records(log)}
    assert found == newest
    kept = [at for at, _, _ in records(log)]
    assert kept == sorted(set(kept))
    assert log.lookup.latest() == offset
    # From every offset on, a reader finds the first record not below it.
    for wanted in range(offset):
        expected = min((at for at in kept if at >= wanted), default=None)
        assert next((at for at, _ in read_all(log, wanted)), None) == expected
    check_directory(log.directory)
    again = open_log(**config)
    assert again.lookup.latest() == offset
    assert records(again) == records(log)
    log.close()
    again.close()


def test_a_tombstone_stays_until_its_time_has_come(open_log: OpenLog) -> None:
    log = open_log(**_COMPACT)
    put(log, "a", "1", timestamp=5)
    put(log, "a", None, timestamp=7)
    put(log, "b", "2", timestamp=9)
    roll(log)
    compact(log, now_ms=10_000)
    assert records(log) == [(1, b"a", None), (2, b"b", b"2")]
    header, body = stored(log)[0]
    assert header.has_delete_horizon
    assert header.base_timestamp == 11_000
    assert next(iter_records(body)).timestamp == 7
    assert log.lookup.offset_for_timestamp(6) == (1, 7)
    compact(log, now_ms=10_999)
    assert len(records(log)) == 2
    compact(log, now_ms=11_000)
    assert records(log) == [(2, b"b", b"2")]


def test_the_last_batch_of_a_producer_stays_empty_and_its_sequence_counts(
    open_log: OpenLog,
) -> None:
    log = open_log(**_COMPACT)
    for sequence in range(3):
        put(log, "k", str(sequence), producer=(9, 0, sequence))
    put(log, "k", "newest")
    roll(log)
    compact(log)
    assert [(h.base_offset, h.record_count) for h, _ in stored(log)] == [(2, 0), (3, 1)]
    hints = LoadHints(producer_id_expiration_ms=2**62)  # its records are from 1970
    again = open_log(hints=hints, **_COMPACT)
    with pytest.raises(ApiError):
        put(again, "k", "gap", producer=(9, 0, 7))
    put(again, "k", "next", producer=(9, 0, 3))


def test_a_removed_last_batch_leaves_the_end_of_the_log_where_it_was(
    open_log: OpenLog,
) -> None:
    log = open_log(**_COMPACT)
    put(log, "a", "1")
    put(log, "a", None)
    roll(log)
    compact(log, now_ms=0)
    compact(log, now_ms=10**6)
    assert records(log) == []
    assert [(h.base_offset, h.record_count) for h, _ in stored(log)] == [(1, 0)]
    assert open_log(**_COMPACT).lookup.latest() == 2


def test_small_segments_are_merged(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log(**_COMPACT)
    for number in range(60):
        put(log, f"k{number % 2}", "v" * 20 + str(number))
    before = len(list((tmp_path / "t-0").glob("*.log")))
    roll(log)
    compact(log)
    compact(log)
    names = sorted(p.name for p in (tmp_path / "t-0").glob("*.log"))
    assert before > 8
    assert names == [f"{0:020d}.log", f"{60:020d}.log"]
    assert not list((tmp_path / "t-0").glob("*.cleaned"))
    assert not list((tmp_path / "t-0").glob("*.swap"))


def test_data_of_an_aborted_transaction_goes_and_its_marker_later(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log(**_COMPACT)
    put(log, "a", "committed before")
    put(log, "a", "aborted", producer=(7, 0, 0), transactional=True)
    end = EndTransactionMarker(commit=False, coordinator_epoch=0)
    log.append(validated(build_end_transaction_marker(7, 0, end, 5)), now_ms=1)
    put(log, "b", "1")
    roll(log)
    compact(log, now_ms=0)
    assert records(log) == [(0, b"a", b"committed before"), (3, b"b", b"1")]
    control = [header for header, _ in stored(log) if header.is_control]
    assert [header.base_offset for header in control] == [2]
    found = log.reader.read(0, 10_000, min_one_batch=True, read_committed=True)
    assert found.aborted_transactions == [(7, 1)]


def test_records_too_young_or_past_an_open_transaction_are_left_alone(
    open_log: OpenLog,
) -> None:
    young = open_log(**_COMPACT, min_compaction_lag_ms=1_000)
    put(young, "k", "1", timestamp=5_000)
    put(young, "k", "2", timestamp=5_000)
    roll(young)
    assert assess(young, None, 5_500).first_uncleanable == 0
    assert assess(young, None, 6_500).first_uncleanable == 2
    put(young, "t", "1", timestamp=5_000, producer=(7, 0, 0), transactional=True)
    roll(young)
    assert assess(young, None, 6_500).first_uncleanable == 2


def test_a_log_is_due_when_dirty_enough_or_overdue(open_log: OpenLog) -> None:
    log = open_log(**_COMPACT, max_compaction_lag_ms=10_000)
    for number in range(10):
        put(log, f"k{number}", "v", timestamp=1_000)
    roll(log)
    chosen = assess(log, None, 2_000)
    assert (chosen.ratio, chosen.overdue) == (1.0, False)
    assert chosen.is_due(0.5)
    end = log.lookup.latest()
    assert not assess(log, end, 2_000).is_due(0.0)
    put(log, "k0", "w", timestamp=1_000)
    roll(log)
    later = assess(log, end, 2_000)
    assert 0 < later.ratio < 0.5
    assert not later.is_due(0.5)
    assert assess(log, end, 12_000).is_due(0.5)


def test_readers_and_appenders_of_other_processes_follow_a_swap(
    open_log: OpenLog,
) -> None:
    log = open_log(**_COMPACT)
    other = open_log(row=log.row.index, **_COMPACT)
    for number in range(30):
        put(log, f"k{number % 3}", str(number))
        assert len(records(other)) == number + 1
    roll(log)
    compact(log)
    assert records(other) == records(log)
    put(other, "k0", "after")
    assert records(log)[-1] == (30, b"k0", b"after")


def test_a_compaction_killed_at_any_line_loses_no_newest_record(
    open_log: OpenLog,
) -> None:
    log = open_log(**_COMPACT)
    newest: dict[bytes, tuple[int, bytes]] = {}
    picker = random.Random(4)
    died = 0
    for turn in range(50):
        for step in range(6):
            key = picker.randrange(8)
            value = f"{turn}.{step}".encode()
            newest[b"%d" % key] = (log.lookup.latest(), value)
            log.append(batch((b"%d" % key, value)), now_ms=1)
        roll(log)

        def clean() -> None:
            mine = open_log(row=log.row.index, **_COMPACT)
            kill_at_line(int(10 ** picker.uniform(2, 4)))
            compact(mine)

        died += fork(clean) == -signal.SIGKILL
        picker.random()
        for reader in (log, open_log(row=log.row.index, **_COMPACT)):
            found = {key: (at, value) for at, key, value in records(reader)}
            assert found == newest
        if turn % 5 == 0:
            again = open_log(**_COMPACT)
            assert {k: (at, v) for at, k, v in records(again)} == newest
            check_directory(log.directory)
            # Its start tidied the files under the first row's feet.
            log.row.structure_version += 2
    assert died > 10


def test_a_tombstone_never_goes_before_the_value_that_it_deletes(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(**_COMPACT)
    put(log, "a", "1")
    put(log, "b", "1")
    roll(log)
    put(log, "k", "deleted later")
    roll(log)
    put(log, "a", "2")
    put(log, "c", "1")
    put(log, "k", None)
    roll(log)
    for key in "abc":
        put(log, key, "9" * 200)
    roll(log)
    # There is room for three keys: the tombstone is copied, and its time begins.
    small = open_log(row=log.row.index, **{**_COMPACT, "segment_bytes": 60})
    clean = compact(small, now_ms=5_000, max_keys=3)
    assert clean == 4
    assert (2, b"k", b"deleted later") in records(log)

    def dying(directory: str, base_offset: int) -> list[str]:
        rename_deleted(directory, base_offset)
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    def compact_and_die() -> None:
        monkeypatch.setattr(compaction, "rename_deleted", dying)
        mine = open_log(row=log.row.index, **_COMPACT)
        compact(mine, now_ms=9_000, clean=clean)

    assert fork(compact_and_die) == -signal.SIGKILL
    for reader in (open_log(row=log.row.index, **_COMPACT), open_log(**_COMPACT)):
        of_k = [value for _, key, value in records(reader) if key == b"k"]
        assert of_k in ([], [None])


def leftovers(log: PartitionLog) -> list[str]:
    names = os.listdir(log.directory)
    return sorted(name for name in names if name.endswith((".cleaned", ".swap")))


@pytest.mark.parametrize("renamed", range(3))
def test_what_a_killed_compaction_left_goes_with_the_next(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch, renamed: int
) -> None:
    """A copy takes as much of the disk as a segment, and has to wait for no start."""
    log = open_log(**_COMPACT)
    for number in range(30):
        put(log, f"k{number}", "v" * 40)
    roll(log)
    real, count = os.rename, itertools.count()

    def dying(source: str, to: str) -> None:
        # In the second group: its copy's files have not all got their last name.
        is_second = ".cleaned" in source and f"{0:020d}" not in source
        if is_second and next(count) == renamed:
            os.kill(os.getpid(), signal.SIGKILL)
        real(source, to)

    def compact_and_die() -> None:
        monkeypatch.setattr(os, "rename", dying)
        compact(open_log(row=log.row.index, **_COMPACT))

    assert fork(compact_and_die) == -signal.SIGKILL
    assert any(name.endswith(".log.cleaned") for name in leftovers(log))
    larger = {**_COMPACT, "segment_bytes": 10_000}
    compact(open_log(row=log.row.index, **larger))
    assert leftovers(log) == []
    assert len(records(open_log(row=log.row.index, **larger))) == 30


def test_a_copy_that_cannot_be_finished_leaves_nothing(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a full disk would stay full."""
    log = open_log(**_COMPACT)
    for number in range(10):
        put(log, "k", str(number))
    roll(log)

    def fail(path: str, times: tuple[float, float]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "utime", fail)
    with pytest.raises(OSError, match="No space left"):
        compact(log)
    assert leftovers(log) == []


def test_a_full_key_map_refuses_new_keys_only() -> None:
    keys = KeyMap(2)
    assert keys.put(b"a", 1)
    assert keys.put(b"b", 2)
    assert not keys.put(b"c", 3)
    assert keys.put(b"a", 4)
    assert (keys.get(b"a"), keys.get(b"b"), keys.get(b"c")) == (4, 2, -1)


def test_readers_of_other_processes_never_see_half_a_change(open_log: OpenLog) -> None:
    config = {**_COMPACT, "retention_ms": -1, "retention_bytes": 3_000}
    config["cleanup_policy"] = ("compact", "delete")
    log = open_log(**config)
    put(log, "k", "0|")

    def read() -> None:
        mine = open_log(row=log.row.index, **config)
        picker = random.Random(os.getpid())
        while mine.lookup.latest() < 751:
            offset = picker.randrange(mine.lookup.earliest(), mine.lookup.latest() + 1)
            try:
                found = mine.reader.read(offset, 1_000, min_one_batch=True)
            except ApiError as error:
                # Somebody was faster; anything else is half a change.
                assert error.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
                continue
            content = os.pread(found.fd, found.length, found.position)
            for number, (header, body) in enumerate(batches_in(content)):
                assert number or header.last_offset >= offset
                for record in iter_records(body):
                    assert record.value == b"%d|" % record.offset

    with running(read, read) as readers:
        for turn in range(150):
            for _ in range(5):
                put(log, f"k{turn % 9}", f"{log.lookup.latest()}|")
            compact(log, now_ms=turn)
            apply_retention(log, 0)
        assert log.lookup.latest() == 751
        assert [reader.wait() for reader in readers] == [0, 0]


def test_a_batch_that_inflates_is_walked_one_record_at_a_time(open_log, monkeypatch):
    """10 KB can be ten million records, which took 250 bytes of memory each."""
    monkeypatch.setattr(compaction, "new_key_map", KeyMap)  # Python's own walk
    log = open_log(cleanup_policy=("compact",), segment_bytes=1 << 20)
    log.append(batch(*[(b"k", b"")] * 100_000, codec=Codec.GZIP), now_ms=1)
    log.append(batch((b"k", b"last")), now_ms=1)
    roll(log)
    tracemalloc.start()
    try:
        compact(log)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [value for _, _, value in records(log)] == [b"last"]
    assert peak < 12_000_000
