"""A pytest plug-in: a real broker for tests of code that talks to Kafka.

    def test_my_code(mpbroker_server):
        producer = MyProducer(mpbroker_server.bootstrap)

    @pytest.mark.mpbroker_topics("orders", "events:4")
    @pytest.mark.mpbroker_config({"message.max.bytes": 100})
    def test_with_topics_of_its_own(mpbroker_server): ...

`mpbroker_server` is a broker for one test, `mpbroker_session_server` one for all tests
of a worker process (pytest-xdist has several; each has its own). Either listens on a
free port of 127.0.0.1, keeps its files in a directory that is removed afterwards, and
leaves no process behind. Topics can be made at any time: `server.create_topic`.

While one test runs, the broker of the next is being started, so that only the first
test waits for one; so does whoever gives settings of his own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

_READY_TIMEOUT_S: Final = 30.0
_STOP_TIMEOUT_S: Final = 10.0


class MpbrokerServer:
    """A running broker.

    Attributes:
        bootstrap: HOST:PORT, for bootstrap.servers.
        host: its first half.
        port: its second half.
        data_dir: where its logs are.
        log_path: what it has printed.
    """

    bootstrap: str
    host: str
    port: int

    def __init__(
        self, directory: Path, config: Mapping[str, object], *, wait: bool = True
    ) -> None:
        """Start a broker and wait until it serves.

        Args:
            directory: for its files; the caller's to remove.
            config: Kafka's settings, beside those of a small broker.
            wait: False: that is left to `wait_until_ready`.

        Raises:
            RuntimeError: it did not; the text has its last words.
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
                )
        except BaseException:
            os.close(ready_fd)
            raise
        finally:
            os.close(their_fd)
        self._ready_fd = ready_fd
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until a broker serves that was made without waiting.

        Raises:
            RuntimeError: it does not; it is killed, and the text has its last words.
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
                    f"mpbroker was not ready in {_READY_TIMEOUT_S:g} s: {self._words()}"
                )
            chunk = os.read(ready_fd, 4096)
            if not chunk:
                raise RuntimeError(f"mpbroker did not start: {self._words()}")
            line += chunk
        listeners: dict[str, str] = json.loads(line)["listeners"]
        return next(iter(listeners.values()))

    def _words(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:].strip() or "no output"

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic.

        Raises:
            ApiError: the broker refused, for example because it is there already.
        """
        # Imported late: pytest loads this module at every start, with or without use.
        from mpbroker.client.addresses import parse_addresses
        from mpbroker.client.admin import create_topic
        from mpbroker.client.cluster import Cluster

        with Cluster(parse_addresses(self.bootstrap), _READY_TIMEOUT_S) as cluster:
            create_topic(cluster, name, partitions=partitions, configs=config)

    def stop(self) -> None:
        """Stop the broker and wait until it is gone."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Kill the broker and all its processes, as a power cut would."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # gone already
        self._process.wait()


def _import_client() -> None:
    """Import what `MpbrokerServer.create_topic` does, while a broker starts."""
    import mpbroker.client.admin
    import mpbroker.client.cluster  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    config.addinivalue_line(
        "markers",
        "mpbroker_topics(*names): topics that mpbroker_server has from the start;"
        ' "name" or "name:PARTITIONS"',
    )
    config.addinivalue_line(
        "markers", "mpbroker_config(settings): settings of mpbroker_server"
    )


class _Spare:
    """The broker of the next test that wants one."""

    def __init__(self) -> None:
        self._next: tuple[tempfile.TemporaryDirectory[str], MpbrokerServer] | None = (
            None
        )

    def prepare(self) -> None:
        """Begin to start it, if that is not done yet."""
        if self._next is None:
            directory = tempfile.TemporaryDirectory(prefix="mpbroker-")
            try:
                server = MpbrokerServer(Path(directory.name), {}, wait=False)
            except BaseException:
                directory.cleanup()
                raise
            self._next = directory, server

    @contextmanager
    def take(self, *, with_client: bool = False) -> Iterator[MpbrokerServer]:
        """Wait until it serves, and have it for a while.

        Args:
            with_client: whether topics are made next, so that waiting can be used.
        """
        self.prepare()
        assert self._next is not None
        (directory, server), self._next = self._next, None
        with directory:
            try:
                if with_client:
                    _import_client()
                server.wait_until_ready()
                yield server
            finally:
                server.stop()

    def close(self) -> None:
        """Stop what no test has wanted."""
        if self._next is not None:
            # Half started, it might not have its children in hand yet.
            with suppress(RuntimeError), self.take():
                pass


def _server(
    config: Mapping[str, object], *, with_client: bool = False
) -> Iterator[MpbrokerServer]:
    with tempfile.TemporaryDirectory(prefix="mpbroker-") as directory:
        server = MpbrokerServer(Path(directory), config, wait=False)
        try:
            if with_client:
                _import_client()
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


def _create_marked_topics(
    request: pytest.FixtureRequest, server: MpbrokerServer
) -> None:
    for marker in request.node.iter_markers("mpbroker_topics"):
        for name in marker.args:
            topic, _, partitions = str(name).partition(":")
            server.create_topic(topic, int(partitions or 1))


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
    config: dict[str, object] = {}
    for marker in reversed(list(request.node.iter_markers("mpbroker_config"))):
        config |= marker.args[0]
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
