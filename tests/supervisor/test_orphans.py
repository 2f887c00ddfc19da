"""Whoever is process 1 has to bury the children of others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpbroker.supervisor.orphans import reap_orphans
from tests.support.children import wait_until

UNSHARE = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]


def can_unshare():
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


def ended_child():
    """A child that has ended and that nobody has waited for."""
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def test_those_of_others_are_reaped_and_ours_left_to_whoever_waits():
    # In a process of its own, which has no other children.
    pid = os.fork()
    if pid == 0:
        mine, orphan = ended_child(), ended_child()
        reaped = reap_orphans({mine})
        _, status = os.waitpid(mine, 0)
        reaped += reap_orphans({mine})
        left = reap_orphans({orphan})
        os._exit(0 if (reaped, left, status >> 8) == (1, 0, 7) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def name_of(pid):
    try:
        return Path("/proc", pid, "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # reaped in between


@pytest.mark.skipif(not can_unshare(), reason="no pid namespace can be made here")
def test_a_broker_that_is_process_1_leaves_no_zombies_and_stops(tmp_path):
    reader, writer = os.pipe()
    serve = [sys.executable, "-m", "mpbroker", "serve", "--ready-fd", str(writer)]
    serve += ["listeners=PLAINTEXT://127.0.0.1:0", f"log.dirs={tmp_path / 'data'}"]
    # Shared memory of its own, as in a container: there is one process 1 to a name.
    inside = ["sh", "-c", 'mount -t tmpfs none /dev/shm; exec "$@"', "sh", *serve]
    outer = subprocess.Popen(
        [*UNSHARE, *inside], pass_fds=[writer], stderr=subprocess.DEVNULL
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            assert json.loads(pipe.readline())["pid"] == 1
        children = Path("/proc", str(outer.pid), "task", str(outer.pid), "children")
        broker = int(children.read_text().split()[0])
        enter = ["nsenter", "-t", str(broker), "--pid", "--mount"]
        subprocess.run([*enter, "sh", "-c", "(sleep 0.1 &)"], check=True)
        own = Path("/proc", str(broker), "task", str(broker), "children")

        def has_orphans():
            return any(name_of(pid) == "sleep" for pid in own.read_text().split())

        wait_until(lambda: not has_orphans())
        os.kill(broker, signal.SIGTERM)
        assert outer.wait(30) == 0
    finally:
        outer.kill()
        outer.wait()
