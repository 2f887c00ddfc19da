"""`Transport` and `connect_any`: real sockets, and what is said when they fail."""

import socket
import threading

import pytest

from mpbroker.client.addresses import Address
from mpbroker.client.errors import BrokerUnavailableError, RequestTimeoutError
from mpbroker.client.transport import Transport, connect_any
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tests.client.fake_broker import CLOSE, FakeBroker


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
    return address


@pytest.fixture
def transport(fake_broker):
    transport = Transport.connect(fake_broker.address, 5)
    yield transport
    transport.close()


def test_requests_are_answered(transport):
    response = transport.request(MetadataRequest(topics=None), MetadataResponse)
    assert [topic.name for topic in response.topics] == ["t"]


def test_pipelined_requests_are_answered_in_any_order_of_waiting(transport):
    first = transport.send(MetadataRequest(topics=[]), MetadataResponse)
    second = transport.send(MetadataRequest(topics=None), MetadataResponse)
    assert len(transport.wait(second, MetadataResponse).topics) == 1
    assert len(transport.wait(first, MetadataResponse).topics) == 0


def test_a_broker_of_old_is_spoken_to_in_api_versions_0():
    broker = FakeBroker({"t": 1}, max_api_versions=2)
    try:
        transport = Transport.connect(broker.address, 5)
        transport.close()
    finally:
        broker.close()
    assert [version for _, version, _ in broker.requests] == [0]


def test_a_refused_connection_asks_whether_the_broker_is_running(closed_port):
    with pytest.raises(BrokerUnavailableError) as caught:
        Transport.connect(closed_port, 5)
    assert str(caught.value) == (
        f"cannot reach {closed_port}: connection refused; is the broker running?"
    )


def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(BrokerUnavailableError, match=r"'nowhere\.invalid'"):
        Transport.connect(Address("nowhere.invalid", 9092), 5)


def test_the_second_bootstrap_address_is_tried(closed_port, fake_broker):
    transport = connect_any([closed_port, fake_broker.address], 5)
    transport.close()
    assert transport.address == fake_broker.address


def test_when_no_address_answers_each_has_its_reason(closed_port):
    other = Address("nowhere.invalid", 1)
    with pytest.raises(BrokerUnavailableError) as caught:
        connect_any([closed_port, other], 5)
    assert str(closed_port) in str(caught.value)
    assert str(other) in str(caught.value)


def test_a_broker_that_hangs_up_is_reported(fake_broker, transport):
    fake_broker.answer_with(ApiKey.METADATA, lambda request: CLOSE)
    with pytest.raises(BrokerUnavailableError, match="closed by the broker"):
        transport.request(MetadataRequest(), MetadataResponse)


def test_a_broker_that_falls_silent_is_a_timeout(fake_broker, transport):
    answer = threading.Event()
    fake_broker.answer_with(ApiKey.METADATA, lambda request: answer.wait(30) and None)
    with pytest.raises(RequestTimeoutError):
        transport.request(MetadataRequest(), MetadataResponse, timeout_s=0.01)
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
            BrokerUnavailableError, match="not answer as a Kafka broker"
        ):
            Transport.connect(Address(*server.getsockname()), 5)
        thread.join()
