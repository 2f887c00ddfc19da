"""A pytest plug-in: a real broker for tests of code that talks to Kafka.

    def test_my_code(mpbroker_server):
        producer = MyProducer(mpbroker_server.bootstrap)

    @pytest.mark.mpbroker_topics("orders", "events:4")
    @pytest.mark.mpbroker_config({"message.max.bytes": 100})
    def test_with_topics_of_its_own(mpbroker_server): ...

`mpbroker_server` is a broker for one test, `mpbroker_session_server` one for all tests
of a worker process (pytest-xdist has several; each has its own). Either listens on a
free port of 127.0.0.1, keeps its files in a directory that is removed afterwards, and
leaves no process behind, even if pytest is killed: see `pytest_keeper`. The marker
`mpbroker_topics` works with both; a topic that the shared broker has already stays as
it is. `server.create_topic` creates topics at any time. If a test fails, the report
shows the end of its broker's log.

While one test runs, the broker of the next one is started. So only the first test waits
for a start, and each test that has settings of its own.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Final

import pluggy
import pytest

import mpbroker
from mpbroker.testing import pytest_keeper

_READY_TIMEOUT_S: Final = 60.0
_KEEPER: Final = Path(pytest_keeper.__file__)
_TOPIC: Final = re.compile(r"([^:]+)(?::([1-9][0-9]*))?")


class _Keeper:
    """The clean-up process, which outlives this one; started with the first broker."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def tell(self, line: str) -> None:
        """Send it a line: something is to be ended, or has been ended."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has been killed
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Have it end what is left, and wait for it."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()


_keeper = _Keeper()


@contextmanager
def _directory() -> Iterator[Path]:
    """Make a directory that is removed afterwards, however this process ends."""
    with tempfile.TemporaryDirectory(prefix="mpbroker-") as name:
        _keeper.tell(f"directory {name}")
        yield Path(name)
    _keeper.tell(f"-directory {name}")


def _environment() -> dict[str, str]:
    """Return our environment, in which modules of the user's project are not found.

    A file select.py there would take the place of the standard library's module.
    """
    changed = os.environ | {"PYTHONSAFEPATH": "1"}
    parent = str(Path(mpbroker.__file__).parents[1])
    if parent not in (*site.getsitepackages(), site.getusersitepackages()):
        # Without it mpbroker itself might not be found.
        paths = [parent, *filter(None, [os.environ.get("PYTHONPATH")])]
        changed["PYTHONPATH"] = os.pathsep.join(paths)
    return changed


class MpbrokerServer:
    """A running broker.

    Attributes:
        bootstrap: HOST:PORT, for bootstrap.servers.
        host: its first half.
        port: its second half.
        data_dir: where its logs are.
        log_path: what the broker has printed.
    """

    bootstrap: str
    host: str
    port: int

    def __init__(
        self, directory: Path, config: Mapping[str, object], *, wait: bool = True
    ) -> None:
        """Start a broker and wait until it serves.

        Args:
            directory: for the broker's files; the caller removes it.
            config: Kafka's settings, added to those of a small broker.
            wait: False: return at once; the caller calls `wait_until_ready`.

        Raises:
            RuntimeError: the broker did not start; the text has the end of its log.
        """
        self.data_dir = directory / "data"
        self.log_path = directory / "broker.log"
        settings: dict[str, object] = {
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": self.data_dir,
            # Tests are short, and start many brokers: one process of each kind.
            "num.network.threads": 1,
            "num.io.threads": 1,
            **config,
        }
        ready_fd, their_fd = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "mpbroker", "serve"),
                        *("--ready-fd", str(their_fd)),
                        *(f"{name}={value}" for name, value in settings.items()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[their_fd],
                    start_new_session=True,
                    env=_environment(),
                )
            _keeper.tell(f"broker {self._process.pid}")
        except BaseException:
            os.close(ready_fd)
            raise
        finally:
            os.close(their_fd)
        self._ready_fd = ready_fd
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until a broker that was made with ``wait=False`` serves.

        Raises:
            RuntimeError: it does not, and is killed; the text has the end of its log.
        """
        ready_fd, self._ready_fd = self._ready_fd, -1
        try:
            self.bootstrap = self._read_address(ready_fd)
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(ready_fd)
        host, _, port = self.bootstrap.rpartition(":")
        self.host, self.port = host, int(port)

    def _read_address(self, ready_fd: int) -> str:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        line = b""
        poll = select.poll()
        poll.register(ready_fd, select.POLLIN)
        while not line.endswith(b"\n"):
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms <= 0 or not poll.poll(left_ms):
                raise RuntimeError(
                    f"mpbroker was not ready in {_READY_TIMEOUT_S:g} s:"
                    f" {self.last_words()}"
                )
            chunk = os.read(ready_fd, 4096)
            if not chunk:
                raise RuntimeError(f"mpbroker did not start: {self.last_words()}")
            line += chunk
        listeners: dict[str, str] = json.loads(line)["listeners"]
        return next(iter(listeners.values()))

    def last_words(self) -> str:
        """Return the end of what the broker has printed."""
        return self.log_path.read_text(errors="replace")[-4000:].strip() or "no output"

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic.

        Raises:
            ApiError: the broker refused, for example because the topic exists.
        """
        # Imported late: pytest loads this module at every start, with or without use.
        from mpbroker.client.addresses import parse_addresses
        from mpbroker.client.admin.topic_admin import create_topic
        from mpbroker.client.cluster import Cluster

        with Cluster(parse_addresses(self.bootstrap), _READY_TIMEOUT_S) as cluster:
            create_topic(cluster, name, partitions=partitions, configs=config)

    def stop(self) -> None:
        """Stop the broker and wait for its end; do nothing if it has ended."""
        if self._process.poll() is None and self._ready_fd < 0:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(pytest_keeper.STOP_TIMEOUT_S)
        self.kill()  # ended already, or too slow, or does not serve yet

    def kill(self) -> None:
        """Kill the broker and all its processes, as a power cut would."""
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1
        pid = self._process.pid
        if self._process.returncode is None:
            with suppress(ProcessLookupError):  # gone already
                os.killpg(pid, signal.SIGKILL)
            self._process.wait()
            pytest_keeper.remove_shared_memory(pid)
        _keeper.tell(f"-broker {pid}")


def _import_client() -> None:
    """Import what `MpbrokerServer.create_topic` does, while a broker starts."""
    for name in ("addresses", "admin.topic_admin", "cluster"):
        import_module(f"mpbroker.client.{name}")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.add_cleanup(_keeper.close)
    config.addinivalue_line(
        "markers",
        "mpbroker_topics(*names): topics that mpbroker_server (or"
        ' mpbroker_session_server) has from the start; "name" or "name:PARTITIONS"',
    )
    config.addinivalue_line(
        "markers", "mpbroker_config(settings): settings of mpbroker_server"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Create the topics of a test's markers on the shared broker, too."""
    names: list[str] = getattr(item, "fixturenames", [])
    if "mpbroker_session_server" in names:
        names.insert(0, "_mpbroker_session_markers")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pluggy.Result[pytest.TestReport], None]:
    """Add the end of the broker's log to the report of a failed test."""
    outcome = yield
    report = outcome.get_result()
    if not report.failed:
        return
    for name in ("mpbroker_server", "mpbroker_session_server"):
        server = getattr(item, "funcargs", {}).get(name)
        if isinstance(server, MpbrokerServer) and server.log_path.exists():
            report.sections.append((f"log of {name}", server.last_words()))


class _Spare:
    """The broker of the next test, started in advance."""

    def __init__(self) -> None:
        self._next: tuple[ExitStack, MpbrokerServer] | None = None

    def prepare(self) -> None:
        """Begin to start the broker, unless that has been done."""
        if self._next is None:
            with ExitStack() as stack:
                directory = stack.enter_context(_directory())
                server = MpbrokerServer(directory, {}, wait=False)
                stack.callback(server.stop)
                self._next = stack.pop_all(), server

    @contextmanager
    def take(self, *, with_client: bool = False) -> Iterator[MpbrokerServer]:
        """Wait until the broker serves; yield it, and stop it afterwards.

        Args:
            with_client: topics are created next: import the client while waiting.
        """
        self.prepare()
        assert self._next is not None
        (stack, server), self._next = self._next, None
        with stack:
            if with_client:
                _import_client()
            server.wait_until_ready()
            yield server

    def close(self) -> None:
        """Stop a broker that no test has used."""
        if self._next is not None:
            (stack, _), self._next = self._next, None
            stack.close()


def _server(
    config: Mapping[str, object], *, with_client: bool = False
) -> Iterator[MpbrokerServer]:
    with _directory() as directory:
        server = MpbrokerServer(directory, config, wait=False)
        try:
            if with_client:
                _import_client()
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


def _create_marked_topics(
    request: pytest.FixtureRequest, server: MpbrokerServer, *, anew: bool = True
) -> None:
    from mpbroker.protocol.error_code import ErrorCode
    from mpbroker.protocol.errors import ApiError

    for marker in request.node.iter_markers("mpbroker_topics"):
        for name in marker.args:
            found = _TOPIC.fullmatch(name) if isinstance(name, str) else None
            if found is None:
                raise pytest.UsageError(
                    f'mpbroker_topics({name!r}): a topic is "name" or "name:PARTITIONS"'
                )
            try:
                server.create_topic(found[1], int(found[2] or 1))
            except ApiError as error:
                if anew or error.error_code != ErrorCode.TOPIC_ALREADY_EXISTS:
                    raise


def _marked_settings(request: pytest.FixtureRequest) -> dict[str, object]:
    settings: dict[str, object] = {}
    for marker in reversed(list(request.node.iter_markers("mpbroker_config"))):
        if len(marker.args) != 1 or not isinstance(marker.args[0], Mapping):
            raise pytest.UsageError(
                "mpbroker_config takes one dict, of Kafka's settings by name"
            )
        settings |= marker.args[0]
    return settings


def _is_wanted_again(request: pytest.FixtureRequest) -> bool:
    """Whether a later test wants a broker with the usual settings."""
    items = request.session.items
    later = items[items.index(request.node) + 1 :] if request.node in items else []
    return any(
        "mpbroker_server" in getattr(item, "fixturenames", ())
        and item.get_closest_marker("mpbroker_config") is None
        for item in later
    )


@pytest.fixture(scope="session")
def _mpbroker_spare() -> Iterator[_Spare]:
    spare = _Spare()
    yield spare
    spare.close()


@pytest.fixture
def mpbroker_server(
    request: pytest.FixtureRequest, _mpbroker_spare: _Spare
) -> Iterator[MpbrokerServer]:
    """A Kafka-compatible broker for this test alone; see `MpbrokerServer`."""
    config = _marked_settings(request)
    with_client = request.node.get_closest_marker("mpbroker_topics") is not None
    taken = (
        contextmanager(_server)(config, with_client=with_client)
        if config
        else _mpbroker_spare.take(with_client=with_client)
    )
    with taken as server:
        _create_marked_topics(request, server)
        if _is_wanted_again(request):
            _mpbroker_spare.prepare()
        yield server


@pytest.fixture(scope="session")
def mpbroker_session_server() -> Iterator[MpbrokerServer]:
    """A Kafka-compatible broker for all tests of this process."""
    yield from _server({})


@pytest.fixture
def _mpbroker_session_markers(
    request: pytest.FixtureRequest, mpbroker_session_server: MpbrokerServer
) -> None:
    if _marked_settings(request) and "mpbroker_server" not in request.fixturenames:
        raise pytest.UsageError(
            "mpbroker_config is for mpbroker_server; mpbroker_session_server is shared"
        )
    _create_marked_topics(request, mpbroker_session_server, anew=False)
