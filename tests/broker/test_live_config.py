"""What the supervisor knows of settings that have changed, before it applies them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpbroker.config import BrokerConfig
from mpbroker.ipc.layout import MAX_PARTITIONS
from mpbroker.ipc.limits_page import AddressLimits
from mpbroker.metadata.metadata_log import MetadataLog, recover_metadata_log
from mpbroker.metadata.topics import TopicRegistry
from mpbroker.network.connection_rows import address_words
from mpbroker.supervisor.live_config import LiveConfig
from mpbroker.supervisor.loop import Loop
from tests.support.memory import broker_memory


class NoSupervisor:
    """Of a broker without processes."""

    children = ()


class Brokers:
    """A handler's view of the metadata log, and the supervisor's part in it."""

    def __init__(self, directory: Path, memory) -> None:
        config = BrokerConfig.load({"num.partitions": "2"}, None, {}, cores=2)
        cell = memory.metadata_cell
        recover_metadata_log(str(directory), cell, 0)

        def registry() -> TopicRegistry:
            return TopicRegistry(
                MetadataLog(str(directory), cell),
                broker_id=config.node_id,
                capacity=MAX_PARTITIONS,
                now_ms=lambda: 0,
            )

        self.handler = registry()
        self.used: list[int] = []
        self.live = LiveConfig(
            config,
            registry(),
            memory,
            [],
            lambda now: self.used.append(now.num_partitions),
        )


@pytest.fixture
def brokers(tmp_path) -> Iterator[Brokers]:
    with broker_memory() as memory:
        yield Brokers(tmp_path, memory)


def test_what_was_set_is_known_before_it_is_applied(brokers):
    live = brokers.live
    assert not live.has_news()
    brokers.handler.alter_broker_config("1", lambda _: {"num.partitions": "3"})
    assert live.has_news()
    assert live.has_news()  # knowing it is not applying it
    live.turn(NoSupervisor())
    assert not live.has_news()
    assert brokers.used == [2, 3]


def test_what_was_set_and_taken_back_needs_nobody_to_be_told(brokers):
    brokers.handler.alter_broker_config("1", lambda _: {"num.partitions": "3"})
    brokers.handler.alter_broker_config("1", lambda _: {})
    assert not brokers.live.has_news()


def test_topics_are_no_settings(brokers):
    brokers.handler.create_topic("t", 1)
    assert not brokers.live.has_news()


def test_a_name_in_a_limit_keeps_the_supervisor_waiting_for_no_answer(
    brokers, monkeypatch
):
    """Any change of the metadata, such as a new topic, looked the names up again."""
    ourselves = os.getpid()

    def hangs(*arguments, **options):
        assert os.getpid() != ourselves, "no death is handled meanwhile"
        signal.pause()

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    limits = {"max.connections.per.ip.overrides": "192.0.2.1:3,host.example:4"}
    brokers.handler.alter_broker_config("", lambda _: limits)
    loop = Loop()
    loop.children = ()
    brokers.live.turn(loop)
    assert len(loop.asides) == 1
    brokers.handler.create_topic("t", 1)
    brokers.live.turn(loop)
    address, _ = address_words(socket.AF_INET, ("192.0.2.1", 0))
    assert brokers.live._limits.addresses == {address: AddressLimits(3)}
    loop.kill_asides()
