"""A short fuzzing run with the suite; CI also runs `python -m tests.fuzz` longer."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bench import wire
from tests.fuzz import scenarios
from tests.fuzz.attack import Attacker, BrokenPromiseError
from tests.fuzz.campaign import Campaign
from tests.fuzz.scenarios import Owed, Scenario
from tests.support.broker import Broker


def test_hostile_bytes_hurt_nobody_else(
    make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    Campaign(make_broker(), seed=2, save_dir=tmp_path).run(seconds=4.0)


def test_a_scenario_depends_on_seed_and_number_alone() -> None:
    first = [scenarios.scenario(1, n) for n in range(50)]
    assert first == [scenarios.scenario(1, n) for n in range(50)]
    assert first != [scenarios.scenario(2, n) for n in range(50)]


@pytest.fixture
def liar() -> Iterator[tuple[str, int]]:
    """A server that answers everything with the correlation id plus one."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(65536)
                if len(request) < 12:
                    continue
                wrong = struct.unpack_from(">I", request, 8)[0] + 1 & 0x7FFFFFFF
                connection.sendall(struct.pack(">ii", 4, wrong))

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.mark.parametrize("owed", Owed)
def test_a_broker_that_breaks_its_promise_is_found_out(
    liar: tuple[str, int], owed: Owed
) -> None:
    bad = Scenario("probe", [wire.api_versions()], owed, [0])
    with pytest.raises(BrokenPromiseError):
        Attacker(liar).play(bad, 0)
