"""Appending copies of another cluster's batches, which keep their offsets."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.copied_batch import empty_batch, validate_copied
from mpbroker.storage.log.partition_log import PartitionLog
from tests.storage.batches import batch, read_all
from tests.storage.conftest import OpenLog
from tests.storage.dump_checks import check_directory

_FAR = 3 << 32  # beyond what a segment's index can hold


def copy(log: PartitionLog, base_offset: int, *values: bytes) -> int:
    """Append a batch that keeps its offsets; return the offset of its first record."""
    made = batch(*values)
    at = made._replace(header=made.header._replace(base_offset=base_offset))
    return log.append(at, now_ms=1, keep_offset=True).base_offset


def bases(log: PartitionLog) -> list[int]:
    return sorted(int(path.stem) for path in Path(log.directory).glob("*.log"))


def test_records_keep_their_offsets_and_gaps_between_them(open_log: OpenLog) -> None:
    log = open_log()
    assert copy(log, 0, b"a", b"b") == 0
    assert copy(log, 7, b"c") == 7
    assert copy(log, 8, b"d") == 8
    expected = [(0, b"a"), (1, b"b"), (7, b"c"), (8, b"d")]
    assert read_all(log) == expected
    assert read_all(log, 4) == expected[2:]
    assert log.lookup.latest() == 9
    check_directory(log.directory)


def test_offsets_below_the_end_are_refused_and_nothing_is_appended(
    open_log: OpenLog,
) -> None:
    log = open_log()
    copy(log, 5, b"a", b"b")
    for base_offset in (-1, 0, 5, 6):
        with pytest.raises(ApiError) as refused:
            copy(log, base_offset, b"again")
        assert refused.value.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert read_all(log, 5) == [(5, b"a"), (6, b"b")]


def test_an_empty_log_begins_at_a_first_batch_that_is_far_away(
    open_log: OpenLog,
) -> None:
    log = open_log()
    assert copy(log, _FAR, b"a") == _FAR
    assert bases(log) == [_FAR]
    assert copy(log, _FAR + 2, b"b") == _FAR + 2
    assert read_all(log, _FAR + 1) == [(_FAR + 2, b"b")]
    for offset, start in ((_FAR, _FAR), (_FAR - 1, _FAR), (2 * _FAR, _FAR + 3)):
        log.raise_log_start(offset)
        assert log.lookup.earliest() == start
    assert log.lookup.latest() == _FAR + 3
    check_directory(log.directory)


def test_a_wide_gap_begins_a_new_segment(open_log: OpenLog) -> None:
    log = open_log()
    copy(log, 0, b"a")
    copy(log, _FAR, b"b")
    assert bases(log) == [0, _FAR]
    assert read_all(log) == [(0, b"a"), (_FAR, b"b")]
    assert read_all(log, 1) == [(_FAR, b"b")]
    check_directory(log.directory)


def test_a_log_that_begins_late_is_the_same_for_other_processes_and_after_a_start(
    open_log: OpenLog,
) -> None:
    log = open_log()
    other = open_log(row=log.row.index)
    copy(log, 0, b"a")
    assert read_all(other) == [(0, b"a")]
    copy(log, _FAR, b"b")
    copy(other, 2 * _FAR, b"c")
    expected = [(0, b"a"), (_FAR, b"b"), (2 * _FAR, b"c")]
    assert read_all(log) == read_all(other) == expected
    assert read_all(open_log()) == expected


def test_an_empty_batch_moves_the_end_and_has_no_records(open_log: OpenLog) -> None:
    log = open_log()
    copy(log, 0, b"a")
    filler = validate_copied(memoryview(bytearray(empty_batch(9))))
    assert log.append(filler, now_ms=1, keep_offset=True).last_offset == 9
    assert log.lookup.latest() == 10
    assert read_all(log) == [(0, b"a")]
    copy(log, 10, b"b")
    assert read_all(log, 1) == [(10, b"b")]
    check_directory(log.directory)


@pytest.mark.parametrize("first", [53, _FAR])
def test_offsets_before_the_first_record_are_read_as_a_gap(
    open_log: OpenLog, first: int
) -> None:
    """The source's cleaner has removed the first records, and its log begins at 0."""
    log = open_log()
    other = open_log(row=log.row.index)
    assert read_all(other) == []
    copy(log, first, b"a")
    copy(log, first + 4, b"b")
    expected = [(first, b"a"), (first + 4, b"b")]
    assert log.lookup.earliest() == 0
    assert read_all(log) == read_all(other) == read_all(open_log()) == expected
    assert log.reader.read(0, 1 << 20, min_one_batch=True, read_committed=True).length
