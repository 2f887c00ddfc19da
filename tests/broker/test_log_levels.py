"""Levels of loggers reach every process of a broker, also those that come later."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.broker.load import api_versions, children, dial, kill
from tests.broker.resizing import LOGGER_RESOURCE, alter
from tests.support.broker import Broker
from tests.support.children import wait_until

CONNECTIONS = "mpbroker.network.connections"
SUPERVISOR = "mpbroker.supervisor"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    config = {"num.network.threads": 1, "num.io.threads": 1}
    with Broker(tmp_path_factory.mktemp("levels") / "data", config) as started:
        yield started


def set_level(broker: Broker, logger: str, level: str | None) -> None:
    answer = alter(broker, {logger: level}, resource_type=LOGGER_RESOURCE)
    assert answer.error_code == 0, answer


def lines_with(broker: Broker, *words: object, since: int = 0) -> list[str]:
    lines = broker.log_path.read_text()[since:].splitlines()
    return [line for line in lines if all(str(word) in line for word in words)]


def written(broker: Broker) -> int:
    """How much there is in the log. Ports are used again, soon."""
    return len(broker.log_path.read_text())


@pytest.fixture(autouse=True)
def leave_levels_as_they_were(broker: Broker) -> Iterator[None]:
    yield
    for logger in (CONNECTIONS, "mpbroker.network", SUPERVISOR):
        set_level(broker, logger, None)


class Clients:
    """Connections that stay."""

    def __init__(self) -> None:
        self.socks: list[socket.socket] = []

    def connect(self, broker: Broker) -> str:
        """Return how the broker's log names where we come from."""
        self.socks.append(dial(broker))
        api_versions(self.socks[-1])
        return f"-127.0.0.1:{self.socks[-1].getsockname()[1]}-"


@pytest.fixture
def clients() -> Iterator[Clients]:
    made = Clients()
    yield made
    for sock in made.socks:
        sock.close()


def replace(broker: Broker, role: str) -> int:
    """Kill a process; return the killed one's id once another is there."""
    pid = kill(broker, role)
    wait_until(lambda: children(broker, role)[role, 0] not in (0, pid))
    return pid


def test_a_processor_and_its_successor_obey_what_was_set(
    broker: Broker, clients: Clients
) -> None:
    begin = written(broker)
    silent = clients.connect(broker)
    set_level(broker, CONNECTIONS, "DEBUG")
    first = clients.connect(broker)
    wait_until(lambda: lines_with(broker, "DEBUG", CONNECTIONS, first, "connected"))
    assert not lines_with(broker, silent, "connected", since=begin)
    clients.socks.pop().close()
    wait_until(lambda: lines_with(broker, "DEBUG", CONNECTIONS, first, "ended"))
    replace(broker, "processor")
    begin = written(broker)
    second = clients.connect(broker)
    wait_until(lambda: lines_with(broker, second, "connected", since=begin))
    set_level(broker, CONNECTIONS, None)
    begin = written(broker)
    silent = clients.connect(broker)
    set_level(broker, "mpbroker.network", "TRACE")
    third = clients.connect(broker)
    wait_until(lambda: lines_with(broker, third, "connected", since=begin))
    assert not lines_with(broker, silent, "connected", since=begin)


def test_the_supervisor_obeys_as_its_children_do(broker: Broker) -> None:
    set_level(broker, SUPERVISOR, "FATAL")
    silent = replace(broker, "handler")
    set_level(broker, SUPERVISOR, None)
    told = replace(broker, "handler")
    wait_until(lambda: lines_with(broker, SUPERVISOR, f"(pid {told}) died"))
    assert not lines_with(broker, SUPERVISOR, f"(pid {silent}) died")


def test_a_restart_forgets_the_levels(broker: Broker, clients: Clients) -> None:
    set_level(broker, CONNECTIONS, "DEBUG")
    broker.stop()
    broker.start()
    begin = written(broker)
    silent = clients.connect(broker)
    set_level(broker, CONNECTIONS, "DEBUG")
    told = clients.connect(broker)
    wait_until(lambda: lines_with(broker, told, "connected", since=begin))
    assert not lines_with(broker, silent, "connected", since=begin)
