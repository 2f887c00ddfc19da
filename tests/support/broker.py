"""A real broker for a test: its own processes, port and data, and nothing left behind.

    with Broker(tmp_path / "data", {"num.io.threads": "2"}) as broker:
        client = connect(broker.bootstrap)

Readiness is what the broker writes to its ready fd; nothing is polled, no log is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from mpbroker.ipc.named_segment import read_telemetry, start_time
from tests.support.crashes import check_deaths, check_end
from tests.support.footprint import Footprint, session_processes
from tests.support.patience import LONGEST_S, Patience
from tests.support.promises import UnforgivableError

_LOG_TAIL_BYTES: Final = 6000

# A test run that is killed takes its brokers with it (where util-linux has setpriv).
_DIE_WITH_US: Final = (
    ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
)


class BrokerFailedError(Exception):
    """The broker did not start, did not stop, or left something behind."""


class LeftBehindError(BrokerFailedError, UnforgivableError):
    """The broker has stopped, and left processes or names behind."""


class Broker:
    """One broker that this test process owns.

    Attributes:
        data_dir: where its logs are, kept from one start to the next.
        log_path: what the broker's processes print; appended to by every start.
        bootstrap: HOST:PORT of its first listener, while it runs.
        listeners: HOST:PORT by listener name, while it runs.
        pass_fds: descriptors that it shall inherit, under their numbers here.
        expected_signals: signals by which its processes may end without having crashed.
    """

    def __init__(
        self,
        data_dir: Path,
        config: Mapping[str, object] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        command: list[str] | None = None,
    ) -> None:
        """Describe a broker; start() runs it.

        Args:
            data_dir: made by the broker if it is not there.
            config: Kafka's keys; any free port on loopback unless it names listeners.
            environ: variables to set on top of this process's own.
            command: what to run instead of this Python's `-m mpbroker`.
        """
        self.data_dir = data_dir
        self.config: dict[str, object] = {
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": data_dir,
            **(config or {}),
        }
        self.log_path = data_dir.with_name(data_dir.name + ".broker.log")
        self.bootstrap = ""
        self.listeners: dict[str, str] = {}
        self.pass_fds: list[int] = []
        self.expected_signals: set[int] = set()
        self._judged_bytes = 0  # of its log
        self._environ = dict(environ or {})
        self._command = [
            *_DIE_WITH_US,
            *(command or [sys.executable, "-m", "mpbroker"]),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._footprint = Footprint()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self.close()
        else:
            self.kill()  # do not hide the test's own failure behind another

    @property
    def pid(self) -> int:
        """The supervisor's process id, which is also its session's and group's."""
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def processes(self) -> dict[int, str]:
        """Return every process of this broker: a name by process id."""
        return session_processes(self.pid)

    def start(self) -> str:
        """Run the broker until it is ready; return its bootstrap address.

        Raises:
            BrokerFailedError: it ended, or was not ready in time; with its last words.
        """
        assert not self.is_running, "the broker is running already"
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        ready_fd, their_fd = os.pipe()
        arguments = [f"{key}={value}" for key, value in self.config.items()]
        try:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [*self._command, "serve", "--ready-fd", str(their_fd), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._environ},
                    pass_fds=[their_fd, *self.pass_fds],
                    start_new_session=True,
                )
        finally:
            os.close(their_fd)
        try:
            message = _read_line(ready_fd, LONGEST_S)
        finally:
            os.close(ready_fd)
        if not message:
            code = self._end_of_failed_start()
            raise BrokerFailedError(f"not ready, {code}; it said:\n{self.log_tail()}")
        self.listeners = dict(json.loads(message)["listeners"])
        self.bootstrap = next(iter(self.listeners.values()))
        self._await_children()
        self._footprint = Footprint.of_session(self.pid)
        return self.bootstrap

    def _await_children(self) -> None:
        """Wait until it has forked all children: the last it does when it serves.

        From then on a test finds each by its process id.
        """
        name = f"/mpbroker-{self.pid}-{start_time(self.pid)}"
        patience = Patience()
        # It cannot be read where the broker has a /dev/shm or process ids of its own.
        while self.is_running and (told := read_telemetry(name)) is not None:
            if all(child["pid"] or child["last_exit"] for child in told["children"]):
                return
            patience.check(f"all children of {name} are forked")
            time.sleep(0.005)

    def _end_of_failed_start(self) -> str:
        assert self._process is not None
        try:
            return f"exit code {self._process.wait(1)}"
        except subprocess.TimeoutExpired:
            self.kill()
            return f"after {LONGEST_S} s"

    def stop(self) -> None:
        """Stop by SIGTERM and expect exit code 0 and nothing left behind.

        Raises:
            BrokerFailedError: anything else; all its processes are dead then.
            UnforgivableError: one of its processes has crashed since its first start.
        """
        pid = self.pid
        assert self._process is not None
        # Names made after start count too.
        now = Footprint.of_session(pid)
        self._footprint.shared_memory |= now.shared_memory
        self._footprint.socket_files |= now.socket_files
        os.kill(pid, signal.SIGTERM)
        try:
            code = self._process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            left = self.processes()
            self.kill()
            raise BrokerFailedError(
                f"running {LONGEST_S} s after SIGTERM: {left}; it said:\n"
                f"{self.log_tail()}"
            ) from None
        left = session_processes(pid)
        self.kill()
        check_end(code, "the supervisor", self.expected_signals)
        self._check_deaths()
        names = self._footprint.left_behind()
        if code or left or names:
            kind = LeftBehindError if left or names else BrokerFailedError
            raise kind(
                f"exit code {code}, processes left: {left}, names left: {names}; "
                f"it said:\n{self.log_tail()}"
            )

    def kill(self) -> None:
        """SIGKILL every process of the broker, as a power cut would; return when gone.

        Does nothing if it is not running. Its names and data stay where they are.
        """
        if self._process is None:
            return
        supervisor = self._process.pid
        # A killed parent's child may have been forked before it died: look again.
        while session := session_processes(supervisor):
            # The supervisor first: it would record the others' deaths, and replace
            # them. Its pid is not the lowest where the machine's pids began anew.
            for pid in sorted(session, key=lambda each: each != supervisor):
                _kill_and_wait(pid)
        self._process.wait()
        self._process = None

    def close(self) -> None:
        """Stop if it runs; what a fixture calls at its end. Raises as stop() does."""
        if self._process is not None:
            self.stop()
        else:
            self._check_deaths()

    def black_boxes(self) -> str:
        """Return the last events of processes that died, as JSON; empty if unknown."""
        if not self.is_running:
            return ""
        with contextlib.suppress(OSError):
            state = read_telemetry(f"/mpbroker-{self.pid}-{start_time(self.pid)}")
            return json.dumps((state or {}).get("deaths", []), indent=1)
        return ""

    def _check_deaths(self) -> None:
        """Judge the deaths of its processes that it has logged, each once."""
        if self.log_path.exists():
            log = self.log_path.read_bytes()
            begin, self._judged_bytes = self._judged_bytes, len(log)
            check_deaths(log[begin:].decode(errors="replace"), self.expected_signals)

    def log_tail(self) -> str:
        """Return the end of what the broker printed."""
        try:
            data = self.log_path.read_bytes()
        except FileNotFoundError:
            return ""
        return data[-_LOG_TAIL_BYTES:].decode(errors="replace")


def _kill_and_wait(pid: int) -> None:
    """SIGKILL a process, ours to reap or not, and wait until it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _wait_until_readable(pidfd)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def _wait_until_readable(fd: int, timeout_s: float | None = None) -> bool:
    poll = select.poll()  # select() knows no descriptor above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _read_line(fd: int, timeout_s: float) -> bytes:
    """Read a line; nothing if it is not whole when the time or the pipe ends."""
    deadline = time.monotonic() + timeout_s
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not _wait_until_readable(fd, left):
            return b""
        chunk = os.read(fd, 4096)
        if not chunk:
            return b""
        data += chunk
    return data
