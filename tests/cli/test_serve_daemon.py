"""`mpbroker serve --daemon`, as a script calls it: output read to its end."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.children import wait_until

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


def test_it_starts_with_standard_streams_that_are_closed(tmp_path):
    pid_file = tmp_path / "pid"
    command = [*SERVE, "--pid-file", pid_file, "listeners=PLAINTEXT://127.0.0.1:0"]
    command += [f"log.dirs={tmp_path / 'data'}"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command])
    pid = int(pid_file.read_text())
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not pid_file.exists())
    assert done.returncode == 0


def test_it_serves_although_who_asked_to_hear_of_it_has_gone(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "mpbroker", "serve", f"--ready-fd={writer}"]
    command += ["listeners=PLAINTEXT://127.0.0.1:0", f"log.dirs={tmp_path / 'data'}"]
    with log.open("w") as stderr:
        broker = subprocess.Popen(command, stderr=stderr, pass_fds=[writer])
    os.close(writer)
    try:
        wait_until(lambda: f"--ready-fd {writer}: Broken pipe" in log.read_text())
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(60) == 0
    finally:
        broker.kill()
        broker.wait()
    assert log.read_text().count("serving PLAINTEXT on") == 1
