"""Requests of the coordinator's, handed on in C and in Python: nobody can tell."""

from __future__ import annotations

import contextlib
import itertools
import signal
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.ipc.black_box import own_box
from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import (
    CONNECTION_SLOT,
    COORDINATOR_RING,
    HANDLER_BUSY_SLOT,
    HANDLER_COUNTERS,
    RING_MUTEX,
    SLOT_DEQUEUED,
    SLOT_RECEIVED,
    SLOT_WORDS,
    HandlerCounter,
    ResponseKind,
    SlotState,
    connection_row,
    handler_row,
    slot_row,
)
from mpbroker.ipc.tables.quota_table import read_quotas
from mpbroker.metadata.quota_records import CLIENT_ID, client_quota_record
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import FLEXIBLE_FROM, encode_request_header
from mpbroker.server.apis import APIS, Forwarded, forwarded_apis
from mpbroker.server.core_cache import Forwarding
from mpbroker.server.dispatcher import ServedApi
from mpbroker.server.request import FORWARDED
from mpbroker.supervisor.repair.recovery import Death, Repair
from tests.server.core_cache.handler_stage import Stage, produce_request
from tests.server.core_cache.test_core_requests import batch
from tests.support.children import deaths, die, fork, kill_at_step, steps_of
from tests.support.memory import broker_memory, claimer_of, state_of

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core is not there"
)

S = 1_000_000_000
HEARTBEAT, OFFSET_COMMIT = int(ApiKey.HEARTBEAT), int(ApiKey.OFFSET_COMMIT)
COORDINATOR_APIS = [
    key for key, api in APIS.items() if api.forwarded is Forwarded.ALWAYS
]
VERSIONS = [
    (int(key), version)
    for key in COORDINATOR_APIS
    for version in range(APIS[key].versions[0], APIS[key].versions[1] + 1)
]


class ForwardStage(Stage):
    """A stage with a lane, and with the APIs that go there."""

    def __init__(self, memory, data, *, short):
        forwarding = Forwarding(memory.lane, forwarded_apis())
        super().__init__(memory, data, short=short, forwarding=forwarding)

        def forward(request):
            memory.lane.forward(request.slot)
            return FORWARDED

        for key in COORDINATOR_APIS:
            self.apis[int(key)] = ServedApi(key, APIS[key].versions, forward)
        # Looks into the body before it says whose it is.
        key = ApiKey.INIT_PRODUCER_ID
        self.apis[int(key)] = ServedApi(
            key, APIS[key].versions, lambda request: b"an id"
        )

    def outcome(self, frame, slot=3):
        """What has become of a request, for all to see."""
        self.refused.clear()
        self.publish(frame, slot)
        self.handler.turn()
        return self.seen(slot)

    def seen(self, slot):
        memory = self.memory
        words, row = memory.control.words, slot_row(slot)
        content = words[row : row + SLOT_WORDS].tolist()
        answered = memory.responses[0].pop()
        if not answered:
            content[SLOT_RECEIVED] = content[SLOT_DEQUEUED] = 0
        return (
            memory.lane.waiting(),
            [self.answer_in(each) for each in answered],
            None if answered else content,
            list(self.refused),
            words[handler_row(0) + HANDLER_BUSY_SLOT],
            words[handler_row(0) + HANDLER_COUNTERS + HandlerCounter.REQUESTS],
        )


@contextlib.contextmanager
def stages(directory):
    with broker_memory() as first, broker_memory() as second:
        pair = (
            ForwardStage(first, directory / "short", short=True),
            ForwardStage(second, directory / "usual", short=False),
        )
        for stage in pair:
            stage.registry.create_topic("one", 1)
        yield pair
        for stage in pair:
            stage.logs.close_files()


@pytest.fixture
def pair(tmp_path):
    with stages(tmp_path) as made:
        yield made


@pytest.fixture
def short(pair):
    return pair[0]


def frame(key=HEARTBEAT, version=4, client="test", body=b"whatever it says"):
    return encode_request_header(key, version, 77, client) + body


def by_both(pair, request):
    """What has become of it, which is the same by both ways."""
    outcomes = [stage.outcome(request) for stage in pair]
    assert outcomes[0] == outcomes[1]
    for stage in pair:
        stage.memory.lane.take(99, arm=False)
    return outcomes[0]


def damage(memory):
    """Make the lane's lock something that is no lock: its kind is none."""
    first = COORDINATOR_RING + RING_MUTEX
    memory.control.words[first + 2] = -1


# -- what is handed on in C ------------------------------------------------------


@pytest.mark.parametrize(("key", "version"), VERSIONS)
def test_what_is_the_coordinators_goes_to_its_lane_without_python(pair, key, version):
    lane, answers, _, refused, busy, _ = by_both(pair, frame(key, version))
    assert (lane, answers, refused, busy) == ([3], [], [], 0)
    assert pair[0].short_ways == [key]


@pytest.mark.parametrize("client", [None, "", "x" * 500])
def test_whoever_asks_is_heard(pair, client):
    for version in (3, 4):
        assert by_both(pair, frame(version=version, client=client))[0] == [3]
    assert pair[0].short_ways == [HEARTBEAT] * 2


def test_it_is_the_handlers_in_name_until_the_coordinator_takes_it(short):
    short.publish(frame())
    short.handler.turn()
    assert short.memory.lane.waiting() == [3]
    assert state_of(short.memory, 3) == SlotState.CLAIMED
    assert claimer_of(short.memory, 3) == 0
    assert short.short_ways == [HEARTBEAT]


def test_each_is_noted_in_the_black_box_under_its_api(tmp_path):
    box = own_box()
    with patch("mpbroker.server.request_handler.own_box", lambda: box):
        for number, short in enumerate((True, False), 1):
            with broker_memory() as memory:
                stage = ForwardStage(memory, tmp_path / str(short), short=short)
                for slot, key in enumerate((HEARTBEAT, HEARTBEAT, OFFSET_COMMIT)):
                    stage.publish(frame(key), slot)
                while stage.memory.ring.waiting():
                    stage.handler.turn()
                counts = {key: count for key, (count, _) in box.totals().items()}
                assert counts == {HEARTBEAT: 2 * number, OFFSET_COMMIT: number}
                assert stage.memory.lane.waiting() == [0, 1, 2]


def test_others_of_the_same_batch_are_answered_beside_it(pair):
    for stage in pair:
        for _ in range(2):
            stage.ask(produce_request("one", 0, batch()))
        stage.short_ways.clear()
        stage.publish(frame(), 3)
        stage.publish(produce_request("one", 0, batch()), 4)
        stage.publish(frame(OFFSET_COMMIT), 5)
        while stage.memory.ring.waiting():
            stage.handler.turn()
        assert stage.memory.lane.waiting() == [3, 5]
        assert stage.memory.responses[0].waiting() == [4]
    assert pair[0].short_ways == [HEARTBEAT, 0, OFFSET_COMMIT]


def test_news_of_the_metadata_are_not_waited_for(pair):
    """As ever: the coordinator reads them itself."""
    for stage in pair:
        stage.registry.create_topic("another", 1)
    assert by_both(pair, frame())[0] == [3]
    assert pair[0].short_ways == [HEARTBEAT]


def test_what_it_costs_is_charged_where_it_is_executed(pair):
    for stage in pair:
        words = stage.memory.control.words
        for key in ("request_percentage", "producer_byte_rate"):
            record = client_quota_record(((CLIENT_ID, "test"),), key, 1.0)
            stage.registry.change(lambda image, record=record: [record])
        # Whose requests they are is still there, and known by one that was charged.
        words[connection_row(0) + CONNECTION_SLOT] = 3 + 1
        for _ in range(3):
            stage.ask(produce_request("one", 0, batch()))
        stage.short_ways.clear()
        before = charged(stage)
        assert stage.outcome(frame())[0] == [3]
        assert charged(stage) == before
        assert len(before) == 2 and all(before)
    assert pair[0].core_cache._compiled.has_quotas
    assert pair[0].short_ways == [HEARTBEAT]


def charged(stage):
    readings = read_quotas(stage.memory.quotas, 11, S, 0, 1 << 62)
    return [each.charged for each in readings]


# -- what is left to Python ------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "version"),
    [(OFFSET_COMMIT, 1), (HEARTBEAT, 5), (HEARTBEAT, -1), (HEARTBEAT, 0x7FFF)],
)
def test_a_version_that_is_not_served_closes_the_connection(pair, key, version):
    head = key.to_bytes(2, "big") + version.to_bytes(2, "big", signed=True)
    request = head + b"\0\0\0\x4d\0\4test\0 and so on"
    lane, answers, _, refused, _, _ = by_both(pair, request)
    assert (lane, refused) == ([], [(key, 35)])  # UNSUPPORTED_VERSION
    assert answers[0][0] == ResponseKind.CLOSE
    assert pair[0].short_ways == []


@pytest.mark.parametrize(
    "tail",
    [b"\xff\xfe\0 a length of -2", b"\0\2\xc3\x28\0 no UTF-8"],
)
def test_a_client_id_that_kafka_can_read_closes_nothing(pair, tail):
    lane, _, _, refused, _, _ = by_both(pair, frame()[:8] + tail)
    assert (lane, refused) == ([3], [])


@pytest.mark.parametrize(
    "tail",
    [
        b"\0\4tes",
        b"\x7f\xff\0",
        b"\0\4test",  # without its tagged fields
        b"\0\4test\1\0\7short",
        b"\0",
        b"",
    ],
)
def test_a_header_that_cannot_be_read_closes_the_connection(pair, tail):
    lane, answers, _, refused, _, _ = by_both(pair, frame()[:8] + tail)
    assert (lane, refused) == ([], [(-1, 42)])  # INVALID_REQUEST
    assert answers[0][0] == ResponseKind.CLOSE
    assert pair[0].short_ways == []


@pytest.mark.parametrize(
    "tail", [b"\0\4test\1\0\2ab and so on", "\0\2\u00e9\0 and so on".encode()]
)
def test_a_header_that_is_not_plain_is_read_the_usual_way(pair, tail):
    assert by_both(pair, frame()[:8] + tail)[0] == [3]
    assert pair[0].short_ways == []


def test_who_may_have_to_be_answered_here_is(pair):
    lane, answers, *_ = by_both(pair, frame(ApiKey.INIT_PRODUCER_ID, 4))
    assert lane == []
    assert answers[0][1].endswith(b"an id")
    assert pair[0].short_ways == []


def test_where_there_is_no_lane_in_c_python_hands_on(tmp_path):
    with broker_memory() as memory:
        memory.lane.compiled = None
        stage = ForwardStage(memory, tmp_path / "data", short=True)
        assert stage.outcome(frame())[0] == [3]
        assert stage.short_ways == []


def test_a_lane_that_is_damaged_is_answered_and_serving_goes_on(pair):
    for stage in pair:
        damage(stage.memory)
        with patch.object(stage.memory.lane, "waiting", list):
            _, answers, _, refused, *_ = stage.outcome(frame())
        assert refused == [(HEARTBEAT, -1)]  # UNKNOWN_SERVER_ERROR
        assert answers[0][1].endswith(b"error")
        assert stage.ask(produce_request("one", 0, batch()))[0] == ResponseKind.BYTES
    assert pair[0].short_ways == []


# -- both, of anything -----------------------------------------------------------


@given(
    key=st.sampled_from(
        [int(key) for key in COORDINATOR_APIS] + [22, 92, 93, 127, 128]
    ),
    version=st.integers(-1, 12),
    tail=st.one_of(
        st.binary(max_size=40),
        st.tuples(st.text(max_size=9), st.binary(max_size=9)).map(
            lambda parts: (
                len(parts[0].encode()).to_bytes(2, "big") + parts[0].encode() + parts[1]
            )
        ),
    ),
)
def test_whatever_comes_both_ways_come_to_the_same(kept_pair, key, version, tail):
    head = key.to_bytes(2, "big") + version.to_bytes(2, "big", signed=True)
    by_both(kept_pair, head + b"\0\0\0\x07" + tail)


@pytest.fixture(scope="module")
def kept_pair(tmp_path_factory):
    with stages(tmp_path_factory.mktemp("stages")) as made:
        yield made


def test_the_table_says_of_each_what_its_headers_are():
    assert forwarded_apis() == {
        int(key): (*APIS[key].versions, FLEXIBLE_FROM[key]) for key in COORDINATOR_APIS
    }
    assert int(ApiKey.INIT_PRODUCER_ID) not in forwarded_apis()


# -- death -----------------------------------------------------------------------


def test_a_handler_killed_at_any_step_leaves_each_request_one_owner(short):
    slots, memory = (3, 4, 5), short.memory

    def prepare():
        memory.lane.take(99, arm=False)
        memory.ring.take(99, 0, 1, arm=False)
        memory.lane.take(99, arm=True)  # the coordinator sleeps
        for slot, key in zip(slots, itertools.cycle((HEARTBEAT, 26)), strict=False):
            short.publish(frame(key, 4), slot)

    prepare()
    total = steps_of(short.handler.turn)
    assert short.short_ways == [HEARTBEAT, 26, HEARTBEAT]
    seen = set()
    for step in deaths(total, 1000, seed=2):
        prepare()

        def doomed(step=step):
            kill_at_step(step)
            short.handler.turn()
            die()

        assert fork(doomed) == -signal.SIGKILL
        Repair(memory).after_handler(0, 0, Death.KILLED)
        forwarded, again = memory.lane.waiting(), memory.ring.waiting()
        assert sorted(forwarded + again) == list(slots)
        seen.add(len(forwarded))
    assert seen == {0, 1, 2, 3}
