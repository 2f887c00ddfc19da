"""A file of lines may be a pipe, and holds nobody up."""

from __future__ import annotations

import contextlib
import os
import threading

from mpbroker.server import line_file
from mpbroker.server.line_file import LineFile


def write(log: LineFile, data: bytes) -> bool:
    """Whether it was done with; a handler would wait with it."""
    writer = threading.Thread(target=log.append, args=(data,), daemon=True)
    writer.start()
    writer.join(60)
    return not writer.is_alive()


def test_a_pipe_that_nobody_reads_holds_nobody_up(tmp_path, caplog):
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
