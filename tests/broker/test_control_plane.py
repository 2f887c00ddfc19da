"""The control plane: requests that wait for nobody's data."""

from __future__ import annotations

import contextlib
import socket

import pytest

from mpbroker.base.config_def import ConfigError
from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.cli.exit_codes import CliError
from mpbroker.config import BrokerConfig
from mpbroker.inspect.attach import attach
from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HEADER,
    HEADER_ACTIVE_HANDLERS,
    HEADER_CONTROL_PLANE,
    PROCESSOR_SERVES,
    handler_row,
    processor_row,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.api_versions import ApiVersionsResponse
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataResponse
from mpbroker.supervisor.repair.recovery import Repair
from tests.broker.load import (
    api_versions,
    ask,
    children,
    create_topic,
    dial,
    frame,
    kill,
    produce_body,
    receive_frame,
)
from tests.broker.resizing import resize, wait_for_sizes
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.memory import broker_memory, slots_of, state_of

CONTROL = {
    "listeners": "DATA://127.0.0.1:0,CONTROL://127.0.0.1:0",
    "listener.security.protocol.map": "DATA:PLAINTEXT,CONTROL:PLAINTEXT",
    "control.plane.listener.name": "CONTROL",
    "num.network.threads": 1,
    "num.io.threads": 1,
}
DATA_RING = 4
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    config = CONTROL | {
        "queued.max.requests": DATA_RING,
        "control.inject.enable": "true",
    }
    with Broker(tmp_path_factory.mktemp("control") / "data", config) as made:
        yield made


def dial_control(broker: Broker) -> socket.socket:
    host, _, port = broker.listeners["CONTROL"].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def metadata(sock: socket.socket) -> MetadataResponse:
    request = MetadataRequest(topics=None)
    return MetadataResponse.decode(8, ask(sock, ApiKey.METADATA, 8, request.encode(8)))


def waiting(broker: Broker) -> int:
    with ControlClient(str(broker.data_dir / "control.sock"), 30) as client:
        found: int = client.request("status")["ring_waiting"]
    return found


def words_of(broker: Broker) -> memoryview:
    view = attach(broker.pid)
    assert view is not None
    return view.control


def handlers(broker: Broker, plane: int) -> list[int]:
    """The data plane's (1) or the control plane's (2)."""
    words = words_of(broker)
    return [
        number
        for _, number in children(broker, "handler")
        if words[handler_row(number) + HANDLER_ACTIVE] == plane
    ]


def test_it_has_processes_of_its_own_and_no_resize_is_about_them(broker):
    names = [children(broker, role) for role in ("acceptor", "processor", "handler")]
    assert [len(each) for each in names] == [2, 2, 2]
    resize(broker, handlers=3, processors=2)
    wait_for_sizes(broker, 3 + 1, 2 + 1)
    assert len(handlers(broker, 1)) == 3 and len(handlers(broker, 2)) == 1
    words = words_of(broker)
    assert words[HEADER + HEADER_ACTIVE_HANDLERS] == 3  # among whom data is shared
    resize(broker, handlers=1, processors=1)
    wait_for_sizes(broker, 1 + 1, 1 + 1)


def test_a_resize_beyond_what_there_is_room_for_is_refused_in_the_settings_words(
    broker,
):
    with (
        ControlClient(str(broker.data_dir / "control.sock"), 30) as client,
        pytest.raises(CliError, match=r"num\.io\.threads=119: .* between 1 and 118"),
    ):
        client.request("resize", handlers=119)


def test_metadata_is_answered_while_all_data_handlers_are_busy_and_their_ring_is_full(
    broker,
):
    (busy,) = handlers(broker, 1)
    with ControlClient(str(broker.data_dir / "control.sock"), 30) as client:
        client.request("inject", fault="slow", role="handler", id=busy, value=20_000)
    with contextlib.ExitStack() as stack:
        # One is executed, the ring holds DATA_RING, and others wait before it.
        socks = [stack.enter_context(dial(broker)) for _ in range(DATA_RING + 6)]
        for sock in socks:
            sock.sendall(
                frame(ApiKey.METADATA, 8, MetadataRequest(topics=None).encode(8))
            )
        wait_until(lambda: waiting(broker) == DATA_RING)
        with dial_control(broker) as control:
            for _ in range(50):
                assert metadata(control).brokers
        create = stack.enter_context(dial_control(broker))
        assert api_versions(create)
        assert waiting(broker) == DATA_RING  # all the while nobody has taken one
        with ControlClient(str(broker.data_dir / "control.sock"), 30) as client:
            client.request("inject", fault="slow", role="handler", id=busy, value=0)
        kill(broker, "handler", busy)  # and its requests are executed by the next
        for sock in socks:
            assert receive_frame(sock)


def test_clients_of_it_are_told_its_address_and_nothing_of_data(broker):
    with dial_control(broker) as sock:
        (told,) = metadata(sock).brokers
        assert f"{told.host}:{told.port}" == broker.listeners["CONTROL"]
        answer = ApiVersionsResponse.decode(0, memoryview(api_versions(sock)))
    keys = {each.api_key for each in answer.api_keys}
    assert ApiKey.METADATA in keys and ApiKey.CREATE_TOPICS in keys
    assert not keys & {ApiKey.PRODUCE, ApiKey.FETCH}


def test_who_produces_there_all_the_same_is_closed(broker):
    create_topic(broker)
    with dial_control(broker) as sock, pytest.raises(ConnectionResetError):
        ask(sock, ApiKey.PRODUCE, 9, produce_body(b"x"))
    with dial(broker) as sock:
        assert ask(sock, ApiKey.PRODUCE, 9, produce_body(b"x"))


@pytest.mark.parametrize("role", ["processor", "handler", "acceptor"])
def test_a_death_of_it_is_not_noticed_by_its_clients(broker, role):
    number = {
        "processor": next(
            number
            for _, number in children(broker, "processor")
            if words_of(broker)[processor_row(number) + PROCESSOR_SERVES] == 2
        ),
        "handler": handlers(broker, 2)[0],
        "acceptor": 1,
    }[role]
    with dial_control(broker) as sock:
        assert metadata(sock).brokers
        kill(broker, role, number)
        assert metadata(sock).brokers
        with dial_control(broker) as another:
            assert metadata(another).brokers


# -- without processes -----------------------------------------------------------------


@pytest.fixture
def memory():
    with broker_memory() as made:
        words = made.control.words
        words[HEADER + HEADER_CONTROL_PLANE] = 2  # listener 1
        words[processor_row(0) + PROCESSOR_SERVES] = 1
        words[processor_row(1) + PROCESSOR_SERVES] = 2
        yield made


def test_twenty_of_its_requests_may_wait_whatever_waits_elsewhere(memory):
    assert memory.ring_of(1).put(list(slots_of(1, 30))) == 20
    assert memory.ring_of(0).put(list(slots_of(0, 30))) == 30
    assert len(memory.control_ring) == 20 and len(memory.ring) == 30


def test_a_dead_handlers_requests_go_back_to_the_ring_they_came_from(memory):
    data, control = list(slots_of(0, 2)), list(slots_of(1, 2))
    memory.ring.put(data)
    memory.control_ring.put(control)
    assert memory.ring.take(8, 5, 1, arm=False) == data
    assert memory.control_ring.take(8, 6, 1, arm=False) == control
    for processor in (0, 1):
        memory.control.words[processor_row(processor) + 33] = 2  # slots used
    repair = Repair(memory)
    repair.after_handler(5, 0)
    assert memory.ring.waiting() == data and not memory.control_ring.waiting()
    repair.after_handler(6, 0)
    assert memory.control_ring.waiting() == control
    assert {state_of(memory, slot).name for slot in data + control} == {"READY"}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"control.plane.listener.name": "NONE"}, "not among the listeners"),
        ({"inter.broker.listener.name": "CONTROL"}, "should have a different value"),
        (
            {
                "listeners": "CONTROL://127.0.0.1:0",
                "listener.security.protocol.map": "CONTROL:PLAINTEXT",
            },
            "no other listener",
        ),
    ],
)
def test_a_control_plane_that_cannot_be_is_refused(settings, complaint):
    config = {key: str(value) for key, value in (CONTROL | settings).items()}
    with pytest.raises(ConfigError, match=complaint):
        BrokerConfig.load(config, None, {}, cores=2)
