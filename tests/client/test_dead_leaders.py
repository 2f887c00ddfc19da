"""A leader that cannot be reached, or says nothing, keeps nobody from the others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from mpbroker.client.addresses import Address
from mpbroker.client.cluster import Cluster
from mpbroker.client.consumer.consumer import Consumer
from mpbroker.client.consumer.fetcher import Fetcher
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.protocol.api_key import ApiKey
from tests.client.fake_broker import FakeBroker
from tests.client.test_consumer import values
from tests.client.test_fetcher import T0, batch_of, fetched_values

T1 = T0._replace(partition=1)
LONG_MS = 600_000  # longer than any test may wait


@pytest.fixture(params=["refuses", "is silent"])
def dead_leader(request: pytest.FixtureRequest) -> Iterator[Address]:
    """Nobody listens there; or somebody does, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if request.param == "refuses":
            server.close()
            with socket.socket() as bound:  # so that nobody else gets it meanwhile
                bound.bind(("127.0.0.1", 0))
                yield Address(*bound.getsockname())
        else:
            yield Address(*server.getsockname())


def make_consumer(broker: FakeBroker, **settings: object) -> Consumer:
    for partition in range(2):
        broker.append("t", partition, batch_of(b"%d" % partition))
    return Consumer(
        bootstrap_servers=str(broker.address),
        auto_offset_reset="earliest",
        request_timeout_ms=LONG_MS,
        **settings,
    )


def test_other_leaders_are_read_and_the_partition_too_once_it_has_moved(
    fake_broker, dead_leader
):
    fake_broker.led_elsewhere = {T1: dead_leader}
    with make_consumer(fake_broker) as consumer:
        consumer.assign([T1, T0])
        consumer.seek(T1, 0)
        consumer.seek(T0, 0)
        assert values(consumer, 1) == [0]
        fake_broker.append("t", 0, batch_of(b"2"))
        assert values(consumer, 1) == [2]
        fake_broker.led_elsewhere = {}
        assert values(consumer, 1) == [1]


def test_what_a_dead_leader_should_have_told_of_positions_keeps_no_other_unread(
    fake_broker,
):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        fake_broker.led_elsewhere = {T1: Address(*bound.getsockname())}
        with make_consumer(fake_broker) as consumer:
            consumer.assign([T1, T0])
            assert values(consumer, 1) == [0]
            fake_broker.led_elsewhere = {}
            assert values(consumer, 1) == [1]


def test_a_leader_that_does_not_answer_a_fetch_keeps_no_other_unread(fake_broker):
    other = FakeBroker({"t": 3})
    asked = threading.Event()
    may_answer = threading.Event()

    def wait(_request: object) -> None:
        asked.set()
        may_answer.wait(90)

    other.answer_with(ApiKey.FETCH, wait)
    other.append("t", 1, batch_of(b"1"))
    fake_broker.led_elsewhere = {T1: other.address}
    try:
        with make_consumer(fake_broker) as consumer:
            consumer.assign([T1, T0])
            assert values(consumer, 1) == [0]
            while not asked.is_set():
                consumer.poll(10)
            fake_broker.append("t", 0, batch_of(b"2"))
            assert values(consumer, 1) == [2]
            may_answer.set()
            assert values(consumer, 1) == [1]
    finally:
        may_answer.set()
        other.close()


def test_a_fetcher_that_can_reach_no_leader_says_so(fake_broker):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        fake_broker.led_elsewhere = {T1: Address(*bound.getsockname())}
        with Cluster([fake_broker.address], timeout_s=90) as cluster:
            cluster.metadata(["t"])
            reader = Fetcher(cluster, {T1: 0}, {T1: 8})
            with pytest.raises(BrokerUnavailableError, match=r"advertised\.listeners"):
                reader.fetch()
            assert reader.lacks_leader


def test_a_leader_that_comes_back_is_read_by_the_same_fetcher(fake_broker):
    fake_broker.append("t", 0, batch_of(b"0"))
    other = FakeBroker({"t": 3})
    other.append("t", 1, batch_of(b"1"))
    fake_broker.led_elsewhere = {T1: other.address}
    try:
        with Cluster([fake_broker.address], timeout_s=90) as cluster:
            cluster.metadata(["t"])
            reader = Fetcher(cluster, {T0: 0, T1: 0}, {T0: 7, T1: 8})
            found: list[bytes | None] = []
            while len(found) < 2:
                found += fetched_values(reader.fetch())
            assert sorted(found) == [b"0", b"1"]
            assert not reader.lacks_leader
    finally:
        other.close()
