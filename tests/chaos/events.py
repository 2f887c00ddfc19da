"""What is done to a broker while its clients work."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.ipc.named_segment import read_telemetry, start_time
from tests.broker.load import children, states
from tests.chaos.peek import Peek
from tests.support.broker import Broker
from tests.support.patience import LONGEST_S

# A process that lived half a second is started again at once: the supervisor's limit on
# restarts is part of what is tested, and not what these kills are about.
_GOOD_LIFE_S: Final = 0.5
_SPREAD_S: Final = 0.1
_LOOK_S: Final = 0.005


class Event(Protocol):
    """Something that happens again and again, in the turns of the clients' loop."""

    name: str
    done: int
    wanted: int

    def turn(self, now: float) -> None:
        """Do what is due."""


def _tell_nobody(what: str) -> None:
    """Nobody wants to know."""


@dataclass
class Kills:
    """SIGKILL for processes of one role, each once it has served for a while.

    Attributes:
        note: told of each.
        done: how many were killed.
        respawn_s: from each kill to the successor's first turn, as far as it was seen:
            our own loop looks once in its turn.
    """

    broker: Broker
    role: str
    wanted: int
    rng: random.Random
    note: Callable[[str], None] = _tell_nobody
    done: int = 0
    respawn_s: list[float] = field(default_factory=list)
    _peek: Peek | None = None
    _due: dict[int, float] = field(default_factory=dict)  # by pid
    _dead: dict[int, tuple[int, float]] = field(default_factory=dict)  # by number
    _look_at: float = 0.0

    @property
    def name(self) -> str:
        return f"kill {self.role}"

    def turn(self, now: float) -> None:
        if self._peek is None:
            self._peek = Peek(self.broker.pid)
        if now < self._look_at:
            return
        serving = self._serving()
        if self.role not in ("handler", "processor"):
            self._look_at = now + _LOOK_S  # it costs more than a look at two words
        for number, (pid, killed_at) in list(self._dead.items()):
            if serving.get(number, pid) != pid:
                self.respawn_s.append(time.monotonic() - killed_at)
                del self._dead[number]
        for number, pid in serving.items():
            if number in self._dead:
                continue
            due = self._due.setdefault(
                pid, now + _GOOD_LIFE_S + self.rng.uniform(0, _SPREAD_S)
            )
            if now >= due and self.done < self.wanted:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self.note(f"{self.role} {number} killed")
                self._dead[number] = (pid, time.monotonic())
                del self._due[pid]
                self.done += 1

    def _serving(self) -> dict[int, int]:
        if self.role in ("handler", "processor"):
            assert self._peek is not None
            return self._peek.serving(self.role)
        return {
            number: pid for (_, number), pid in children(self.broker, self.role).items()
        }

    def close(self) -> None:
        if self._peek is not None:
            self._peek.close()
            self._peek = None


@dataclass
class SupervisorKills:
    """SIGKILL for the supervisor, and a new broker over the same data.

    Its children end with it; the service manager's part is ours. Each has answered
    somebody before it is killed, however slow the machine is.

    Attributes:
        answers: how many answers clients have had so far.
    """

    broker: Broker
    wanted: int
    rng: random.Random
    was_away: Callable[[], None]
    answers: Callable[[], int]
    done: int = 0
    respawn_s: list[float] = field(default_factory=list)
    name: str = "kill supervisor"
    _due: float = 0.0
    _answers: int = -1  # when this one began

    def turn(self, now: float) -> None:
        if not self._due:
            if self.answers() == self._answers:
                return
            self._due = now + self.rng.uniform(0.1, 0.5)
        if now < self._due or self.done >= self.wanted:
            return
        began = time.monotonic()
        os.kill(self.broker.pid, signal.SIGKILL)
        self.broker.kill()
        self.broker.start()
        self.respawn_s.append(time.monotonic() - began)
        self.done += 1
        self._due = 0.0
        self._answers = self.answers()
        self.was_away()

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class OwnDeaths:
    """Nothing is done: the processes kill themselves, and are counted."""

    broker: Broker
    wanted: int
    done: int = 0
    respawn_s: list[float] = field(default_factory=list)
    name: str = "self-kill at a line"
    _look_at: float = 0.0

    def turn(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = now + 0.05
            self.done = sum(child["restarts"] for child in states(self.broker))

    def close(self) -> None:
        """Nothing is held."""


def median_ms(times_s: list[float]) -> float:
    return statistics.median(times_s) * 1000 if times_s else 0.0


@dataclass
class Resizes:
    """Other numbers of handlers and processors, each once the last is settled.

    A thread asks the supervisor: it answers when it has time, and clients that waited
    with us for that would blame nobody for their pauses.
    """

    broker: Broker
    wanted: int
    rng: random.Random
    note: Callable[[str], None] = _tell_nobody
    done: int = 0
    respawn_s: list[float] = field(default_factory=list)
    name: str = "resize 1 to 8"
    _asker: ThreadPoolExecutor | None = None
    _client: ControlClient | None = None
    _is_resizing: Future[bool] | None = None
    _asked_at: float = 0.0
    _look_at: float = 0.0

    def turn(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + 4 * _LOOK_S
        if self._asker is None:
            self._asker = ThreadPoolExecutor(1)
        if self._is_resizing is not None:
            if not self._is_resizing.done():
                return
            if self._is_resizing.result():
                self._is_resizing = self._asker.submit(self._look)
                return
            self.respawn_s.append(now - self._asked_at)
            self._is_resizing = None
            self.done += 1
            self.note("resize settled")
        if self.done < self.wanted:
            handlers, processors = self.rng.randint(1, 8), self.rng.randint(1, 8)
            self.note(f"resize to {handlers} handlers, {processors} processors")
            self._is_resizing = self._asker.submit(self._ask, handlers, processors)
            self._asked_at = now

    def _ask(self, handlers: int, processors: int) -> bool:
        if self._client is None:
            self._client = ControlClient(control_socket(self.broker), 30.0)
        self._client.request("resize", handlers=handlers, processors=processors)
        return True

    def _look(self) -> bool:
        assert self._client is not None
        return bool(self._client.request("figures")["resizing"])

    def back_to(self, handlers: int, processors: int) -> None:
        """The sizes it was started with; return when they are reached, or cannot be."""
        deadline = time.monotonic() + LONGEST_S
        with ControlClient(control_socket(self.broker), 30.0) as client:
            client.request("resize", handlers=handlers, processors=processors)
            while client.request("figures")["resizing"]:
                if time.monotonic() > deadline:
                    return  # the census tells what is left
                time.sleep(_LOOK_S)

    def close(self) -> None:
        if self._asker is not None:
            self._asker.shutdown()
            self._asker = None
        if self._client is not None:
            self._client.__exit__()
            self._client = None


@dataclass
class Upgrades:
    """The same program in the place of the one that runs, again and again."""

    broker: Broker
    wanted: int
    done: int = 0
    respawn_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    name: str = "upgrade"
    _ctl: subprocess.Popen[str] | None = None
    _asked_at: float = 0.0

    def turn(self, now: float) -> None:
        if self._ctl is None:
            if self.done < self.wanted:
                self._asked_at = now
                self._ctl = subprocess.Popen(
                    [sys.executable, "-m", "mpbroker", "ctl", "upgrade"]
                    + ["--socket", control_socket(self.broker)]
                    + self._command(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
        elif self._ctl.poll() is not None:
            said, _ = self._ctl.communicate()
            if self._ctl.returncode:
                self.failed.append(said.strip())
            self.respawn_s.append(now - self._asked_at)
            self.done += 1
            self._ctl = None

    def _command(self) -> list[str]:
        """What takes the broker's place: the same again."""
        return []

    def close(self) -> None:
        if self._ctl is not None:
            self._ctl.kill()
            self._ctl.communicate()


@dataclass
class Generations(Upgrades):
    """Programs with another layout of shared memory, there and back again."""

    name: str = "another layout"

    def _command(self) -> list[str]:
        text = Path(f"/proc/{self.broker.pid}/cmdline").read_text()
        _, _, settings = text.rstrip("\0").partition("\0serve\0")
        arguments = settings.split("\0")
        if arguments[0] == "--ready-fd":
            del arguments[:2]
        layout = "none" if self.done % 2 else "layout"
        newcomer = [
            sys.executable,
            "-m",
            "tests.supervisor.upgrade.newcomer",
            "9.9",
            layout,
        ]
        return ["--", *newcomer, "serve", *arguments]


def curtail(event: Event) -> None:
    """Let what is under way be the last: there is no time for more.

    Layouts of memory go there and back again.
    """
    last = event.done + 1
    if isinstance(event, Generations):
        last += last % 2
    event.wanted = min(event.wanted, last)


def control_socket(broker: Broker) -> str:
    """The path of a broker's control socket."""
    state = read_telemetry(f"/mpbroker-{broker.pid}-{start_time(broker.pid)}")
    assert state is not None
    return str(state["control_socket"])


@dataclass
class Nothing:
    """Leave the broker in peace for a while: what its clients' pauses are by nature."""

    wanted: int
    done: int = 0
    name: str = "nothing"
    _next: float = 0.0

    def turn(self, now: float) -> None:
        """Count seconds."""
        if now >= self._next:
            self.done += bool(self._next)
            self._next = now + 1.0

    def close(self) -> None:
        """Nothing is held."""
