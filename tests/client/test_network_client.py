"""NetworkClient: requests over connections that come, go, lie and fall silent.

Mirrors Kafka's NetworkClientTest, InFlightRequestsTest and ClusterConnectionStatesTest.
"""

from __future__ import annotations

import itertools
import random

import pytest

from mpbroker.client.addresses import Address
from mpbroker.client.backoff import Backoff
from mpbroker.client.client_request import ClientResponse
from mpbroker.client.errors import UnsupportedVersionError
from mpbroker.client.metadata import Metadata
from mpbroker.client.network_client import NetworkClient
from mpbroker.client.node_connection import NodeState
from mpbroker.client.settings import ClientSettings
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.framing import encode_frame
from mpbroker.protocol.headers import encode_response_header
from mpbroker.protocol.messages.api_versions import ApiVersion, ApiVersionsResponse
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from tests.client.fake_wire import FakeWire

ANSWER = InitProducerIdResponse(producer_id=7, producer_epoch=0)


class Rig:
    """A client on a fake wire, with metadata known and node 0 connected."""

    def __init__(self, connect: bool = True, **settings: object) -> None:
        self.wire = FakeWire({"t": [0, 1]})
        self.names: dict[str, list[Address]] = {}
        self.settings = ClientSettings(
            bootstrap=(Address("boot", 9092),), client_id="me", **settings
        )
        self.metadata = Metadata(rng=random.Random(1))
        self.client = NetworkClient(
            self.wire,
            self.metadata,
            self.settings,
            self.resolve,
            self.wire.clock,
            random.Random(2),
        )
        self.answers: list[ClientResponse] = []
        if connect:
            self.turns(5)
            assert self.metadata.snapshot.nodes
            self.connect(0)

    def resolve(self, host: str, port: int) -> list[Address]:
        if host in self.names:
            if not self.names[host]:
                raise OSError("no address associated with hostname")
            return list(self.names[host])
        return [Address("10.0.0.1", port)]

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            self.client.poll(0, self.wire.now_ms)

    def connect(self, node: int) -> None:
        for _ in range(5):
            if self.client.ready(node, self.wire.now_ms):
                return
            self.turns()
        raise AssertionError(f"node {node} did not become ready")

    def send(self, node: int = 0, **options: object) -> None:
        request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1)
        self.client.send(
            node,
            request,
            InitProducerIdResponse,
            self.answers.append,
            self.wire.now_ms,
            **options,
        )

    def pass_ms(self, ms: float) -> None:
        self.wire.now_ms += ms


def test_a_request_is_answered_and_called_back_once():
    rig = Rig()
    rig.send()
    assert rig.client.in_flight(0) == 1
    rig.wire.answer(ANSWER)
    rig.turns(2)
    assert rig.client.in_flight(0) == 0
    (answer,) = rig.answers
    assert answer.response == ANSWER
    assert not answer.disconnected


def test_nothing_can_be_sent_to_a_node_that_is_not_ready():
    rig = Rig()
    with pytest.raises(AssertionError, match="not ready"):
        rig.send(1)


def test_a_node_is_ready_only_after_its_versions_are_known():
    rig = Rig()
    rig.wire.silent.add(ApiKey.API_VERSIONS)
    assert not rig.client.ready(1, rig.wire.now_ms)
    rig.turns(3)
    assert not rig.client.ready(1, rig.wire.now_ms)
    rig.wire.answer(rig.wire.api_versions(), *rig.wire.waiting(ApiKey.API_VERSIONS, 1))
    rig.turns()
    assert rig.client.ready(1, rig.wire.now_ms)


def test_a_name_that_cannot_be_resolved_is_not_an_exception():
    rig = Rig()
    rig.names["b1"] = []
    assert not rig.client.ready(1, rig.wire.now_ms)
    assert "no address" in rig.client.last_error
    assert rig.client.delay_ms(1, rig.wire.now_ms) > 0


@pytest.mark.parametrize("known", [2, None])
def test_api_versions_are_asked_again_in_a_version_the_broker_knows(known):
    rig = Rig()

    def refuse(sent):
        if sent.version > (known or 0):
            return ApiVersionsResponse(
                error_code=ErrorCode.UNSUPPORTED_VERSION,
                api_keys=(
                    []
                    if known is None
                    else [
                        ApiVersion(
                            api_key=ApiKey.API_VERSIONS,
                            min_version=0,
                            max_version=known,
                        )
                    ]
                ),
            )
        rig.wire.on_api_versions = None
        rig.wire.answer(rig.wire.api_versions(), sent)
        return None

    rig.wire.on_api_versions = refuse
    rig.connect(1)
    asked = [s.version for s in rig.wire.all_sent if s.key == 18 and s.node == 1]
    assert asked == [4, known or 0]


def test_api_versions_refused_otherwise_end_the_connection():
    rig = Rig()
    rig.wire.on_api_versions = lambda sent: ApiVersionsResponse(
        error_code=ErrorCode.INVALID_REQUEST
    )
    rig.client.ready(1, rig.wire.now_ms)
    rig.turns(3)
    assert 1 not in rig.wire.open
    assert "INVALID_REQUEST" in rig.client.last_error


def test_a_late_answer_drops_the_connection_and_all_in_flight():
    rig = Rig()
    for _ in range(3):
        rig.send()
    rig.pass_ms(29_999)
    rig.turns()
    assert not rig.answers
    rig.pass_ms(1)
    rig.turns()
    assert [a.timed_out for a in rig.answers] == [True] * 3
    assert all(a.disconnected for a in rig.answers)
    assert "request.timeout.ms" in str(rig.answers[0].error)
    assert 0 not in rig.wire.open


def test_the_wait_ends_with_the_first_deadline():
    rig = Rig()
    rig.send(timeout_ms=70)
    rig.client.poll(1000, rig.wire.now_ms)
    assert rig.wire.waits[-1] == 70


def test_a_later_requests_deadline_may_be_the_first():
    rig = Rig()
    rig.send(timeout_ms=float("inf"))
    rig.send(timeout_ms=70)
    rig.client.poll(1000, rig.wire.now_ms)
    assert rig.wire.waits[-1] == 70


def test_another_correlation_id_than_the_oldest_ends_the_connection():
    rig = Rig()
    rig.send()
    rig.send()
    _, second = rig.wire.sent
    rig.wire.answer(ANSWER, second)
    rig.turns()
    assert [a.disconnected for a in rig.answers] == [True, True]
    assert f"{second.correlation_id}" in str(rig.answers[0].error)
    assert 0 not in rig.wire.open


@pytest.mark.parametrize(
    "data",
    [
        b"\x7f\xff\xff\xff",
        b"\xff\xff\xff\xff",
        encode_frame(b""),
        encode_frame(b"\0\0"),
        encode_frame(b"\0" * 200),
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
def test_bytes_that_are_no_answer_end_the_connection(data):
    rig = Rig()
    rig.send()
    rig.wire.raw(0, data)
    rig.turns()
    assert [a.disconnected for a in rig.answers] == [True]
    assert "Kafka" in str(rig.answers[0].error)


def test_an_answer_to_no_request_ends_the_connection():
    rig = Rig()
    header = encode_response_header(ApiKey.INIT_PRODUCER_ID, 0, 5)
    rig.wire.raw(0, encode_frame([header, ANSWER.encode(0)]))
    rig.turns()
    assert 0 not in rig.wire.open


def test_an_answer_cut_anywhere_is_waited_for_and_then_lost_with_its_connection():
    whole = len(ANSWER.encode(6))
    for cut in range(1, whole + 8):
        rig = Rig()
        rig.send()
        (sent,) = rig.wire.sent
        header = encode_response_header(sent.key, sent.version, sent.correlation_id)
        frame = encode_frame([header, ANSWER.encode(sent.version)])
        rig.wire.raw(0, frame[:cut])
        rig.turns()
        if cut >= len(frame):
            assert rig.answers[0].response == ANSWER
            continue
        assert not rig.answers
        rig.wire.hang_up(0)
        rig.turns()
        assert rig.answers[0].disconnected


def test_answers_in_one_byte_pieces_arrive():
    rig = Rig()
    rig.send()
    (sent,) = rig.wire.sent
    header = encode_response_header(sent.key, sent.version, sent.correlation_id)
    for byte in encode_frame([header, ANSWER.encode(sent.version)]):
        rig.wire.raw(0, bytes([byte]))
        rig.turns()
    assert rig.answers[0].response == ANSWER


def test_what_was_in_flight_fails_in_the_order_sent():
    rig = Rig()
    order = []
    for index in range(4):
        rig.client.send(
            0,
            InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1),
            InitProducerIdResponse,
            lambda answer, index=index: order.append(index),
            rig.wire.now_ms,
        )
    rig.wire.hang_up(0)
    rig.turns()
    assert order == [0, 1, 2, 3]


def test_a_callback_that_raises_does_not_stop_the_others(caplog):
    rig = Rig()
    rig.client.send(
        0,
        InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1),
        InitProducerIdResponse,
        lambda answer: 1 / 0,
        rig.wire.now_ms,
    )
    rig.send()
    rig.wire.answer(ANSWER)
    rig.wire.answer(ANSWER)
    rig.turns()
    assert len(rig.answers) == 1
    assert "callback of InitProducerIdRequest" in caplog.text


def test_no_more_requests_than_allowed_are_in_flight():
    rig = Rig(max_in_flight=2)
    rig.send()
    rig.send()
    assert not rig.client.ready(0, rig.wire.now_ms)
    rig.wire.answer(ANSWER)
    rig.turns()
    assert rig.client.ready(0, rig.wire.now_ms)


def test_nothing_is_sent_while_the_request_before_is_still_being_written():
    rig = Rig()
    rig.wire.blocked.add(0)
    assert not rig.client.ready(0, rig.wire.now_ms)


def test_a_version_the_node_does_not_speak_is_told_by_the_callback():
    rig = Rig(connect=False)
    rig.wire.versions[ApiKey.INIT_PRODUCER_ID] = (9, 9)
    rig.turns(5)
    rig.connect(0)
    rig.send()
    assert not rig.answers
    rig.turns()
    assert isinstance(rig.answers[0].error, UnsupportedVersionError)
    assert not rig.answers[0].disconnected


def test_throttling_holds_requests_back_and_gives_those_in_flight_more_time():
    rig = Rig()
    rig.send()
    rig.send()
    rig.wire.answer(InitProducerIdResponse(throttle_time_ms=100))
    rig.turns()
    assert not rig.client.ready(0, rig.wire.now_ms)
    assert rig.client.delay_ms(0, rig.wire.now_ms) == 100
    assert rig.client.least_loaded_node(rig.wire.now_ms) != 0
    rig.pass_ms(30_050)
    rig.turns()
    assert len(rig.answers) == 1  # the second has 100 ms more
    rig.pass_ms(50)
    rig.turns()
    assert rig.answers[1].timed_out


def test_throttling_by_an_older_broker_is_over_when_it_answers():
    rig = Rig(connect=False)
    rig.wire.versions[ApiKey.INIT_PRODUCER_ID] = (0, 0)
    rig.turns(5)
    rig.connect(0)
    rig.send()
    rig.wire.answer(InitProducerIdResponse(throttle_time_ms=100))
    rig.turns()
    assert rig.client.ready(0, rig.wire.now_ms)


def test_backoff_grows_and_starts_again_after_a_success():
    rig = Rig()
    rig.wire.refuse_connect.add(1)
    delays = []
    for _ in range(8):
        rig.client.ready(1, rig.wire.now_ms)
        rig.turns()
        delay = rig.client.delay_ms(1, rig.wire.now_ms)
        delays.append(delay)
        assert not rig.client.ready(1, rig.wire.now_ms)
        rig.pass_ms(delay)
    for failures, delay in enumerate(delays):
        expected = min(50 * 2**failures, 1000)
        assert 0.8 * expected <= delay <= 1.2 * expected
    rig.wire.refuse_connect.clear()
    rig.connect(1)
    assert rig.client.delay_ms(1, rig.wire.now_ms) == float("inf")
    rig.wire.hang_up(1)
    rig.turns()
    assert rig.client.delay_ms(1, rig.wire.now_ms) <= 60


def test_a_backoff_whose_limit_is_its_beginning_is_constant():
    backoff = Backoff(70, 70)
    assert {backoff.delay_ms(n, random.Random(n)) for n in range(9)} == {70.0}


def test_a_backoff_never_overflows():
    assert Backoff(50, 1000).delay_ms(10**9, random.Random(1)) <= 1200


def test_a_connection_that_is_not_made_in_time_is_given_up():
    rig = Rig()
    rig.wire.hang_connect.add(1)
    rig.client.ready(1, rig.wire.now_ms)
    rig.turns()
    rig.pass_ms(7_999)
    rig.turns()
    assert 1 in rig.wire.open
    rig.pass_ms(4_001)  # 10 s and 20 %
    rig.turns()
    assert 1 not in rig.wire.open
    assert "no connection in time" in rig.client.last_error


def test_a_peer_that_never_tells_its_versions_is_given_up_too():
    rig = Rig()
    rig.wire.silent.add(ApiKey.API_VERSIONS)
    rig.client.ready(1, rig.wire.now_ms)
    rig.turns(3)
    rig.pass_ms(40_000)
    rig.turns()
    assert 1 not in rig.wire.open


def test_every_address_of_a_name_is_tried_in_turn():
    rig = Rig()
    rig.names["b1"] = [Address(f"10.0.0.{i}", 9092) for i in (1, 2, 3)]
    rig.wire.refuse_connect.add(1)
    for _ in range(4):
        rig.client.ready(1, rig.wire.now_ms)
        rig.turns()
        rig.pass_ms(2000)
    tried = [address.host for node, address in rig.wire.connects if node == 1]
    assert tried == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1"]


def test_after_a_success_names_are_resolved_anew():
    rig = Rig()
    rig.connect(1)
    rig.names["b1"] = [Address("10.9.9.9", 9092)]
    rig.wire.hang_up(1)
    rig.turns()
    rig.pass_ms(100)
    rig.connect(1)
    assert rig.wire.connects[-1] == (1, Address("10.9.9.9", 9092))


def test_the_least_loaded_node_is_ready_and_has_the_fewest_in_flight():
    rig = Rig()
    rig.connect(1)
    rig.send(0)
    assert rig.client.least_loaded_node(rig.wire.now_ms) == 1
    rig.send(1)
    rig.send(1)
    assert rig.client.least_loaded_node(rig.wire.now_ms) == 0


def test_no_node_is_least_loaded_while_all_back_off():
    rig = Rig()
    rig.wire.refuse_connect |= {0, 1}
    rig.wire.hang_up(0)
    rig.turns()
    rig.client.ready(1, rig.wire.now_ms)
    rig.turns(2)
    assert rig.client.least_loaded_node(rig.wire.now_ms) is None


def test_disconnecting_is_told_once_and_can_be_repeated():
    rig = Rig()
    rig.send()
    rig.client.disconnect(0, rig.wire.now_ms)
    rig.client.disconnect(0, rig.wire.now_ms)
    rig.turns()
    assert len(rig.answers) == 1
    rig.pass_ms(100)
    rig.connect(0)


def test_an_unused_connection_is_closed_after_its_idle_time():
    rig = Rig()
    rig.pass_ms(539_000)
    rig.turns()
    assert 0 in rig.wire.open
    rig.wire.silent.add(ApiKey.METADATA)
    rig.pass_ms(2_000)
    rig.turns()
    rig.connect(0)  # and made again when it is needed


def test_correlation_ids_are_unique_on_a_connection():
    rig = Rig()
    for _ in range(100):
        rig.send()
        rig.wire.answer(ANSWER)
        rig.turns()
    ids = [s.correlation_id for s in rig.wire.all_sent if s.node == 0]
    assert len(ids) == len(set(ids)) > 100


def test_a_connection_closed_while_it_is_made_leaves_nothing_and_is_made_again():
    rig = Rig()
    rig.wire.hang_connect.add(1)
    rig.client.ready(1, rig.wire.now_ms)
    rig.turns()
    assert 1 in rig.wire.open
    rig.client.disconnect(1, rig.wire.now_ms)
    assert 1 not in rig.wire.open
    assert not rig.answers
    rig.wire.hang_connect.clear()
    rig.pass_ms(100)
    rig.connect(1)


def test_a_throttled_node_is_not_the_least_loaded_one():
    rig = Rig()
    rig.connect(1)
    rig.send(1)
    rig.wire.answer(InitProducerIdResponse(throttle_time_ms=500))
    rig.turns()
    for _ in range(20):  # by chance it would be either
        assert rig.client.least_loaded_node(rig.wire.now_ms) == 0
    rig.pass_ms(500)
    assert {rig.client.least_loaded_node(rig.wire.now_ms) for _ in range(50)} == {0, 1}


def test_of_nodes_without_a_connection_the_one_longest_not_tried_is_taken():
    rig = Rig(rebootstrap=False)
    rig.wire.refuse_connect |= {0, 1}
    rig.wire.hang_up(0)
    rig.turns(2)
    before = len(rig.wire.connects)
    for _ in range(10):
        rig.pass_ms(5000)
        rig.turns(1)  # somebody must be asked for metadata
    tried = [node for node, _ in rig.wire.connects[before:]]
    assert len(tried) >= 6
    assert all(node != after for node, after in itertools.pairwise(tried))


def test_a_node_that_is_only_busy_is_still_there():
    rig = Rig(max_in_flight=1)
    rig.connect(1)
    rig.send(0)
    rig.send(1)
    assert rig.client.least_loaded_node(rig.wire.now_ms) is None


def test_connections_may_be_counted_while_others_are_made():
    rig = Rig()
    nodes = rig.client._nodes

    class Met:
        """A node at which the count is when another thread adds one."""

        @property
        def state(self) -> NodeState:
            nodes[9] = nodes[0]
            return NodeState.READY

    before = rig.client.connection_count()
    nodes[8] = Met()
    assert rig.client.connection_count() == before + 1
