"""Quotas in the short cut: the same is counted, and nobody gets past them."""

from __future__ import annotations

import signal

import pytest

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import (
    CONNECTION_MUTED_UNTIL,
    CONNECTION_SLOT,
    CONNECTION_STATE,
    PROCESSOR_UNIT_COST,
    SLOT_CONNECTION,
    ConnectionState,
    connection_row,
    processor_row,
)
from mpbroker.ipc.layout import slot_row as slot_words
from mpbroker.ipc.tables.quota_table import QuotaKind, read_quotas
from mpbroker.metadata.quota_records import CLIENT_ID, client_quota_record
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.server.core_cache.handler_stage import Stage, produce_request
from tests.support.children import fork, kill_at_step, steps_of
from tests.support.memory import broker_memory

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="no compiled core")

S = 1_000_000_000
RATE = "producer_byte_rate"
TIME = "request_percentage"


class QuotaStage(Stage):
    """A stage whose clients have quotas."""

    def __init__(self, memory, data, *, short, syncs=False):
        super().__init__(memory, data, short=short, syncs=syncs)
        self.registry.create_topic("t", 1)
        # Whose requests they are is still there.
        memory.control.words[connection_row(0) + CONNECTION_SLOT] = 3 + 1

    def set(self, key, bound, client="test"):
        record = client_quota_record(((CLIENT_ID, client),), key, bound)
        self.registry.change(lambda image: [record])

    def produce(self, size=100, acks=1):
        """Return its answer's throttle time; None: there is no answer."""
        frame = produce_request("t", 0, batch(size), acks=acks)
        _, answer = self.ask(frame)
        if not answer:
            return None
        # Size, correlation id, tagged fields.
        return ProduceResponse.decode(9, memoryview(answer)[9:]).throttle_time_ms

    def charged(self, kind=QuotaKind.PRODUCE):
        readings = read_quotas(self.memory.quotas, 11, S, 0, 1 << 62)
        return [each.charged for each in readings if each.kind == kind]

    @property
    def muted_until(self):
        words = self.memory.control.words
        row = connection_row(words[slot_words(3) + SLOT_CONNECTION])
        return words[row + CONNECTION_MUTED_UNTIL]


def batch(size):
    builder = RecordBatchBuilder()
    builder.append(1_700_000_000_000, None, b"x" * size)
    return bytes(builder.build())


def produce_to_both(topic):
    rows = [PartitionProduceData(index=n, records=batch(100)) for n in range(2)]
    message = ProduceRequest(
        acks=1,
        timeout_ms=1000,
        topic_data=[TopicProduceData(name=topic, partition_data=rows)],
    )
    header = encode_request_header(ApiKey.PRODUCE, 9, 77, "test")
    return header + message.encode(9)


@pytest.fixture
def make_stage(tmp_path):
    memories = []

    def make(*, short=True, syncs=False):
        memory = broker_memory()
        memories.append(memory)
        data = tmp_path / str(len(memories))
        return QuotaStage(memory.__enter__(), data, short=short, syncs=syncs)

    yield make
    for memory in memories:
        memory.__exit__(None, None, None)


def test_who_is_within_its_quota_takes_the_short_way_and_is_counted(make_stage):
    short, usual = make_stage(), make_stage(short=False)
    for stage in (short, usual):
        stage.set(RATE, 1e9)
        stage.set(TIME, 1000.0)
        assert [stage.produce() for _ in range(10)] == [0] * 10
        assert stage.produce(acks=0) is None
    assert (
        len(short.short_ways) == 9
    )  # the first opens files, the second is learnt from
    assert short.charged() == usual.charged()
    [spent] = short.charged(QuotaKind.REQUEST)
    assert spent > 0


def test_nobody_pays_in_the_short_way_for_a_client_that_was_there_before(make_stage):
    stage = make_stage()
    stage.set(RATE, 1e9)
    for _ in range(3):
        stage.produce()
    [before] = stage.charged()
    row = connection_row(0)
    words = stage.memory.control.words
    words[row + CONNECTION_SLOT] = 0  # it has gone, and another client has its row
    words[row + CONNECTION_STATE] = ConnectionState.READING
    stage.produce(10_000)
    assert stage.charged() == [before]


def test_what_the_processor_did_is_charged_in_the_short_way_too(make_stage):
    spent = []
    for stage in (make_stage(), make_stage(short=False)):
        stage.set(TIME, 1e12)
        words = stage.memory.control.words
        # So long that what the handler takes does not count beside it.
        words[processor_row(0) + PROCESSOR_UNIT_COST] = 10**12
        assert [stage.produce(size=65536 // 8) for _ in range(10)] == [0] * 10
        spent += stage.charged(QuotaKind.REQUEST)
    short, usual = spent
    assert short / 10**12 == pytest.approx(10 + 10 / 8, abs=0.1)
    assert short == pytest.approx(usual, rel=0.01)


def test_what_waits_for_the_disk_takes_its_time_in_the_short_way_too(make_stage):
    spent = []
    for stage in (make_stage(syncs=True), make_stage(short=False, syncs=True)):
        stage.set(TIME, 1e12)
        words = stage.memory.control.words
        words[processor_row(0) + PROCESSOR_UNIT_COST] = 10**12
        for _ in range(10):
            stage.publish(produce_request("t", 0, batch(100), acks=-1))
            stage.handler.turn()
            stage.end_syncs()
            stage.answer(3)
        spent += stage.charged(QuotaKind.REQUEST)
    short, usual = spent
    assert short == pytest.approx(usual, rel=0.01)


def test_who_would_be_over_it_is_throttled_and_counted_once(make_stage):
    short, usual = make_stage(), make_stage(short=False)
    told = {}
    for stage in (short, usual):
        stage.set(RATE, 200.0)
        told[stage] = [stage.produce(300) for _ in range(8)]
        assert stage.muted_until > 0
    assert len(short.short_ways) == 2  # then they were over it
    assert [bool(each) for each in told[short]] == [bool(each) for each in told[usual]]
    assert short.charged() == usual.charged()


def test_time_that_is_used_up_throttles_the_next_request(make_stage):
    stage = make_stage()
    stage.set(TIME, 0.001)  # 0.1 ms in ten seconds
    told = [stage.produce() for _ in range(2000)]
    assert told[-1] > 0
    assert stage.muted_until > 0


def test_clients_without_a_quota_take_the_short_way_beside_those_with_one(make_stage):
    stage = make_stage()
    stage.set(RATE, 1.0, "another")
    assert [stage.produce() for _ in range(5)] == [0] * 5
    assert len(stage.short_ways) == 3
    assert stage.charged() == []


def test_a_changed_quota_counts_for_the_next_request(make_stage):
    stage = make_stage()
    assert [stage.produce() for _ in range(3)] == [0] * 3
    stage.set(RATE, 1.0)
    assert stage.produce() > 0
    stage.set(RATE, None)
    ways = len(stage.short_ways)
    assert [stage.produce() for _ in range(3)] == [0] * 3
    assert len(stage.short_ways) == ways + 2


def test_what_is_not_executed_after_all_costs_what_it_costs_the_usual_way(make_stage):
    stage = make_stage()
    stage.set(RATE, 1e9)
    stage.produce()
    [before] = stage.charged()
    stage.ask(produce_request("nowhere", 0, batch(100)))
    [after] = stage.charged()
    assert after - before == len(produce_request("nowhere", 0, batch(100)))


def test_what_the_usual_way_goes_on_with_is_charged_once(make_stage):
    """The second partition's lock has a dead owner, whom it leaves to Python."""
    stage = make_stage()
    stage.set(RATE, 1e9)
    stage.registry.create_topic("several", 2)
    frame = produce_to_both("several")
    for _ in range(3):
        stage.ask(frame)
    assert len(stage.short_ways) == 1
    [before] = stage.charged()
    fork(lambda: stage.log("several", 1).row.lock())
    stage.ask(frame)
    [after] = stage.charged()
    assert len(stage.short_ways) == 1
    assert after - before == len(frame)
    assert [stage.log("several", n).row.log_end_offset for n in range(2)] == [4, 4]


def test_whoever_is_killed_while_it_charges_leaves_a_request_more_at_most(make_stage):
    stage = make_stage()
    stage.set(RATE, 1e9)
    stage.set(TIME, 1e6)
    length = len(produce_request("t", 0, batch(100)))
    stage.produce()
    for step in range(1, steps_of(stage.produce) + 1):
        [before] = stage.charged()

        def work(step=step):
            kill_at_step(step)
            stage.handler.turn()

        stage.publish(produce_request("t", 0, batch(100)))
        assert fork(work) in (0, -signal.SIGKILL)
        [after] = stage.charged()
        assert after - before in (0, length)
        # Locks are taken over, and samples go on.
        row = stage.quota_table.find(QuotaKind.PRODUCE, "", "test", 0)
        assert row.charge(0, 1e9, row._words[row._at + 19]) == 0
