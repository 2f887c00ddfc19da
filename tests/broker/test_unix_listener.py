"""A listener on a Unix socket: its file, its clients, and who dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tests.broker.load import api_versions, ask, create_topic, states
from tests.broker.resizing import alter, resize
from tests.supervisor.upgrade.test_upgrade import upgrade, wait_for_end
from tests.support.broker import Broker, BrokerFailedError
from tests.support.children import wait_until

Make = Callable[..., Broker]
QUICK = {"num.network.threads": 1, "num.io.threads": 1}


@pytest.fixture
def path() -> Iterator[Path]:
    # Not a test's own directory, whose name may be longer than a path may be.
    directory = Path(tempfile.mkdtemp(prefix="mpbroker-"))
    yield directory / "kafka.sock"
    shutil.rmtree(directory)


def settings(path: Path, **more: object) -> dict[str, object]:
    return {
        **QUICK,
        "listeners": f"PLAINTEXT://127.0.0.1:0,LOCAL://unix:{path}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,LOCAL:PLAINTEXT",
        **more,
    }


def dial(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect(str(path))
    return sock


def test_clients_of_the_file_are_served_and_it_goes_with_the_broker(make_broker, path):
    broker = make_broker(settings(path))
    assert broker.listeners["LOCAL"] == f"unix:{path}"
    status = path.stat()
    assert stat.S_ISSOCK(status.st_mode) and status.st_mode & 0o777 == 0o660
    with dial(path) as sock:
        assert api_versions(sock)
        request = MetadataRequest(topics=None)
        body = ask(sock, ApiKey.METADATA, 9, request.encode(9))
        (told,) = MetadataResponse.decode(9, body).brokers
        # Nothing that another client could dial: advertised.listeners says what is.
        assert (told.host, told.port) == (f"unix:{path}", 0)
        # The broker's own, made at its start, may be there for another moment.
        wait_until(lambda: [each["peer"] for each in connections(broker)] == ["unix"])
    broker.stop()
    assert not path.exists()


def control(broker: Broker) -> ControlClient:
    return ControlClient(os.fspath(broker.data_dir / "control.sock"), 30.0)


def test_limits_of_addresses_are_not_theirs(make_broker, path):
    limit = 2  # of TCP's: ours, and the broker's own at its start
    broker = make_broker(settings(path, **{"max.connections.per.ip": limit}))
    with contextlib.ExitStack() as stack:
        for _ in range(limit + 1):
            assert api_versions(stack.enter_context(dial(path)))
        assert alter(broker, {"max.connections.per.ip": 1}).error_code == 0
        assert api_versions(stack.enter_context(dial(path)))


def test_what_a_killed_broker_leaves_is_taken_away_and_a_living_one_is_left_alone(
    make_broker, path, tmp_path
):
    broker = make_broker(settings(path))
    other = Broker(tmp_path / "other", settings(path))
    with pytest.raises(BrokerFailedError, match="another process listens there"):
        other.start()
    other.kill()
    with dial(path) as sock:
        assert api_versions(sock)
    broker.kill()
    assert path.exists()
    broker.start()
    with dial(path) as sock:
        assert api_versions(sock)
    broker.stop()
    path.write_text("mine")
    with pytest.raises(BrokerFailedError, match="is there and is no socket"):
        broker.start()
    broker.kill()
    assert path.read_text() == "mine"


def test_a_start_that_fails_leaves_no_file(path, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"HTTP://127.0.0.1:{other.getsockname()[1]}"
        broker = Broker(tmp_path / "b", settings(path, **{"metrics.listeners": taken}))
        with pytest.raises(BrokerFailedError, match="Address already in use"):
            broker.start()
        broker.kill()
    assert not path.exists()


def test_a_connection_ends_with_its_processor_and_the_next_one_is_served(
    make_broker, path
):
    broker = make_broker(settings(path))
    for role in ("acceptor", "keeper", "handler"):
        with dial(path) as sock:
            assert api_versions(sock)
            kill(broker, role)
            assert api_versions(sock), role
    with dial(path) as sock:
        assert api_versions(sock)
        kill(broker, "processor")
        assert sock.recv(1) == b""
    with dial(path) as sock:
        assert api_versions(sock)
    wait_until(lambda: not connections(broker))


def connections(broker: Broker) -> list[dict[str, object]]:
    with control(broker) as client:
        found: list[dict[str, object]] = client.request("connections")["connections"]
    return found


def kill(broker: Broker, role: str) -> None:
    """Kill all processes of a role; return when there are others."""
    pids = {each["pid"] for each in states(broker) if each["role"] == role}
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)

    def replaced() -> bool:
        found = [each for each in states(broker) if each["role"] == role]
        return {each["state"] for each in found} == {"READY"} and pids.isdisjoint(
            each["pid"] for each in found
        )

    wait_until(replaced)


def test_other_numbers_of_processors_leave_connections_where_they_are(
    make_broker, path
):
    broker = make_broker(settings(path))
    with dial(path) as sock:
        assert api_versions(sock)
        resize(broker, processors=3)
        wait_until(lambda: ready(broker, 6))
        assert api_versions(sock)
        resize(broker, processors=1)
        wait_until(lambda: ready(broker, 2))
    with dial(path) as sock:
        assert api_versions(sock)


def ready(broker: Broker, number: int) -> bool:
    found = [each["state"] for each in states(broker) if each["role"] == "processor"]
    return found == ["READY"] * number


def test_an_upgrade_keeps_the_socket(make_broker, path):
    broker = make_broker(settings(path))
    inode = path.stat().st_ino
    upgrade(broker)
    assert wait_for_end(broker, "done", "failed").startswith("done")
    assert path.stat().st_ino == inode
    with dial(path) as sock:
        assert api_versions(sock)
    broker.stop()
    assert not path.exists()


class Relay:
    """Carries connections of a port to a Unix socket, as socat does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server = socket.create_server(("127.0.0.1", 0))
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._run(self._accept)

    def close(self) -> None:
        for sock in (self._server, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._server, *self._socks):
            sock.close()

    def _run(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self._socks.append(client)
                with contextlib.suppress(OSError):
                    server = dial(self._path)
                    self._socks.append(server)
                    server.settimeout(None)
                    self._run(self._carry, client, server)
                    self._run(self._carry, server, client)

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def test_a_real_client_produces_and_consumes_through_a_relay(make_broker, path):
    relay = Relay(path)
    advertised = {"advertised.listeners": f"LOCAL://{relay.address}"}
    broker = make_broker(settings(path, **advertised))
    create_topic(broker)
    # Large enough that a fetch is sent from the file, in parts.
    values = [bytes([number]) * 300_000 for number in range(20)]
    producer = Producer({"bootstrap.servers": relay.address})
    for value in values:
        producer.produce("load", value)
    assert producer.flush(60) == 0
    consumer = Consumer({"bootstrap.servers": relay.address, "group.id": "g"})
    consumer.assign([TopicPartition("load", 0, 0)])
    found: list[bytes] = []

    def poll() -> bool:
        message = consumer.poll(1.0)
        if message is not None:
            assert message.error() is None, message.error()
            found.append(message.value())
        return len(found) == len(values)

    wait_until(poll)
    assert found == values
    consumer.close()
    relay.close()
