"""Old segments go, by age, by size and below the log start; readers are not hurt."""

import os
import random
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.log_config import LogConfig
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.cleaning.retention import (
    SegmentAge,
    apply_retention,
    copy_limit,
    due_copies,
    expired_segments,
)
from mpbroker.storage.files.time_index import ENTRY_BYTES as TIME_ENTRY_BYTES
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.log.partition_log import PartitionLog
from tests.storage.batches import batch, read_all
from tests.storage.conftest import OpenLog
from tests.storage.dump_checks import check_directory
from tests.storage.forks import kill_at_line
from tests.support.children import fork

_SEGMENT = 500
_NEVER = {"retention_ms": -1, "retention_bytes": -1}


def config(**values: object) -> LogConfig:
    return LogConfig({name.replace("_", "."): value for name, value in values.items()})


def fill(log: PartitionLog, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        log.append(batch(b"%03d" % number * 30, timestamp=number * 1_000), now_ms=1)


def test_segments_older_than_retention_ms_go_and_younger_stay(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log(segment_bytes=_SEGMENT, retention_ms=10_000, retention_bytes=-1)
    fill(log, 30)
    deleted = apply_retention(log, 25_000)
    assert log.lookup.earliest() == 15  # three a segment: 0 to 14 are past 10 s
    assert deleted
    assert all(path.endswith(".deleted") and os.path.exists(path) for path in deleted)
    assert [offset for offset, _ in read_all(log)] == list(range(15, 30))
    with pytest.raises(ApiError) as refused:
        log.reader.read(14, 100, min_one_batch=True)
    assert refused.value.error_code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_the_active_segment_goes_too_when_all_of_it_is_old(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=_SEGMENT, retention_ms=10_000)
    fill(log, 10)
    apply_retention(log, 1_000_000)
    assert log.lookup.earliest() == log.lookup.latest() == 10
    assert apply_retention(log, 2_000_000) == []
    assert log.append(batch(b"new", timestamp=10**9), now_ms=1).base_offset == 10
    assert open_log(segment_bytes=_SEGMENT).lookup.latest() == 11


def test_the_oldest_segments_go_when_the_log_is_larger_than_retention_bytes(
    open_log: OpenLog,
) -> None:
    log = open_log(segment_bytes=_SEGMENT, retention_ms=-1, retention_bytes=1_000)
    fill(log, 30)
    apply_retention(log, 0)
    size = log.view.size_in_bytes()
    assert 1_000 <= size < 1_000 + _SEGMENT
    assert log.lookup.latest() == 30


def test_segments_below_the_log_start_offset_go_whatever_the_policy(
    open_log: OpenLog,
) -> None:
    log = open_log(segment_bytes=_SEGMENT, **_NEVER)
    fill(log, 9)
    log.delete_records(4)
    apply_retention(log, 0)
    assert log.view.first_base_offset() == 3
    assert log.lookup.earliest() == 4


def test_a_topic_that_is_only_compacted_has_no_retention(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=_SEGMENT, cleanup_policy=("compact",), retention_ms=1)
    fill(log, 9)
    assert apply_retention(log, 10**12) == []


def test_other_processes_follow_when_segments_go(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=_SEGMENT, retention_ms=5_000)
    other = open_log(row=log.row.index, segment_bytes=_SEGMENT)
    fill(log, 12)
    found = other.reader.read(0, 10_000, min_one_batch=True)
    apply_retention(log, 12_000)
    # A region found before can still be read by whoever has the file open.
    assert len(os.pread(found.fd, found.length, found.position)) == found.length
    assert read_all(other) == read_all(log)
    assert other.lookup.earliest() == log.lookup.earliest() > 0


def test_snapshots_below_the_log_start_go_but_the_newest_stays(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log(segment_bytes=_SEGMENT, retention_ms=1)
    for sequence in range(9):
        sent = batch(b"a" * 90, producer=(1, 0, sequence), timestamp=1)
        log.append(sent, now_ms=1)
    apply_retention(log, 10**9)
    assert [p.name for p in (tmp_path / "t-0").glob("*.snapshot")] == [
        f"{9:020d}.snapshot"
    ]
    with pytest.raises(ApiError):
        log.append(batch(b"gap", producer=(1, 0, 20)), now_ms=1)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8),
    st.integers(-1, 60),
    st.integers(-1, 200),
    st.integers(0, 8),
)
def test_what_expires_is_a_run_from_the_oldest_that_each_rule_allows(
    segments: list[tuple[int, int]], retention_ms: int, retention_bytes: int, start: int
) -> None:
    ages = [
        SegmentAge(number, number + 1, size, timestamp)
        for number, (size, timestamp) in enumerate(segments)
    ]
    rules = config(retention_ms=retention_ms, retention_bytes=retention_bytes)
    now_ms = 55
    count = expired_segments(ages, rules, start, now_ms)
    gone, kept = ages[:count], ages[count:]
    left = sum(segment.size for segment in kept)
    last_gone = gone[-1] if gone else None
    if last_gone is not None:
        assert (
            last_gone.next_base <= start
            or (
                retention_ms >= 0
                and now_ms - last_gone.largest_timestamp > retention_ms
            )
            or (retention_bytes >= 0 and left >= retention_bytes)
        )
    if len(kept) > 1 or (kept and kept[0].size):
        assert kept[0].next_base > start
        if retention_ms >= 0:
            assert now_ms - kept[0].largest_timestamp <= retention_ms
        if retention_bytes >= 0:
            assert left - kept[0].size < retention_bytes


def test_retention_killed_at_any_line_leaves_a_log_without_a_hole(
    open_log: OpenLog,
) -> None:
    settings = {"segment_bytes": _SEGMENT, "retention_ms": -1, "retention_bytes": 1_200}
    log = open_log(**settings)
    picker = random.Random(3)
    number = died = 0
    for _ in range(60):
        fill(log, 4, number)
        number += 4

        def retain() -> None:
            mine = open_log(row=log.row.index, **settings)
            kill_at_line(picker.randrange(1, 900))
            apply_retention(mine, 0)

        died += fork(retain) == -signal.SIGKILL
        picker.random()
        for reader in (log, open_log(**settings)):
            records = read_all(reader)
            first = reader.lookup.earliest()
            assert [offset for offset, _ in records] == list(range(first, number))
            assert all(value == b"%03d" % offset * 30 for offset, value in records)
    assert died > 10
    check_directory(log.directory)
    apply_retention(log, 0)
    assert log.view.size_in_bytes() < 1_200 + 2 * _SEGMENT


def test_a_reader_overtaken_by_retention_is_told_that_its_offset_is_gone(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(segment_bytes=_SEGMENT, retention_ms=5_000)
    fill(log, 12)
    other = open_log(row=log.row.index, segment_bytes=_SEGMENT)
    real = other.view.refresh

    def retention_first(active_base: int) -> None:
        apply_retention(log, 12_000)
        real(active_base)

    monkeypatch.setattr(other.view, "refresh", retention_first)
    with pytest.raises(ApiError) as refused:
        other.reader.read(0, 100, min_one_batch=True)
    assert refused.value.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert log.row.status == RowStatus.ONLINE


def test_a_power_cut_behind_a_roll_does_not_make_a_segment_look_old(
    open_log: OpenLog, tmp_path: Path
) -> None:
    """The entry that a roll adds to the time index is zeros then, and zero is 1970."""
    log = open_log(segment_bytes=_SEGMENT, retention_ms=10_000, retention_bytes=-1)
    fill(log, 3)
    log.sync.flush()
    point = log.sync.flush_indexes()
    fill(log, 1, first=3)  # rolls
    assert log.view.segments.bases == [0, point]
    index = tmp_path / "t-0" / f"{0:020d}.timeindex"
    entries = index.read_bytes()
    index.write_bytes(entries[:-TIME_ENTRY_BYTES] + bytes(TIME_ENTRY_BYTES))
    again = open_log(
        hints=LoadHints(recovery_point=point),
        segment_bytes=_SEGMENT,
        retention_ms=10_000,
        retention_bytes=-1,
    )
    assert again.lookup.latest() == 4
    assert index.read_bytes() == entries
    assert apply_retention(again, 10_000) == []
    assert again.lookup.earliest() == 0


def test_the_last_entry_of_a_time_index_is_forced_to_disk(
    open_log: OpenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all that its segment holds was forced to disk before the roll."""
    log = open_log(segment_bytes=_SEGMENT)
    fill(log, 3)
    log.sync.flush()
    log.sync.flush_indexes()
    fill(log, 1, first=3)
    log.sync.flush()
    synced, fsync = [], os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    assert log.sync.flush_indexes() == 4
    assert str(tmp_path / "t-0" / f"{0:020d}.timeindex") in synced


# Two closed segments of 40 and 30 bytes at 5 and 10, and 20 bytes in the active one.
_LAGGING = [
    SegmentAge(5, 10, 40, 1_000),
    SegmentAge(10, 15, 30, 1_050),
    SegmentAge(15, 20, 20, 1_100),
]


@pytest.mark.parametrize(
    ("values", "now_ms", "below"),
    [
        ({}, 1_100, 15),
        ({"remote_copy_lag_bytes": 60}, 1_100, 15),
        ({"remote_copy_lag_ms": 100, "remote_copy_lag_bytes": 0}, 1_050, 15),
        ({"remote_copy_lag_ms": 100}, 1_099, 5),
        ({"remote_copy_lag_ms": 100}, 1_100, 10),
        ({"remote_copy_lag_ms": 100}, 1_150, 15),
        ({"remote_copy_lag_ms": 100}, 1_040, 5),  # the second one is from the future
        ({"remote_copy_lag_ms": 100}, 999, 15),
        ({"remote_copy_lag_ms": -1, "remote_copy_lag_bytes": 51}, 1_100, 5),
        ({"remote_copy_lag_ms": -1, "remote_copy_lag_bytes": 50}, 1_100, 10),
        ({"remote_copy_lag_ms": -1, "remote_copy_lag_bytes": 20}, 1_100, 15),
        ({"remote_copy_lag_ms": 100, "remote_copy_lag_bytes": 50}, 1_099, 10),
        ({"remote_copy_lag_ms": -1}, 1_000_000, 5),  # there is no limit at all
        ({"remote_copy_lag_ms": -1, "local_retention_ms": 100}, 1_100, 10),
        ({"remote_copy_lag_ms": -1, "retention_ms": 100}, 1_100, 10),
        ({"remote_copy_lag_ms": -1, "retention_bytes": 50}, 1_100, 10),
        ({"remote_copy_lag_ms": -1, "local_retention_bytes": 0}, 1_100, 15),
    ],
)
def test_a_segment_is_copied_when_it_is_old_or_far_enough(
    values: dict[str, object], now_ms: int, below: int
) -> None:
    settings = config(**{**_NEVER, **values})
    assert due_copies(_LAGGING, settings, -1, now_ms) == below


def test_a_segment_that_is_in_the_store_keeps_none_waiting() -> None:
    settings = config(**_NEVER, remote_copy_lag_ms=100)
    assert due_copies(_LAGGING, settings, 10, 1_040) == 15


def test_a_log_says_what_of_it_may_be_copied(open_log: OpenLog) -> None:
    lag = {"remote_copy_lag_ms": 10_000}
    log = open_log(segment_bytes=_SEGMENT, **_NEVER, **lag)
    fill(log, 30)
    assert copy_limit(log, 25_000) == 15  # as retention.ms would remove
    log = open_log(segment_bytes=_SEGMENT, **_NEVER)
    assert copy_limit(log, 0) == log.view.state().active_base_offset
