"""Appending to a partition and reading it back."""

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpbroker.ipc.layout import RowStatus
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.offset_index import OffsetIndex
from mpbroker.storage.files.time_index import TimeIndex, TimestampOffset
from tests.storage.batches import batch, batches_in, read_all, read_bytes
from tests.storage.conftest import OpenLog
from tests.storage.dump_checks import check_directory

_names = itertools.count()
_SETTINGS = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def test_offsets_are_given_in_order_and_records_come_back(open_log: OpenLog) -> None:
    log = open_log()
    assert log.append(batch(b"a", b"b"), now_ms=1).base_offset == 0
    result = log.append(batch(b"c"), now_ms=1)
    assert (result.base_offset, result.last_offset, result.duplicate) == (2, 2, False)
    assert read_all(log) == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert (log.lookup.earliest(), log.lookup.latest()) == (0, 3)


def test_the_stored_batch_differs_from_the_sent_one_only_in_offset_and_epoch(
    open_log: OpenLog,
) -> None:
    log = open_log()
    sent = batch(b"a")
    log.append(batch(b"first"), now_ms=1)
    log.append(sent, now_ms=1)
    stored = read_bytes(log, 1)
    assert stored[16:] == bytes(sent.data[16:])
    assert stored[:16] == (1).to_bytes(8, "big") + bytes(sent.data[8:12]) + bytes(4)


def test_bytes_that_cannot_be_patched_in_place_are_copied(open_log: OpenLog) -> None:
    log = open_log()
    recompressed = batch(b"a")._replace(data=memoryview(bytes(batch(b"a").data)))
    log.append(recompressed, now_ms=1)
    log.append(recompressed, now_ms=1)
    assert read_all(log) == [(0, b"a"), (1, b"a")]


def test_reading_at_the_end_gives_nothing_and_beyond_it_is_refused(
    open_log: OpenLog,
) -> None:
    log = open_log()
    log.append(batch(b"a"), now_ms=1)
    assert log.reader.read(1, 100, min_one_batch=True).length == 0
    for offset in (-1, 2):
        with pytest.raises(ApiError) as refused:
            log.reader.read(offset, 100, min_one_batch=True)
        assert refused.value.error_code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_the_first_batch_is_whole_or_not_given_at_all(open_log: OpenLog) -> None:
    log = open_log()
    size = len(batch(b"a" * 100).data)
    for _ in range(3):
        log.append(batch(b"a" * 100), now_ms=1)
    assert log.reader.read(0, 10, min_one_batch=True).length == size
    assert log.reader.read(0, 10, min_one_batch=False).length == 0
    assert log.reader.read(0, size + 10, min_one_batch=False).length == size + 10
    assert log.reader.read(1, 10 * size, min_one_batch=False).length == 2 * size


@_SETTINGS
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    segment_bytes=st.integers(400, 3_000),
    max_bytes=st.integers(1, 2_000),
)
def test_every_record_is_found_from_every_offset_however_segments_are_cut(
    open_log: OpenLog, sizes: list[int], segment_bytes: int, max_bytes: int
) -> None:
    name = str(next(_names))
    log = open_log(name=name, segment_bytes=segment_bytes, index_interval_bytes=100)
    start = 0
    for number, size in enumerate(sizes):
        log.append(batch(b"%05d" % number + bytes(size)), now_ms=1)
    for number in range(len(sizes)):
        content = read_bytes(log, start + number, max_bytes)
        header, _ = batches_in(content)[0]
        assert header.base_offset == start + number
    assert len(read_all(log, start)) == len(sizes)
    check_directory(log.directory)
    log.close()


def test_a_full_segment_is_rolled_and_named_by_its_first_offset(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log(segment_bytes=1_000)
    for _ in range(12):
        log.append(batch(bytes(232)), now_ms=1)
    names = sorted(p.name for p in (tmp_path / "t-0").glob("*.log"))
    assert names == [f"{base:020d}.log" for base in (0, 3, 6, 9)]
    assert log.view.size_in_bytes() == 12 * len(batch(bytes(232)).data)
    # What came in is counted on, whatever the active segment.
    assert log.row.snapshot().bytes_in == log.view.size_in_bytes()


def test_a_segment_is_rolled_when_its_first_record_is_segment_ms_older(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log(segment_ms=1_000)
    for timestamp in (5_000, 6_000, 6_001):
        log.append(batch(b"a", timestamp=timestamp), now_ms=1)
    assert len(list((tmp_path / "t-0").glob("*.log"))) == 2


def test_jitter_rolls_segments_of_one_age_at_different_times(
    open_log: OpenLog, tmp_path: Path
) -> None:
    first_rolls = set()
    for number in range(8):
        log = open_log(name=f"t-{number}", segment_ms=1_000, segment_jitter_ms=900)
        for timestamp in range(5_000, 6_002, 20):
            log.append(batch(b"a", timestamp=timestamp), now_ms=1)
        bases = sorted(int(p.stem) for p in (tmp_path / f"t-{number}").glob("*.log"))
        first_rolls.add(bases[1])
    assert len(first_rolls) > 3
    assert all(4 < base <= 51 for base in first_rolls)


def test_preallocate_reserves_a_segment_and_a_clean_close_gives_it_back(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log(preallocate=True, segment_bytes=1024 * 1024)
    sizes = []
    while len(list((tmp_path / "t-0").glob("*.log"))) < 2:
        log.append(batch(bytes(60_000)), now_ms=1)
        sizes.append(len(batch(bytes(60_000)).data))
    old, active = sorted((tmp_path / "t-0").glob("*.log"))
    assert active.stat().st_size == sizes[-1]
    if not active.stat().st_blocks * 512 >= 1024 * 1024:
        pytest.skip("this file system cannot reserve space")
    assert old.stat().st_blocks * 512 < old.stat().st_size + 64 * 1024
    log.close_cleanly()
    assert active.stat().st_blocks * 512 <= 128 * 1024


def test_a_batch_larger_than_a_segment_is_refused(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=1_000)
    with pytest.raises(ApiError) as refused:
        log.append(batch(bytes(2_000)), now_ms=1)
    assert refused.value.error_code == ErrorCode.RECORD_LIST_TOO_LARGE
    assert log.append(batch(b"a"), now_ms=1).base_offset == 0


def test_two_handles_on_one_row_see_each_others_appends_and_rolls(
    open_log: OpenLog,
) -> None:
    first = open_log(segment_bytes=500)
    second = open_log(row=first.row.index, segment_bytes=500)
    for number in range(20):
        log = (first, second)[number % 2]
        assert log.append(batch(b"%d" % number), now_ms=1).base_offset == number
    expected = [(number, b"%d" % number) for number in range(20)]
    assert read_all(first) == read_all(second) == expected


def test_what_a_dead_appender_left_behind_is_overwritten(open_log: OpenLog) -> None:
    log = open_log(index_interval_bytes=50)
    for number in range(5):
        log.append(batch(b"%d" % number), now_ms=1)
    state = log.view.state()
    torn = os.open(log.reader.read(0, 1, min_one_batch=True).segment_path, os.O_WRONLY)
    os.pwrite(torn, b"\xff" * 500, state.active_size)
    os.close(torn)
    index = OffsetIndex(log.directory + f"/{0:020d}.index", 0)
    index.write_entry(state.index_entries, 5, state.active_size)
    assert read_all(log) == [(n, b"%d" % n) for n in range(5)]
    for number in range(5, 10):
        log.append(batch(b"%d" % number), now_ms=1)
    assert read_all(log) == [(n, b"%d" % n) for n in range(10)]


def test_a_full_disk_appends_nothing_and_the_partition_stays_online(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    log.append(batch(b"a"), now_ms=1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(ApiError) as refused:
            log.append(batch(b"b"), now_ms=1)
    assert refused.value.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    assert log.append(batch(b"c"), now_ms=1).base_offset == 1
    assert read_all(log) == [(0, b"a"), (1, b"c")]


def test_a_write_that_is_cut_short_is_completed(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    log.append(batch(b"a"), now_ms=1)
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: real(fd, memoryview(data)[:7], at)
    )
    log.append(batch(b"b" * 50), now_ms=1)
    monkeypatch.undo()
    assert read_all(log) == [(0, b"a"), (1, b"b" * 50)]


def test_a_disk_error_takes_the_partition_offline(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    log.append(batch(b"a"), now_ms=1)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", broken)
        with pytest.raises(ApiError):
            log.append(batch(b"b"), now_ms=1)
    assert log.row.status == RowStatus.OFFLINE
    with pytest.raises(ApiError) as refused:
        log.append(batch(b"c"), now_ms=1)
    assert refused.value.error_code == ErrorCode.KAFKA_STORAGE_ERROR


def test_running_out_of_descriptors_closes_files_and_tries_again(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    log.append(batch(b"a"), now_ms=1)
    log.close()
    released: list[bool] = []
    real = os.open

    def exhausted(*arguments: object, **more: object) -> int:
        if not released:
            raise OSError(24, "Too many open files")
        return real(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", exhausted)
    log.view.release_descriptors = lambda: released.append(True)
    assert log.append(batch(b"b"), now_ms=1).base_offset == 1
    log.close()
    released.clear()
    assert log.reader.read(0, 1_000, min_one_batch=True).length
    assert released


def test_reading_through_many_segments_keeps_few_files_open(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=200)
    for number in range(100):
        log.append(batch(b"%d" % number * 40), now_ms=1)
    log.close()
    before = len(os.listdir("/proc/self/fd"))
    for offset in range(100):
        log.reader.read(offset, 1_000, min_one_batch=True)
    log.lookup.offset_for_timestamp(10**12)
    log.lookup.max_timestamp()
    assert len(os.listdir("/proc/self/fd")) - before < 60


def test_deleted_records_are_out_of_range_and_the_rest_stays(open_log: OpenLog) -> None:
    log = open_log()
    for number in range(5):
        log.append(batch(b"%d" % number), now_ms=1)
    assert log.delete_records(3) == 3
    assert log.delete_records(1) == 3
    with pytest.raises(ApiError) as refused:
        log.reader.read(2, 100, min_one_batch=True)
    assert refused.value.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert read_all(log) == [(3, b"3"), (4, b"4")]
    assert log.delete_records(-1) == 5
    with pytest.raises(ApiError):
        log.delete_records(6)


def test_a_topic_that_is_only_compacted_keeps_its_records(open_log: OpenLog) -> None:
    log = open_log(cleanup_policy=("compact",))
    with pytest.raises(ApiError) as refused:
        log.delete_records(0)
    assert refused.value.error_code == ErrorCode.POLICY_VIOLATION


@_SETTINGS
@given(
    timestamps=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    segment_bytes=st.integers(200, 2_000),
)
def test_an_offset_by_timestamp_is_that_of_the_first_record_not_older(
    open_log: OpenLog, timestamps: list[int], segment_bytes: int
) -> None:
    name = str(next(_names))
    log = open_log(name=name, segment_bytes=segment_bytes, index_interval_bytes=100)
    start = 0
    records = []
    for number in range(0, len(timestamps), 2):
        stamp = timestamps[number]
        log.append(batch(b"a", b"b", timestamp=stamp), now_ms=1)
        records += [(start + number, stamp), (start + number + 1, stamp + 1)]
    for wanted in range(53):
        expected = next(((o, t) for o, t in records if t >= wanted), None)
        assert log.lookup.offset_for_timestamp(wanted) == expected
    check_directory(log.directory)
    newest = max(stamp for _, stamp in records)
    assert log.lookup.max_timestamp() == next(r for r in records if r[1] == newest)
    log.close()


def test_an_empty_log_has_no_timestamps(open_log: OpenLog) -> None:
    log = open_log()
    assert log.lookup.offset_for_timestamp(0) is None
    assert log.lookup.max_timestamp() is None


def test_epochs_end_where_the_log_ends(open_log: OpenLog) -> None:
    log = open_log()
    log.append(batch(b"a"), now_ms=1)
    assert log.lookup.end_offset_for_epoch(0) == (0, 1)
    assert log.lookup.end_offset_for_epoch(1) == (-1, -1)
    assert log.lookup.end_offset_for_epoch(-1) == (-1, -1)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30))
@settings(max_examples=50)
def test_an_index_look_up_agrees_with_a_scan(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    path = str(tmp_path_factory.mktemp("index") / "i")
    index, reader = OffsetIndex(path, 100), OffsetIndex(path, 100)
    entries, offset, position = [], 100, 0
    for slot, (by_offset, by_position) in enumerate(steps):
        offset, position = offset + by_offset, position + by_position
        index.write_entry(slot, offset, position)
        entries.append((offset, position))
        for wanted in range(99, offset + 2):
            expected = [p for o, p in entries if o <= wanted]
            found = reader.lookup(wanted, len(entries))
            assert found == (expected[-1] if expected else 0)
    index.check(len(entries), position + 1)
    index.close()
    reader.close()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30))
@settings(max_examples=50)
def test_a_time_index_look_up_agrees_with_a_scan(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    index = TimeIndex(str(tmp_path_factory.mktemp("index") / "t"), 100)
    entries, timestamp, offset = [TimestampOffset(-1, 100)], 0, 100
    for slot, (by_time, by_offset) in enumerate(steps):
        timestamp, offset = timestamp + by_time, offset + by_offset
        index.write_entry(slot, timestamp, offset)
        entries.append(TimestampOffset(timestamp, offset))
    for wanted in range(-1, timestamp + 2):
        expected = [entry for entry in entries if entry.timestamp <= wanted][-1]
        assert index.lookup(wanted, len(entries) - 1) == expected
    assert index.last_entry(len(entries) - 1) == entries[-1]
    index.check(len(entries) - 1)
    index.close()


def test_batches_are_appended_at_offsets_that_are_given(open_log):
    log = open_log()
    assert log.append_at(batch(b"a", b"b"), 0, now_ms=0)
    assert not log.append_at(batch(b"a", b"b"), 0, now_ms=0)  # it is there
    # No producer is judged, and the records between two batches may be deleted.
    assert log.append_at(batch(b"c", producer=(7, 0, 5)), 10, now_ms=0)
    assert log.append_at(batch(b"d", producer=(7, 0, 0)), 11, now_ms=0)
    with pytest.raises(ApiError, match="ends at 12, within a batch from 11 to 12"):
        log.append_at(batch(b"d", b"e"), 11, now_ms=0)
    expected = [(0, b"a"), (1, b"b"), (10, b"c"), (11, b"d")]
    assert read_all(log) == expected
    kept = log.view.producers.entries[7].batches
    assert [each.base_offset for each in kept] == [10, 11]
    log.close()
    assert read_all(open_log()) == expected


def test_the_log_start_is_raised_as_far_as_the_log_reaches(open_log):
    log = open_log(cleanup_policy="compact")
    log.append_at(batch(b"a", b"b"), 0, now_ms=0)
    for offset, start in ((1, 1), (0, 1), (9, 2)):
        log.raise_log_start(offset)
        assert log.row.log_start_offset == start


def test_a_given_offset_may_be_far_behind_the_log(open_log):
    log = open_log()
    assert log.append_at(batch(b"a"), 7 << 32, now_ms=0)  # it begins there
    assert log.append_at(batch(b"b", producer=(7, 0, 0)), 9 << 32, now_ms=0)
    expected = [(7 << 32, b"a"), (9 << 32, b"b")]
    assert read_all(log, 7 << 32) == expected
    log.close()
    assert read_all(open_log(), 7 << 32) == expected
    check_directory(log.directory)
