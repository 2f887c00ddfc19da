"""Starting from what is on disk: after a clean stop, and after none."""

import os
import shutil
from pathlib import Path
from zlib import crc32

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files.leader_epochs import EpochEntry, read_leader_epochs
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.log.partition_log import PartitionLog
from tests.storage.batches import batch, read_all
from tests.storage.conftest import OpenLog
from tests.storage.dump_checks import check_directory

_CONFIG = {"segment_bytes": 1_500, "index_interval_bytes": 200}
_CLEAN = LoadHints(clean=True)


def fill(log: PartitionLog, count: int) -> list[tuple[int, bytes]]:
    """Append records of different sizes and timestamps; return them."""
    for number in range(count):
        value = b"%d." % number * (number % 7 + 1)
        log.append(batch(value, timestamp=number * 37 % 101), now_ms=1)
    return read_all(log)


def files(directory: Path, pattern: str = "*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob(pattern))}


@pytest.mark.parametrize("clean", [True, False])
def test_a_log_is_the_same_after_a_start(open_log: OpenLog, clean: bool) -> None:
    log = open_log(**_CONFIG)
    records = fill(log, 60)
    before = log.view.state()
    again = open_log(hints=LoadHints(clean=clean), **_CONFIG)
    assert again.view.state()[:9] == before[:9]
    assert read_all(again) == records
    assert again.row.durable_end_offset == 60


def test_a_torn_tail_is_cut_at_whichever_byte_it_was_torn(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log(index_interval_bytes=100)
    records = fill(log, 12)
    state = log.view.state()
    path = log.reader.read(0, 1, min_one_batch=True).segment_path
    ends = [log.reader.read(n, 1, min_one_batch=True).position for n in range(12)]
    ends.append(state.active_size)
    whole = files(tmp_path / "t-0")
    for size in range(ends[9], state.active_size):
        for name, content in whole.items():
            (tmp_path / "t-0" / name).write_bytes(content)
        os.truncate(path, size)
        survivors = sum(end <= size for end in ends[1:])
        again = open_log(index_interval_bytes=100)
        assert again.lookup.latest() == survivors
        assert os.stat(path).st_size == ends[survivors]
        assert read_all(again) == records[:survivors]
        check_directory(again.directory)
        assert again.append(batch(b"new"), now_ms=1).base_offset == survivors


def test_a_byte_changed_in_the_tail_ends_the_log_before_its_batch(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log()
    records = fill(log, 6)
    start = log.reader.read(5, 1, min_one_batch=True).position
    path = Path(log.reader.read(5, 1, min_one_batch=True).segment_path)
    content = path.read_bytes()
    # The first 8 and bytes 12-15 lie outside the checksum: offset and leader epoch.
    for position in [*range(start + 8, start + 12), *range(start + 16, len(content))]:
        changed = bytearray(content)
        changed[position] ^= 0x40
        path.write_bytes(changed)
        assert read_all(open_log()) == records[:5]


def test_a_damaged_batch_that_the_index_ends_at_does_not_take_those_before_it(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log(index_interval_bytes=100)
    records = fill(log, 40)
    index = log.view.segments.get(0).offset_index
    entries = log.view.state().index_entries
    index.load(entries)
    damaged, position = index.entry(entries - 1)
    path = tmp_path / "t-0" / f"{0:020d}.log"
    content = bytearray(path.read_bytes())
    content[position + 70] ^= 1
    path.write_bytes(content)
    # As after a clean stop whose checkpoints were lost.
    again = open_log(index_interval_bytes=100, hints=LoadHints(clean=True))
    assert again.lookup.latest() == damaged
    assert read_all(again) == records[:damaged]
    assert again.append(batch(b"new"), now_ms=1).base_offset == damaged


def test_it_is_said_what_is_cut_below_the_point_up_to_where_all_was_on_disk(
    open_log: OpenLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That is then looked at once more, when there is nothing to be cut any more."""
    log = open_log()
    fill(log, 3)
    end = log.close_cleanly()
    path = tmp_path / "t-0" / f"{0:020d}.log"
    content = bytearray(path.read_bytes())
    content[30] ^= 1
    path.write_bytes(content)
    again = open_log(hints=LoadHints(clean=True, recovery_point=end, closed_end=end))
    assert again.lookup.latest() == 0
    assert f"cut off {len(content)} bytes" in caplog.text


def test_a_log_whose_first_batch_is_damaged_is_appended_to(
    open_log: OpenLog, tmp_path: Path
) -> None:
    """The batch was to say how old the segment is."""
    log = open_log(index_interval_bytes=100)
    fill(log, 10)
    end = log.close_cleanly()
    path = tmp_path / "t-0" / f"{0:020d}.log"
    content = bytearray(path.read_bytes())
    content[8] ^= 0x80  # its length is negative
    path.write_bytes(content)
    hints = LoadHints(clean=True, recovery_point=end, closed_end=end)
    again = open_log(index_interval_bytes=100, hints=hints)
    assert again.append(batch(b"new"), now_ms=1).base_offset == end
    assert again.lookup.latest() == end + 1


def test_bytes_of_an_append_that_was_not_committed_are_not_taken_for_batches(
    open_log: OpenLog,
) -> None:
    log = open_log()
    fill(log, 3)
    path = log.reader.read(0, 1, min_one_batch=True).segment_path
    with open(path, "r+b") as file:
        first = file.read(log.view.state().active_size)
        file.write(first)  # whole batches with good checksums, but offsets long used
    assert open_log().lookup.latest() == 3


def test_segments_after_a_torn_one_are_dropped(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log(**_CONFIG)
    records = fill(log, 60)
    logs = sorted((tmp_path / "t-0").glob("*.log"))
    assert len(logs) > 3
    middle = logs[1]
    os.truncate(middle, middle.stat().st_size - 1)
    again = open_log(**_CONFIG)
    end = int(logs[2].stem) - 1
    assert read_all(again) == records[:end]
    assert [p.name for p in sorted((tmp_path / "t-0").glob("*.log"))] == [
        logs[0].name,
        middle.name,
    ]


def test_nothing_below_the_recovery_point_is_read_again(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log(**_CONFIG)
    records = fill(log, 60)
    first = sorted((tmp_path / "t-0").glob("*.log"))[0]
    changed = bytearray(first.read_bytes())
    changed[-1] ^= 1
    first.write_bytes(changed)
    trusted = open_log(hints=LoadHints(recovery_point=60), **_CONFIG)
    assert trusted.lookup.latest() == len(records)
    assert open_log(**_CONFIG).lookup.latest() < 60


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
def test_lost_or_damaged_indexes_are_rebuilt_as_they_were(
    open_log: OpenLog, tmp_path: Path, suffix: str
) -> None:
    log = open_log(**_CONFIG)
    records = fill(log, 60)
    directory = tmp_path / "t-0"
    shutil.copytree(directory, tmp_path / "before")
    whole = files(directory, f"*.{suffix}")
    for name in whole:
        (directory / name).unlink()
    for hints in (_CLEAN, LoadHints()):
        assert read_all(open_log(hints=hints, **_CONFIG)) == records
        assert files(directory, f"*.{suffix}") == whole
    for name, content in whole.items():
        (directory / name).write_bytes(content[::-1] + b"odd")
    assert read_all(open_log(**_CONFIG)) == records
    assert files(directory, f"*.{suffix}") == whole


def test_a_log_start_offset_survives_by_its_checkpoint(open_log: OpenLog) -> None:
    log = open_log()
    fill(log, 10)
    again = open_log(hints=LoadHints(log_start_offset=4))
    assert again.lookup.earliest() == 4
    assert len(read_all(again)) == 6
    with pytest.raises(ApiError) as refused:
        again.reader.read(3, 100, min_one_batch=True)
    assert refused.value.error_code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_log_whose_files_vanished_starts_where_it_was_to_start(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log(hints=LoadHints(log_start_offset=500))
    assert (log.lookup.earliest(), log.lookup.latest()) == (500, 500)
    log.append(batch(b"a"), now_ms=1)
    ahead = open_log(hints=LoadHints(log_start_offset=900))
    assert (ahead.lookup.earliest(), ahead.lookup.latest()) == (900, 900)
    assert [p.name for p in (tmp_path / "t-0").glob("*.log")] == [f"{900:020d}.log"]


def test_leftovers_of_every_kind_are_removed_at_start(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log()
    records = fill(log, 5)
    directory = tmp_path / "t-0"
    stray = f"{3:020d}"
    for name in (
        f"{stray}.log.deleted",
        f"{stray}.index.deleted",
        f"{0:020d}.log.cleaned",
        f"{0:020d}.log.swap",  # of the same, incomplete, cleaning
        "partition.metadata.4242.tmp",
    ):
        (directory / name).write_bytes(b"x")
    assert read_all(open_log()) == records
    names = {path.name for path in directory.iterdir()}
    assert names == {f"{0:020d}{suffix}" for suffix in (".log", ".index", ".timeindex")}


def test_a_batch_larger_than_the_buffer_of_the_check_is_checked(
    open_log: OpenLog,
) -> None:
    log = open_log()
    log.append(batch(b"a"), now_ms=1)
    log.append(batch(os.urandom(3_000_000)), now_ms=1)
    log.append(batch(b"b"), now_ms=1)
    assert open_log().lookup.latest() == 3
    path = log.reader.read(0, 1, min_one_batch=True).segment_path
    with open(path, "r+b") as file:
        file.seek(2_500_000)
        file.write(b"changed")
    assert open_log().lookup.latest() == 1


def test_leader_epochs_of_another_broker_are_carried_on(
    open_log: OpenLog, tmp_path: Path
) -> None:
    (tmp_path / "t-0").mkdir()
    directory = str(tmp_path / "t-0")
    (tmp_path / "t-0/leader-epoch-checkpoint").write_text("0\n2\n2 0\n5 3\n")
    assert read_leader_epochs(directory).entries == [EpochEntry(2, 0), EpochEntry(5, 3)]
    log = open_log()
    fill(log, 4)
    assert log.view.leader_epoch == 5
    assert log.lookup.end_offset_for_epoch(5) == (5, 4)
    assert log.lookup.end_offset_for_epoch(3) == (2, 3)
    assert log.lookup.end_offset_for_epoch(1) == (1, 0)
    assert log.lookup.end_offset_for_epoch(6) == (-1, -1)


@pytest.mark.parametrize("content", [b"", b"1\n0\n", b"0\n2\n1 1\n", b"0\n1\nx y\n"])
def test_a_torn_epoch_file_counts_as_one_epoch(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "leader-epoch-checkpoint").write_bytes(content)
    assert read_leader_epochs(str(tmp_path)).latest == 0


def test_an_empty_roll_that_appends_went_past_is_dropped(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log()
    records = fill(log, 6)
    log.close()
    for suffix in (".log", ".index", ".timeindex"):
        (tmp_path / "t-0" / f"{4:020d}{suffix}").touch()
    again = open_log(hints=LoadHints(recovery_point=5))
    assert read_all(again) == records
    assert [p.name for p in (tmp_path / "t-0").glob("*.log")] == [f"{0:020d}.log"]
    # The same left over while the broker lives: the next roll removes it.
    (tmp_path / "t-0" / f"{7:020d}.log").write_bytes(b"torn")
    again.append(batch(b"6"), now_ms=1)
    again.append(batch(b"7"), now_ms=1)
    with again.row.locked():
        again.roll_locked(1)
    again.append(batch(b"8"), now_ms=1)
    expected = [*records, (6, b"6"), (7, b"7"), (8, b"8")]
    assert read_all(again) == expected == read_all(open_log())


def test_batches_of_an_old_format_are_refused_and_not_cut(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log()
    fill(log, 3)
    path = Path(log.reader.read(0, 1, min_one_batch=True).segment_path)
    body = b"\x01\x00" + bytes(8) + b"\xff\xff\xff\xff" + b"\x00\x00\x00\x01v"
    old = (3).to_bytes(8, "big") + (len(body) + 4).to_bytes(4, "big")
    path.write_bytes(path.read_bytes() + old + crc32(body).to_bytes(4, "big") + body)
    size = path.stat().st_size
    with pytest.raises(ApiError, match="message format 1") as refused:
        open_log().lookup.latest()
    assert refused.value.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    assert path.stat().st_size == size


@pytest.mark.parametrize("clean", [True, False])
def test_a_recovery_forces_names_to_disk_as_well(
    open_log: OpenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    """Before a crash nothing was synced, and no sync after it looks at old names."""
    log = open_log(**_CONFIG)
    records = fill(log, 60)
    log.close()
    again = open_log(hints=LoadHints(clean=clean), **_CONFIG)
    named: dict[str, list[str]] = {}
    fsync = os.fsync

    def note(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.isdir(path):
            named[path] = sorted(os.listdir(path))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    assert again.view.state().log_end_offset == len(records)
    assert again.row.durable_end_offset == len(records)
    names = sorted(path.name for path in (tmp_path / "t-0").iterdir())
    both = {str(tmp_path / "t-0"): names, str(tmp_path): ["t-0"]}
    assert named == ({} if clean else both)
