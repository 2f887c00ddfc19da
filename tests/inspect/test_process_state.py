"""What the kernel says of a process, whatever its name is."""

from __future__ import annotations

import os

import pytest

from mpbroker.inspect.process_state import is_running, process_state


@pytest.mark.parametrize("state", ["D", "S", "R", "T"])
def test_a_state_is_read_behind_a_name_that_looks_like_one(tmp_path, state):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a) D (b) {state} 1 7 7 0 -1")
    assert process_state(7, str(tmp_path)) == state
    assert process_state(8, str(tmp_path)) == ""


def test_a_process_that_has_ended_does_not_run():
    assert is_running(os.getpid())
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process_state(pid) == "Z"
    assert not is_running(pid)
    os.waitpid(pid, 0)
    assert not is_running(pid)
