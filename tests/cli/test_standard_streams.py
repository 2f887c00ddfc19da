"""Standard streams that are closed, full or read no more: a line, and no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpbroker.cli.exit_codes import ExitCode
from mpbroker.protocol.records.record_batch import RecordBatchBuilder

FULL = "/dev/full"  # every write to it fails with ENOSPC


def redirected(
    redirection: str, *arguments: str, unbuffered: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `mpbroker ARGUMENTS` with a shell's redirection; stderr is kept."""
    python = [sys.executable, *(["-u"] if unbuffered else []), "-m", "mpbroker"]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *python, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ("config", "list"),
        ("config", "list", "--format", "json"),
        ("completion", "bash"),
        ("serve", "--help"),
        ("--help",),
        ("--version",),
        ("consume", "-t", "one", "-e"),
        ("topic", "list"),
    ],
)
def test_a_full_disk_under_stdout_is_one_line(fake_broker, command, unbuffered):
    builder = RecordBatchBuilder()
    builder.append(1, b"key", b"value")
    fake_broker.append("one", 0, builder.build())
    done = redirected(f">{FULL}", *command, unbuffered=unbuffered)
    assert done.returncode == ExitCode.ERROR
    assert done.stderr == "mpbroker: standard output: no space left on device\n"


def test_a_dump_to_a_full_disk_does_not_blame_the_segment(tmp_path: Path):
    segment = tmp_path / f"{0:020}.log"
    segment.touch()
    done = redirected(f">{FULL}", "dump", str(segment))
    assert done.returncode == ExitCode.ERROR
    assert done.stderr == "mpbroker: standard output: no space left on device\n"


@pytest.mark.parametrize("command", [("config", "list"), ("topic", "list")])
def test_a_closed_stdout_is_one_line(fake_broker, command):
    done = redirected(">&-", *command)
    assert done.returncode == ExitCode.ERROR
    assert done.stderr == "mpbroker: standard output: bad file descriptor\n"


def test_a_closed_stdin_is_no_empty_input(fake_broker):
    done = redirected("<&-", "produce", "-t", "one")
    assert done.returncode == ExitCode.ERROR
    assert done.stderr == "mpbroker: cannot read input: Bad file descriptor\n"


@pytest.mark.parametrize("redirection", ["2>&-", f"2>{FULL}", "<&- >&- 2>&-"])
def test_an_error_that_nobody_can_read_keeps_its_exit_code(redirection):
    done = redirected(redirection, "topic", "list", "-b", "127.0.0.1:1")
    assert (done.returncode, done.stderr) == (ExitCode.UNAVAILABLE, "")


def test_help_that_nobody_reads_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-u", "-m", "mpbroker", "serve", "--help"],
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (ExitCode.OK, b"")
