"""A file of lines, which may be a pipe, does not block its writer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading

from mpbroker.base import line_file
from mpbroker.base.line_file import LineFile


def write(log: LineFile, data: bytes) -> bool:
    """Whether it was done with; a handler would wait with it."""
    writer = threading.Thread(target=log.append, args=(data,), daemon=True)
    writer.start()
    writer.join(60)
    return not writer.is_alive()


def test_a_pipe_without_a_reader_does_not_block(tmp_path, caplog):
    path = tmp_path / "metrics"
    os.mkfifo(path)
    log = LineFile(str(path), "request.log.path")
    assert write(log, b"line\n") and write(log, b"line\n")
    assert caplog.text.count(f"request.log.path={path}") == 1


def test_a_pipe_is_written_to_until_its_reader_is_behind(tmp_path, caplog):
    path = tmp_path / "metrics"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = LineFile(str(path), "request.log.path")
    try:
        line = b"x" * 999 + b"\n"
        while not caplog.text:  # it is full
            assert write(log, line)
        read = b""
        while data := os.read(reader, 1 << 20):
            read += data
            if len(data) < 1 << 16:
                break
        assert read == line * (len(read) // len(line))
        assert write(log, b"the next\n")
        assert os.read(reader, 100) == b"the next\n"
    finally:
        os.close(reader)


def test_a_line_that_a_pipe_has_no_room_for_comes_whole_where_it_is_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(line_file, "_PATIENCE_S", 60)
    path = tmp_path / "metrics"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = LineFile(str(path), "request.log.path")
    line = b"x" * 300_000 + b"\n"
    writer = threading.Thread(target=log.append, args=(line,), daemon=True)
    writer.start()
    try:
        read, is_alive = b"", True
        while is_alive:
            is_alive = writer.is_alive()  # before what is the last look then
            with contextlib.suppress(BlockingIOError):
                read += os.read(reader, 1 << 20)
        assert read == line
    finally:
        os.close(reader)


def test_a_line_that_was_cut_takes_no_other_along(tmp_path, caplog):
    path = tmp_path / "metrics"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = LineFile(str(path), "request.log.path")
    try:
        assert write(log, b"x" * 300_000 + b"\n")
        assert "a line was cut" in caplog.text
        while len(os.read(reader, 1 << 20)) == 1 << 20:
            pass
        assert write(log, b"the next\n")
        assert os.read(reader, 100) == b"\nthe next\n"
    finally:
        os.close(reader)


def contents(path) -> list[bytes]:
    """Of the file and of what made way for it."""
    older = path.with_name(f"{path.name}.1")
    return [each.read_bytes() for each in (older, path) if each.exists()]


def test_a_full_file_makes_way_for_the_next_and_only_the_last_two_are_kept(tmp_path):
    path = tmp_path / "metrics"
    log = LineFile(str(path), "request.log.path", max_bytes=10)
    line = b"12345\n"
    sizes = []
    for _ in range(7):
        log.append(line)
        sizes.append([len(each) // len(line) for each in contents(path)])
    assert sizes == [[1], [2], [2, 1], [2, 2], [2, 1], [2, 2], [2, 1]]
    assert sorted(os.listdir(tmp_path)) == ["metrics", "metrics.1"]


def test_a_file_renamed_by_one_process_is_not_renamed_by_another(tmp_path, monkeypatch):
    path = tmp_path / "metrics"
    log, other = (
        LineFile(str(path), "request.log.path", max_bytes=10) for _ in range(2)
    )
    log.append(b"0123456789\n")
    real = line_file.fcntl.flock

    def too_late(fd: int, how: int) -> None:
        monkeypatch.setattr(line_file.fcntl, "flock", real)
        other.append(b"other's\n")
        real(fd, how)

    monkeypatch.setattr(line_file.fcntl, "flock", too_late)
    log.append(b"ours\n")
    assert contents(path) == [b"0123456789\n", b"other's\nours\n"]


def test_no_process_waits_for_one_that_was_stopped_during_the_rename(tmp_path):
    path = tmp_path / "metrics"
    log = LineFile(str(path), "request.log.path", max_bytes=10)
    log.append(b"0123456789\n")
    with path.open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert write(log, b"more\n")
    assert contents(path) == [b"0123456789\nmore\n"]
    log.append(b"the next\n")
    assert contents(path) == [b"0123456789\nmore\n", b"the next\n"]


def test_nothing_more_goes_into_a_full_file_that_cannot_be_moved(tmp_path, caplog):
    path = tmp_path / "metrics"
    (tmp_path / "metrics.1").mkdir()
    log = LineFile(str(path), "client.telemetry.log.path", max_bytes=10)
    for _ in range(5):
        log.append(b"0123456789\n")
    assert path.read_bytes() == b"0123456789\n"
    assert caplog.text.count(f"client.telemetry.log.path={path}") == 1
