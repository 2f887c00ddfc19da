"""`mpbroker serve --daemon`, as a script calls it: output read to its end."""

import os
import signal
import subprocess
import sys
import time

import pytest

SERVE = [sys.executable, "-m", "mpbroker", "serve", "--daemon"]


@pytest.fixture
def daemon(tmp_path):
    pid_file = tmp_path / "pid"
    done = subprocess.run(
        [*SERVE, "--pid-file", pid_file, "listeners=PLAINTEXT://127.0.0.1:0"]
        + [f"log.dirs={tmp_path / 'data'}"],
        capture_output=True,
        text=True,
    )
    yield done, pid_file
    if pid_file.exists():
        os.kill(int(pid_file.read_text()), signal.SIGTERM)
        deadline = time.monotonic() + 90
        while pid_file.exists() and time.monotonic() < deadline:
            os.sched_yield()


def test_it_returns_when_the_broker_serves_and_not_when_it_ends(daemon):
    done, pid_file = daemon
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    os.kill(int(pid_file.read_text()), 0)


def test_a_second_one_on_the_same_directory_is_refused_in_one_line(daemon, tmp_path):
    done = subprocess.run(
        [*SERVE, "listeners=PLAINTEXT://127.0.0.1:0"]
        + [f"log.dirs={tmp_path / 'data'}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("mpbroker: ")
    assert str(tmp_path / "data") in done.stderr
    assert done.stderr.count("\n") == 1
