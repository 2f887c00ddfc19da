"""Names that a silent DNS server is asked for keep no other client waiting."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Final

import pytest

from mpbroker.protocol.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    EntityData,
    EntryData,
    OpData,
)
from tests.bench import wire
from tests.broker.load import frame
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker

VERSION: Final = 1
NAMES: Final = 50
ROUNDS: Final = 20
# A resolver of glibc waits for so long for servers that do not answer: twice for 5 s,
# for each of three.
SILENT_RESOLVER: Final = """
import socket, time

getaddrinfo = socket.getaddrinfo

def silent(host, port, *arguments, **options):
    numeric = options.get("flags", 0) & socket.AI_NUMERICHOST
    if str(host).endswith(".silent.test") and not numeric:
        time.sleep(30)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")
    return getaddrinfo(host, port, *arguments, **options)

socket.getaddrinfo = silent
"""


@pytest.fixture
def address(make_broker, tmp_path: Path, monkeypatch) -> tuple[str, int]:
    """A broker whose DNS server does not answer."""
    (tmp_path / "sitecustomize.py").write_text(SILENT_RESOLVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broker: Broker = make_broker({"num.network.threads": 1, "num.io.threads": 2})
    return address_of(broker)


def altering(address: tuple[str, int], answers: list[bytes]) -> Attack:
    """Return an attack: set quotas for addresses by names, always new ones."""
    numbers = itertools.count()

    def attack(end: threading.Event) -> None:
        with wire.Connection(address) as connection:
            while not end.is_set():
                entries = [
                    EntryData(
                        entity=[
                            EntityData(
                                entity_type="ip",
                                entity_name=f"{next(numbers)}.silent.test",
                            )
                        ],
                        ops=[OpData(key="connection_creation_rate", value=9.0)],
                    )
                    for _ in range(NAMES)
                ]
                request = AlterClientQuotasRequest(entries=entries)
                api_key, body = request.api_key, request.encode(VERSION)
                answers.append(connection.ask(frame(api_key, VERSION, body)))

    return attack


def test_quotas_for_names_that_nobody_knows(address):
    answers: list[bytes] = []
    client = Client(address)
    with hostile(*(altering(address, answers) for _ in range(4))):
        for number in itertools.count():
            client.ask(wire.metadata([f"other-{number}"]))
            if number >= ROUNDS and len(answers) >= 4:
                break
    assert client.longest_s < LONGEST_WAIT_S
