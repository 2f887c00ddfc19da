"""The brokers that a benchmark talks to: ours, another checkout's, any other."""

from __future__ import annotations

import compileall
import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.bench import wire
from tests.bench.processes import ProcessTree, listening_pid

T = TypeVar("T")

SCRATCH_VARIABLE: Final = "MPBROKER_BENCH_DIR"
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 15.0


class BrokerStartError(Exception):
    """The broker did not come up; the message carries what it said."""


class Broker:
    """A broker that answers, and its processes."""

    def __init__(self, label: str, address: tuple[str, int], root_pid: int) -> None:
        self.label = label
        self.address = address
        self.tree = ProcessTree(root_pid)
        self._prepared: dict[str, Any] = {}
        # Apart from what an earlier run left on a broker that outlives us.
        self._numbers = itertools.count(time.time_ns() // 1_000_000)

    @property
    def bootstrap(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def connect(self) -> wire.Connection:
        return wire.Connection(self.address)

    def once(self, what: str, prepare: Callable[[], T]) -> T:
        """Return `prepare()`, called once in the life of this broker."""
        if what not in self._prepared:
            self._prepared[what] = prepare()
        prepared: T = self._prepared[what]
        return prepared

    def next_number(self) -> int:
        """Return a number that no topic of this broker was named after yet."""
        return next(self._numbers)

    def topic(
        self, name: str, partitions: int = 1, config: dict[str, str] | None = None
    ) -> str:
        """Return the name of a topic that exists from now on."""

        def create() -> str:
            with self.connect() as connection:
                connection.create_topic(name, partitions, config)
                _wait_for_leaders(connection, name, partitions)
            return name

        return self.once(f"topic {name}", create)


def _wait_for_leaders(connection: wire.Connection, topic: str, partitions: int) -> None:
    # Apache Kafka answers CreateTopics before its partitions can be used.
    deadline = time.monotonic() + START_TIMEOUT_S
    for partition in range(partitions):
        while True:
            try:
                connection.end_offset(topic, partition)
                break
            except wire.AnswerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


class BrokerSource:
    """Where a broker comes from."""

    label: str
    can_start = True
    # Whether it is faster when it has been at work for a while, as a JVM is.
    warms_up = False

    @contextlib.contextmanager
    def broker(self) -> Iterator[Broker]:
        """Yield a broker that answers; stop it afterwards if we started it.

        Raises:
            BrokerStartError: it does not answer.
        """
        raise NotImplementedError


class RunningBroker(BrokerSource):
    """A broker that somebody else started on this machine."""

    can_start = False

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.label = address
        self._address = (socket.gethostbyname(host or "127.0.0.1"), int(port))

    @contextlib.contextmanager
    def broker(self) -> Iterator[Broker]:
        wait_for_answer(self._address, lambda: None)
        root = listening_pid(self._address[1])
        yield Broker(self.label, self._address, root)


class CommandBroker(BrokerSource):
    """A broker started by a command line; `{port}` and `{dir}` are filled in."""

    def __init__(self, command: str, label: str | None = None) -> None:
        self.label = label or shlex.split(command)[0].rpartition("/")[2]
        self._command = command

    @contextlib.contextmanager
    def broker(self) -> Iterator[Broker]:
        with scratch_directory() as directory:
            port = free_port()
            command = self._command.format(port=port, dir=directory)
            with process_in(directory, shlex.split(command)) as process:
                address = ("127.0.0.1", port)
                wait_for_answer(address, lambda: why_gone(process, directory))
                yield Broker(self.label, address, process.pid)


class CheckoutBroker(BrokerSource):
    """mpbroker from this checkout or another, run by the present interpreter."""

    def __init__(
        self,
        checkout: Path,
        label: str = "mpbroker",
        settings: tuple[str, ...] = (),
        interpreter: str = sys.executable,
    ) -> None:
        self.label = label
        self._checkout = checkout.resolve()
        # As an installation has it. Where PYTHONDONTWRITEBYTECODE is set, a start would
        # else be measured with a compilation of every module that was edited.
        compileall.compile_dir(self._checkout / "mpbroker", quiet=2)
        self._settings = settings
        self._interpreter = interpreter

    @contextlib.contextmanager
    def broker(self) -> Iterator[Broker]:
        with scratch_directory() as directory, contextlib.ExitStack() as stack:
            read_end, write_end = os.pipe()
            ready = stack.enter_context(open(read_end))
            try:
                process = stack.enter_context(
                    process_in(
                        directory,
                        self.command(directory, write_end),
                        self._checkout,
                        (write_end,),
                    )
                )
            finally:
                os.close(write_end)
            line = ready.readline()
            if not line:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                raise BrokerStartError(
                    why_gone(process, directory) or "--ready-fd closed, nothing said"
                )
            host, _, port = json.loads(line)["listeners"]["PLAINTEXT"].rpartition(":")
            yield Broker(self.label, (host, int(port)), process.pid)

    def command(self, directory: Path, ready_fd: int) -> list[str]:
        """Return the command line that serves from `directory`."""
        return [
            self._interpreter,
            "-m",
            "mpbroker",
            "serve",
            f"--ready-fd={ready_fd}",
            "listeners=PLAINTEXT://127.0.0.1:0",
            f"log.dirs={directory / 'log'}",
            *self._settings,
        ]


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a directory for a broker's logs, where --dir says."""
    root = os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir()
    directory = Path(tempfile.mkdtemp(prefix="mpbroker-bench-", dir=root))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment, for brokers that are started meanwhile."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def process_in(
    directory: Path,
    command: list[str],
    cwd: Path | None = None,
    pass_fds: tuple[int, ...] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    with open(directory / "broker.out", "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            pass_fds=pass_fds,
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a broker we started: SIGTERM, and SIGKILL if that takes too long."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def why_gone(process: subprocess.Popen[bytes], directory: Path) -> str | None:
    """Return what a broker that exited had said, or None while it runs."""
    if process.poll() is None:
        return None
    said = (directory / "broker.out").read_text(errors="replace")[-2000:]
    return f"exit code {process.returncode}\n{said}"


def wait_for_answer(
    address: tuple[str, int],
    why_gone: Callable[[], str | None],
    timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Return once the broker has answered ApiVersions.

    Raises:
        BrokerStartError: it went away, as `why_gone` tells, or the time is up.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with wire.Connection(address, 5.0) as connection:
                connection.ask(wire.api_versions())
                return
        except OSError as error:
            reason = why_gone()
            if reason is None and time.monotonic() > deadline:
                reason = f"no answer within {timeout_s:.0f} s: {error}"
            if reason is not None:
                raise BrokerStartError(reason) from None
        time.sleep(0.001)


def free_port() -> int:
    """Return a TCP port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
