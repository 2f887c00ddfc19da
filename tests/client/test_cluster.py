"""`Cluster`: real sockets, one question at a time, and what is said when they fail."""

import socket
import threading

import pytest

from mpbroker.client import selector
from mpbroker.client.addresses import Address
from mpbroker.client.admin.topic_admin import (
    EARLIEST_LOCAL,
    LATEST_TIERED,
    MAX_TIMESTAMP,
    list_offsets,
)
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.errors import (
    BrokerUnavailableError,
    RequestTimeoutError,
    UnsupportedVersionError,
)
from mpbroker.client.selector import monotonic_ms
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tests.client.fake_broker import CLOSE, FakeBroker


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
    return address


@pytest.fixture
def broker(cluster):
    return cluster.any_broker()


def test_requests_are_answered(broker):
    response = broker.request(MetadataRequest(topics=None), MetadataResponse)
    assert [topic.name for topic in response.topics] == ["t"]


def test_pipelined_requests_are_answered_in_any_order_of_waiting(broker):
    first = broker.send(MetadataRequest(topics=[]), MetadataResponse)
    second = broker.send(MetadataRequest(topics=None), MetadataResponse)
    assert len(broker.wait(second, MetadataResponse).topics) == 1
    assert len(broker.wait(first, MetadataResponse).topics) == 0


@pytest.mark.parametrize("at", ["127.0.0.2", "::1"])
def test_a_name_s_next_address_is_tried_in_the_same_attempt(
    at, fake_broker, monkeypatch
):
    """On most machines localhost is ::1 first, and many brokers are at 127.0.0.1."""
    port = fake_broker.address.port
    addresses = [Address(at, port), Address("127.0.0.1", port)]
    monkeypatch.setattr(selector, "resolve", lambda host, port: list(addresses))
    with Cluster([Address("localhost", port)], 5) as cluster:
        assert cluster.any_broker().request(
            MetadataRequest(topics=[]), MetadataResponse
        )
    del addresses[1]
    with (
        Cluster([Address("localhost", port)], 5) as cluster,
        pytest.raises(BrokerUnavailableError, match=f"cannot reach localhost:{port}"),
    ):
        cluster.any_broker()


def test_a_broker_of_old_is_spoken_to_in_api_versions_0():
    broker = FakeBroker({"t": 1}, max_api_versions=2)
    try:
        with Cluster([broker.address], 5) as cluster:
            cluster.any_broker()
    finally:
        broker.close()
    assert [version for _, version, _ in broker.requests] == [0]


def test_a_refused_connection_asks_whether_the_broker_is_running(closed_port):
    with pytest.raises(BrokerUnavailableError) as caught:
        Cluster([closed_port], 5).any_broker()
    assert str(caught.value) == (
        f"cannot reach {closed_port}: connection refused; is the broker running?"
    )


def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(BrokerUnavailableError, match=r"'nowhere\.invalid'"):
        Cluster([Address("nowhere.invalid", 9092)], 5).any_broker()


def test_the_second_bootstrap_address_is_tried(closed_port, fake_broker):
    with Cluster([closed_port, fake_broker.address], 5) as cluster:
        assert cluster.any_broker().address == fake_broker.address


def test_when_no_address_answers_each_has_its_reason(closed_port):
    other = Address("nowhere.invalid", 1)
    with pytest.raises(BrokerUnavailableError) as caught:
        Cluster([closed_port, other], 5).any_broker()
    assert str(closed_port) in str(caught.value)
    assert str(other) in str(caught.value)


def test_a_broker_that_hangs_up_is_reported(fake_broker, broker):
    broker.request(MetadataRequest(), MetadataResponse)
    fake_broker.answer_with(ApiKey.METADATA, lambda request: CLOSE)
    with pytest.raises(BrokerUnavailableError, match=r"closed by the broker$"):
        broker.request(MetadataRequest(), MetadataResponse)


def test_a_broker_that_hangs_up_upon_the_first_request_may_want_a_login(
    fake_broker, broker
):
    # Listeners of SASL tell everybody their versions, and nobody more.
    fake_broker.answer_with(ApiKey.METADATA, lambda request: CLOSE)
    with pytest.raises(BrokerUnavailableError, match=r"is security\.protocol the list"):
        broker.request(MetadataRequest(), MetadataResponse)


def test_a_broker_that_is_not_ready_in_time_is_told_with_the_failure_before(
    fake_broker,
):
    answer = threading.Event()
    fake_broker.answer_with(
        ApiKey.API_VERSIONS,
        lambda request: CLOSE,
        lambda request: answer.wait(30) and None,
    )
    with Cluster([fake_broker.address], 0.2) as cluster:
        with pytest.raises(BrokerUnavailableError):
            cluster.any_broker()
        with pytest.raises(
            BrokerUnavailableError, match=r"not ready after .* closed by"
        ):
            cluster.any_broker()
        answer.set()


def test_a_broker_that_hangs_up_at_once_may_be_spoken_to_in_the_wrong_way(
    fake_broker,
):
    # As one of ours does with who does not speak TLS where it is wanted.
    fake_broker.answer_with(ApiKey.API_VERSIONS, lambda request: CLOSE)
    with (
        Cluster([fake_broker.address], 5) as cluster,
        pytest.raises(BrokerUnavailableError, match=r"closed by the broker; is secur"),
    ):
        cluster.any_broker().request(MetadataRequest(), MetadataResponse)


def test_a_broker_that_falls_silent_is_a_timeout(fake_broker, broker):
    answer = threading.Event()
    fake_broker.answer_with(ApiKey.METADATA, lambda request: answer.wait(30) and None)
    with pytest.raises(RequestTimeoutError):
        broker.request(MetadataRequest(), MetadataResponse, timeout_s=0.01)
    answer.set()


def test_a_server_of_another_protocol_is_called_that():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def say_http() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=say_http)
        thread.start()
        with pytest.raises(
            BrokerUnavailableError, match="not answer like a Kafka broker"
        ):
            Cluster([Address(*server.getsockname())], 5).any_broker()
        thread.join()


def test_a_broker_that_is_bootstrapped_from_and_advertised_has_one_connection(
    fake_broker, cluster
):
    cluster.metadata([])
    cluster.broker(7).request(MetadataRequest(), MetadataResponse)
    assert len(fake_broker.seen(ApiKey.API_VERSIONS)) == 1


def test_after_a_hang_up_the_next_request_connects_anew(fake_broker, cluster):
    fake_broker.answer_with(ApiKey.METADATA, lambda request: CLOSE)
    with pytest.raises(BrokerUnavailableError):
        cluster.metadata([])
    assert cluster.metadata([]).brokers
    assert len(fake_broker.seen(ApiKey.API_VERSIONS)) == 2


def test_what_nobody_waits_for_may_lie_there_for_long(fake_broker):
    with Cluster([fake_broker.address], 0.5) as cluster:
        broker = cluster.any_broker()
        pending = broker.send(MetadataRequest(topics=None), MetadataResponse)
        cluster.client.poll(0, monotonic_ms() + 3_600_000)
        assert len(broker.wait(pending, MetadataResponse).topics) == 1


def test_a_wrong_correlation_id_is_no_answer(fake_broker, cluster):
    fake_broker.shift_correlation_ids = 1
    with pytest.raises(
        BrokerUnavailableError, match="answer to request 1, but the oldest is 0"
    ):
        cluster.any_broker()


def test_a_broker_that_is_too_old_to_look_for_the_highest_timestamp_is_not_asked(
    fake_broker, cluster
):
    def answer(request):
        versions = fake_broker._api_versions(request)
        for entry in versions.api_keys:
            if entry.api_key == ApiKey.LIST_OFFSETS:
                entry.max_version = 6
        return versions

    fake_broker.answer_with(ApiKey.API_VERSIONS, answer)
    cluster.metadata([])
    where = TopicPartition("t", 0)
    for question, text in (
        (MAX_TIMESTAMP, "highest timestamp"),
        (EARLIEST_LOCAL, "on its disk"),
        (LATEST_TIERED, "in its remote store.*3.9"),
    ):
        with pytest.raises(UnsupportedVersionError, match=text):
            list_offsets(cluster, {where: question}, {where: 7})
    assert not fake_broker.seen(ApiKey.LIST_OFFSETS)
