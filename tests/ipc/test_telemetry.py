"""The named segment: found by outsiders, never torn, and gone with its broker."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from mpbroker.ipc import posix_memory
from mpbroker.ipc.errors import IpcError
from mpbroker.ipc.named_segment import (
    Telemetry,
    brokers,
    read_telemetry,
    remove_leftovers,
    start_time,
)
from tests.support.children import Child, die, running, wait_until

# None where there is none: it has no wheels for Python 3.14.
POSIX_IPC = posix_memory.posix_ipc


@pytest.fixture(autouse=True, params=["posix_ipc", "files"])
def library(request, monkeypatch):
    """Make each test with posix_ipc, and as without it; return the library or None."""
    if request.param == "posix_ipc" and POSIX_IPC is None:
        pytest.skip("no posix_ipc")
    found = POSIX_IPC if request.param == "posix_ipc" else None
    monkeypatch.setattr(posix_memory, "posix_ipc", found)
    return found


@pytest.fixture
def telemetry():
    made = Telemetry()
    yield made
    made.close()


def names() -> set[str]:
    return {f"/{name}" for name in os.listdir("/dev/shm")}


def test_a_name_says_which_process_and_when_it_was_started(telemetry):
    pid = os.getpid()
    assert telemetry.name == f"/mpbroker-{pid}-{start_time(pid)}"
    assert telemetry.name in names()
    assert telemetry.name in brokers()


def test_what_was_published_last_is_read(telemetry):
    assert read_telemetry(telemetry.name) is None  # nothing yet
    telemetry.publish({"pid": 1, "children": [{"id": 0}]})
    telemetry.publish({"pid": 2})
    assert read_telemetry(telemetry.name) == {"pid": 2}


def test_a_reader_beside_a_writer_sees_old_or_new_and_nothing_else(telemetry):
    texts = [{"n": n, "fill": f"{n}" * (n * 40)} for n in range(1, 10)]

    def write():
        while True:
            for state in texts:
                telemetry.publish(state)

    seen = set()

    def look():
        state = read_telemetry(telemetry.name)
        if state is not None:  # it writes without a pause, as no broker does
            assert state in texts
            seen.add(state["n"])
        return len(seen) > 3

    with running(write):
        wait_until(look)


def test_a_reader_waits_for_a_writer_that_was_interrupted(telemetry):
    telemetry.publish({"pid": 1})
    telemetry._words[2] += 1

    def go_on():
        wait_until(lambda: telemetry._words[0])  # give the reader a head start
        telemetry._words[2] += 1

    with running(go_on):
        assert read_telemetry(telemetry.name) == {"pid": 1}


def test_a_writer_that_died_half_way_leaves_nothing_to_be_read(telemetry):
    telemetry.publish({"pid": 1})

    def write():
        telemetry._words[2] += 1
        die()

    Child(write).wait()
    assert read_telemetry(telemetry.name) is None


def test_a_name_that_does_not_exist_reads_as_none():
    assert read_telemetry("/mpbroker-1-1") is None


def test_a_segment_of_another_kind_reads_as_none():
    name = f"/mpbroker-test-{os.getpid()}"
    path = Path(f"/dev/shm{name}")
    path.write_bytes(bytes(4096))
    try:
        assert read_telemetry(name) is None
        os.truncate(path, 1 << 20)
        assert read_telemetry(name) is None
    finally:
        path.unlink()


def test_more_state_than_there_is_room_for_is_an_error_and_changes_nothing(telemetry):
    telemetry.publish({"pid": 1})
    with pytest.raises(IpcError, match="65504"):
        telemetry.publish({"text": "x" * 70_000})
    assert read_telemetry(telemetry.name) == {"pid": 1}


def test_closing_removes_the_name_and_may_be_done_twice(telemetry):
    telemetry.close()
    assert telemetry.name not in names()
    telemetry.close()


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_kept(telemetry):
    made = os.pipe()

    def live_briefly():
        os.write(made[1], Telemetry().name.encode())
        die()

    child = Child(live_briefly)
    dead = os.read(made[0], 100).decode()
    child.wait()
    for fd in made:
        os.close(fd)
    assert dead in names() and dead not in brokers()
    assert dead in remove_leftovers()
    assert dead not in names()
    assert telemetry.name in names()


def test_who_is_dead_and_waited_for_by_nobody_is_dead():
    made = os.pipe()

    def live_briefly():
        os.write(made[1], Telemetry().name.encode())
        die()

    child = Child(live_briefly)
    dead = os.read(made[0], 100).decode()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert start_time(child.pid)  # a zombie
        assert dead not in brokers()
        assert dead in remove_leftovers()
    finally:
        child.wait()
        for fd in made:
            os.close(fd)


def test_a_process_id_that_was_given_out_again_does_not_keep_a_name_alive(telemetry):
    pid = os.getpid()
    old = f"/mpbroker-{pid}-{start_time(pid) - 1}"
    path = Path(f"/dev/shm{old}")
    path.write_bytes(bytes(4096))
    try:
        assert old not in brokers()
        assert old in remove_leftovers()
    finally:
        path.unlink(missing_ok=True)


def test_a_broker_whose_process_ids_are_others_keeps_its_name():
    """As of two containers with one /dev/shm: its name tells another nothing."""
    made = os.pipe()
    own = f"/mpbroker-{2**22 + 1}-1"

    def live():
        kept = Telemetry()
        os.rename(f"/dev/shm{kept.name}", f"/dev/shm{own}")
        os.write(made[1], b".")
        signal.pause()

    with running(live):
        os.read(made[0], 1)
        assert own in names() and own not in brokers()
        assert own not in remove_leftovers()
        assert own in names()
    remove_leftovers()
    assert own not in names()
    for fd in made:
        os.close(fd)


def test_a_link_that_somebody_made_is_not_followed_and_hinders_no_start(tmp_path):
    made = Telemetry()
    made.publish({"pid": 1})
    theirs = Path(shutil.copy(f"/dev/shm{made.name}", tmp_path))
    made.close()
    name = f"/mpbroker-{2**22 + 1}-1"
    link = Path(f"/dev/shm{name}")
    link.symlink_to(theirs)
    try:
        assert read_telemetry(name) is None
        assert name not in remove_leftovers()
    finally:
        link.unlink()


def test_a_dev_shm_that_may_not_be_written_is_said(monkeypatch, library):
    def refuse(*_, **__):
        if library is not None:
            raise POSIX_IPC.PermissionsError("No permission to access this segment")
        raise PermissionError(errno.EACCES, "Permission denied")

    if library is not None:
        monkeypatch.setattr(library, "SharedMemory", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(IpcError, match=r"Permission denied.*/dev/shm"):
        Telemetry()


def test_names_that_only_look_like_ours_are_left_alone():
    names_of_others = [
        f"/mpbroker-x{os.getpid()}-1",
        f"/mpbrokers-{2**22 + 1}-1",
        f"/mpbroker-{2**22 + 1}",
    ]
    for name in names_of_others:
        Path(f"/dev/shm{name}").write_bytes(bytes(10))
    try:
        remove_leftovers()
        assert set(names_of_others) <= names()
    finally:
        for name in names_of_others:
            os.unlink(f"/dev/shm{name}")


def test_no_process_has_no_start_time():
    assert start_time(2**22 + 1) == 0
    assert start_time(os.getpid()) > 0
