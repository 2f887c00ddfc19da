"""Long work tells on a terminal how far it is, and elsewhere nothing."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mpbroker import Producer
from mpbroker.cli.records import progress_line
from mpbroker.cli.records.progress_line import ProgressLine
from tests.support.patience import LONGEST_S


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    made = Clock()
    monkeypatch.setattr(progress_line, "time", made)
    return made


def test_it_begins_after_a_second_and_is_replaced_twice_a_second(clock):
    stream = Terminal()
    line = ProgressLine("sent", stream=stream)
    line.add(1000, 500_000)
    assert stream.getvalue() == ""
    clock.now = 101.0
    line.add(1000, 500_000)
    shown = "\r\033[K2,000 records sent, 1.0 MB, 1.0 MB/s"
    assert stream.getvalue() == shown
    clock.now = 101.4
    line.add(1, 1)
    assert stream.getvalue() == shown
    clock.now = 101.5
    line.add(1, 2_000_000)
    assert stream.getvalue().endswith("\r\033[K2,002 records sent, 3.0 MB, 2.0 MB/s")
    line.erase()
    assert stream.getvalue().endswith("MB/s\r\033[K")


@pytest.mark.parametrize(
    ("stream", "is_wanted"), [(io.StringIO(), True), (Terminal(), False)]
)
def test_it_shows_nothing_elsewhere_or_if_it_is_not_wanted(clock, stream, is_wanted):
    line = ProgressLine("sent", is_wanted=is_wanted, stream=stream)
    clock.now = 200.0
    line.add(1, 1)
    line.erase()
    assert stream.getvalue() == ""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal."""
    ends = pty.openpty()
    yield ends
    for fd in ends:
        os.close(fd)


def command(broker, *words: str) -> list[str]:
    words = (*words, "-b", broker.bootstrap, "--timeout", str(LONGEST_S))
    return [sys.executable, "-m", "mpbroker", *words]


def test_produce_shows_how_much_it_has_sent(make_broker, terminal, tmp_path):
    ours, theirs = terminal
    source = tmp_path / "lines"
    os.mkfifo(source)
    words = command(make_broker(), "produce", "-t", "events", "-l", str(source))
    with subprocess.Popen(words, stderr=theirs) as process:
        os.set_blocking(ours, False)
        seen = b""
        with source.open("wb", buffering=0) as pipe:
            while b" records sent, " not in seen:
                assert process.poll() is None
                pipe.write(b"line\n")
                try:
                    seen += os.read(ours, 4096)
                except BlockingIOError:
                    pass
        code = process.wait()
    seen += os.read(ours, 4096)
    assert code == 0, seen
    assert seen.endswith(b"\r\033[K")


def test_consume_shows_how_much_it_has_read_if_records_go_elsewhere(
    make_broker, terminal
):
    ours, theirs = terminal
    broker = make_broker()
    with Producer(bootstrap_servers=broker.bootstrap) as producer:
        producer.send("events", b"first").result()
        words = command(broker, "consume", "-t", "events", "-o", "beginning")
        with subprocess.Popen(
            words, stderr=theirs, stdout=subprocess.DEVNULL
        ) as process:
            os.set_blocking(ours, False)
            seen = b""
            while b" records read, " not in seen:
                assert process.poll() is None
                producer.send("events", b"value").result()
                try:
                    seen += os.read(ours, 4096)
                except BlockingIOError:
                    pass
            process.terminate()
