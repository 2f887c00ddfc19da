"""An upgrade that cannot begin, that is given up, or that a signal meets."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpbroker.supervisor.upgrade.manifest import Manifest
from mpbroker.supervisor.upgrade.renewal import Renewal
from mpbroker.supervisor.upgrade.replacement import UpgradeError, replace_program
from mpbroker.supervisor.upgrade.upgrade import Upgrade

COMMAND = [sys.executable]
KILLED = 9
TAKES_OVER = """
import os, signal, sys
from mpbroker.supervisor.signals import SignalSocket
from mpbroker.supervisor.upgrade.manifest import Manifest
from mpbroker.supervisor.upgrade.replacement import replace_program
signals = SignalSocket()
os.kill(os.getpid(), signal.SIGTERM)  # when nobody looks any more
says = "import signal; print([n.name for n in signal.sigpending()])"
manifest = Manifest(0, "", [], "", {}, 0, 0, 0, [], [], [], [], 0.0)
replace_program([sys.executable, "-c", says], manifest)
"""


class Rig:
    """An upgrade whose trials are not run, but ended by the test."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ended: list[Callable[[int], None]] = []
        self.forks = True
        self.killed = 0
        self.is_quiet = False
        self.upgrade = Upgrade(
            self._fork_aside,
            lambda: Manifest(0, "", [], "", {}, 0, 0, 0, [], [], [], [], 0.0),
            lambda: pytest.fail("nobody leaves"),
            self.said.append,
            lambda: self.is_quiet,
            set(),
        )

    def _fork_aside(
        self, run: Callable[[], None], ended: Callable[[int], None]
    ) -> Callable[[], None] | None:
        if not self.forks:
            ended(1 << 8)
            return None
        self.ended.append(ended)
        return self._kill

    def _kill(self) -> None:
        self.killed += 1


def test_one_that_cannot_begin_is_told_so_and_the_next_one_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(path: str, mode: int) -> None:
        raise OSError(28, "No space left on device")

    rig = Rig()
    gc.collect()  # what earlier tests have left open goes now
    fds = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", no_room)
        with pytest.raises(UpgradeError, match="No space left"):
            rig.upgrade.begin(COMMAND)
    assert not rig.upgrade.is_under_way
    assert len(os.listdir("/proc/self/fd")) <= fds
    rig.upgrade.begin(COMMAND)
    assert rig.said[-1] == "trying the newcomer"
    rig.ended[0](KILLED)


def test_one_whose_trial_cannot_be_forked_is_said_to_have_failed() -> None:
    rig = Rig()
    rig.forks = False
    rig.upgrade.begin(COMMAND)
    assert not rig.upgrade.is_under_way
    assert rig.said[-1].startswith("failed, and nothing has changed")


def test_without_room_to_hand_over_nobody_is_left_of_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    leaver = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    link = os.dup(0)
    manifest = Manifest(
        0, "", [], "", {}, 0, 0, 0, [], [], [], [], 0.0, link, leaver.pid
    )
    monkeypatch.setattr(os, "memfd_create", no_room)
    with leaver, pytest.raises(UpgradeError, match="Too many open files"):
        replace_program(["/no/such"], manifest)
    assert not os.path.exists(f"/proc/{leaver.pid}")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(link)


@pytest.mark.parametrize("status", [KILLED, 0])
def test_one_that_is_given_up_ends_with_its_trial(status: int) -> None:
    rig = Rig()
    rig.upgrade.begin(COMMAND)
    rig.upgrade.give_up("the broker drains")
    assert rig.killed == 1
    rig.ended[0](status)
    rig.is_quiet = True
    assert rig.upgrade.turn() is None
    assert rig.said[-1] == "failed, and nothing has changed: the broker drains"


def test_a_program_that_ends_well_but_is_no_broker_replaces_nobody() -> None:
    rig = Rig()
    rig.upgrade.begin(["true"])
    rig.ended[0](0)
    assert rig.said[-1] == (
        "failed, and nothing has changed: true ended without having served; name a"
        " command that starts mpbroker"
    )
    rig.is_quiet = True
    assert rig.upgrade.turn() is None


def test_one_that_is_given_up_after_its_trial_replaces_nothing() -> None:
    rig = Rig()
    rig.upgrade.begin(COMMAND)
    assert rig.upgrade._directory is not None
    Path(rig.upgrade._directory.path, "meta.properties").touch()  # it has served
    rig.ended[0](0)
    rig.upgrade.give_up("the broker drains")
    rig.is_quiet = True
    assert rig.upgrade.turn() is None
    assert rig.said[-1] == "failed, and nothing has changed: the broker drains"


def test_a_signal_that_nobody_has_seen_is_the_next_programs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TAKES_OVER], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['SIGTERM']\n"


class Drained:
    """A loop of a broker that accepts no connections any more."""

    def is_accepting(self) -> bool:
        return False


def test_a_renewal_of_a_broker_that_drains_asks_nobody_and_ends() -> None:
    reasons: list[str] = []
    listeners = [object()]  # that could not be dialled
    renewal = Renewal(Drained(), [], listeners, pytest.fail, reasons.append)  # type: ignore[arg-type]
    while not renewal.is_done:
        renewal.turn()
    assert reasons == [""]
