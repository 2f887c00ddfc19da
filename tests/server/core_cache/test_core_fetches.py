"""Fetches by the short cut in C and by the usual way: the same, at the same time."""

from __future__ import annotations

import contextlib
import signal
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import (
    SLOT_DEADLINE,
    SLOT_STATE,
    STATE_MASK,
    RowStatus,
    SlotState,
    slot_row,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from mpbroker.storage.files.txn_index import AbortedTransaction, append_aborted
from tests.server.core_cache.handler_stage import Stage, produce_request
from tests.support.children import deaths, die, fork, kill_at_step, steps_of
from tests.support.memory import broker_memory, state_of

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core is not there"
)

FETCH = int(ApiKey.FETCH)
CLIENT, PRODUCER = 5, 6  # slots
FOREVER = 1 << 62


def batch(size=10, count=1):
    builder = RecordBatchBuilder()
    for number in range(count):
        builder.append(time.time_ns() // 1_000_000 + number, None, bytes(size))
    return bytes(builder.build())


RECORDS = batch()


class Consumer:
    """Fetches one topic's partitions from a stage."""

    def __init__(self, stage):
        self.stage = stage

    def frame(
        self,
        offsets,
        *,
        version=11,
        topic="one",
        session=0,
        epoch=-1,
        leader_epoch=-1,
        **options,
    ):
        """A whole request; `offsets`: by partition, or (offset, max bytes)."""
        found = self.stage.registry.topic(topic)
        partitions = [
            FetchPartition(
                partition=partition,
                current_leader_epoch=leader_epoch,
                fetch_offset=wanted if isinstance(wanted, int) else wanted[0],
                partition_max_bytes=1 << 20 if isinstance(wanted, int) else wanted[1],
            )
            for partition, wanted in offsets.items()
        ]
        topics = [
            FetchTopic(
                topic=topic,
                topic_id=found.topic_id if found else bytes(16),
                partitions=partitions,
            )
        ]
        options = {
            "max_wait_ms": 60_000,
            "min_bytes": 1,
            "max_bytes": 1 << 20,
        } | options
        message = FetchRequest(
            session_id=session, session_epoch=epoch, topics=topics, **options
        )
        header = encode_request_header(ApiKey.FETCH, version, 88, "test")
        return header + message.encode(version)

    def ask(self, frame):
        """Execute a fetch; its answer, or None if it waits."""
        self.stage.publish(frame, CLIENT)
        self.stage.handler.turn()
        return self.answer()

    def answer(self):
        answered = self.stage.memory.responses[0].pop()
        assert answered in ([CLIENT], [])
        if not answered:
            assert state_of(self.stage.memory, CLIENT) == SlotState.PARKED
            return None
        return self.read()

    def read(self):
        """The answer's bytes, with names for its topics' ids: each stage has others."""
        content = self.stage.sent(CLIENT)
        for topic in ("one", "two"):
            found = self.stage.registry.topic(topic)
            if found is not None:
                content = content.replace(found.topic_id, (topic * 6).encode()[:16])
        return content

    def produce(self, records=RECORDS, topic="one", partition=0):
        """Append; return the slots answered in the same turn but the producer's."""
        frame = produce_request(topic, partition, records)
        self.stage.publish(frame, PRODUCER)
        self.stage.handler.turn()
        answered = self.stage.memory.responses[0].pop()
        assert answered[0] == PRODUCER
        return answered[1:]

    def warm(self, topic="one", partitions=1):
        """Read up to the end once, the usual way: the next fetch can be plain."""
        for partition in range(partitions):
            for _ in range(2):
                self.produce(topic=topic, partition=partition)
        self.ask(self.frame(dict.fromkeys(range(partitions), 0), topic=topic))

    @property
    def short_ways(self):
        return self.stage.short_ways.count(FETCH)


class Pair:
    """One consumer with the short cut, one without, treated alike.

    The topic "one" has one partition, "two" has two; all hold two batches.
    """

    def __init__(self, *stages):
        self.short, self.usual = self.both = tuple(map(Consumer, stages))
        for stage in stages:
            stage.registry.create_topic("one", 1)
            stage.registry.create_topic("two", 2)
        for consumer in self.both:
            consumer.warm()
            consumer.warm("two", 2)

    def ask(self, *offsets, change=lambda frame: frame, **options):
        """What both are answered, or None if both wait."""
        first, second = (
            consumer.ask(change(consumer.frame(dict(enumerate(offsets)), **options)))
            for consumer in self.both
        )
        assert first == second
        return first

    def produce(self, *args, **options):
        """Append to both; say whether the fetch was answered with it."""
        first, second = (each.produce(*args, **options) for each in self.both)
        assert first == second
        return first == [CLIENT]

    def answer(self):
        first, second = (each.read() for each in self.both)
        assert first == second
        return first

    def expire(self):
        for each in self.both:
            each.stage.purgatory.expire(FOREVER)
            each.stage.channel.flush()
            assert each.stage.memory.responses[0].pop() == [CLIENT]
        return self.answer()


@contextlib.contextmanager
def pairs(directory, **options):
    with broker_memory() as first, broker_memory() as second:
        stages = (
            Stage(first, directory / "short", short=True, **options),
            Stage(second, directory / "usual", short=False, **options),
        )
        yield Pair(*stages)
        for stage in stages:
            stage.logs.close_files()


@pytest.fixture
def pair(tmp_path):
    with pairs(tmp_path) as made:
        yield made


@pytest.fixture
def short(pair):
    return pair.short


def offsets_in(answer, version=11):
    """The base offsets of the first partition's batches."""
    response = FetchResponse.decode(version, answer[8 + (version >= 12) :])
    records = bytes(response.responses[0].partitions[0].records)
    found = []
    while records:
        offset, size = struct.unpack_from(">qi", records)
        found.append(offset)
        records = records[12 + size :]
    return found


# -- what takes it ------------------------------------------------------------------


@pytest.mark.parametrize("isolation", [0, 1])
@pytest.mark.parametrize("version", [4, 5, 7, 9, 11, 12, 13, 15, 18])
def test_new_records_are_read_the_short_way(pair, version, isolation):
    pair.produce(batch(100, 3))
    answer = pair.ask(2, version=version, isolation_level=isolation)
    assert offsets_in(answer, version) == [2]
    assert pair.short.short_ways == 1


@pytest.mark.parametrize(
    ("known", "error"),
    [
        (-1, ErrorCode.NONE),
        (0, ErrorCode.FENCED_LEADER_EPOCH),
        (4, ErrorCode.FENCED_LEADER_EPOCH),
        (5, ErrorCode.NONE),
        (6, ErrorCode.UNKNOWN_LEADER_EPOCH),
    ],
)
def test_who_knows_another_epoch_is_told_so_either_way(pair, known, error):
    """The directory is one that other brokers have led before."""
    for each in pair.both:
        each.stage.registry.create_topic("three", 1)
        each.produce(topic="three")
        each.produce(topic="three")
        each.stage.logs.close()
        directory = each.stage.log("three", 0).directory
        with open(f"{directory}/leader-epoch-checkpoint", "w") as file:
            file.write("0\n2\n0 0\n5 1\n")
    pair.ask(2, topic="three", max_wait_ms=0)
    for _ in range(3):
        answer = pair.ask(2, topic="three", max_wait_ms=0, leader_epoch=known)
        (topic,) = FetchResponse.decode(11, answer[8:]).responses
        assert topic.partitions[0].error_code == error
    # Where it is the right one; the first that names any has it read.
    assert pair.short.short_ways == {-1: 3, 5: 2}.get(known, 0)


def test_where_batches_begin_is_noted_once_somebody_reads_here(pair):
    for each in pair.both:
        each.stage.registry.create_topic("three", 1)
        for _ in range(4):
            each.produce(topic="three")
    plan = pair.short.stage.channel.compiled.topics["three"][3][0]
    assert plan.positions is None
    pair.ask(4, topic="three", max_wait_ms=0)
    pair.produce(topic="three")
    assert 4 in plan.positions
    assert pair.ask(4, topic="three") is not None
    assert pair.short.short_ways == 1


@pytest.mark.parametrize("version", [4, 11, 13])
def test_a_fetch_that_waits_is_answered_with_what_comes(pair, version):
    assert pair.ask(2, version=version) is None
    assert pair.produce(batch(20))
    assert offsets_in(pair.answer(), version) == [2]
    assert pair.short.short_ways == 1
    assert state_of(pair.short.stage.memory, CLIENT) == SlotState.RESPONDING
    assert pair.short.stage.purgatory.size == 0


def test_it_waits_for_its_least_bytes_and_no_longer(pair):
    assert pair.ask(2, min_bytes=150) is None
    assert not pair.produce(batch(20))
    assert pair.produce(batch(20))
    assert offsets_in(pair.answer()) == [2, 3]


def test_at_its_deadline_it_is_answered_with_what_there_is(pair):
    assert pair.ask(2) is None
    assert offsets_in(pair.expire()) == []
    assert pair.ask(2, min_bytes=1000) is None
    assert not pair.produce()
    assert offsets_in(pair.expire()) == [2]


def test_a_redelivered_fetch_keeps_its_deadline(short):
    memory = short.stage.memory
    short.stage.publish(short.frame({0: 2}), CLIENT)
    memory.control.words[slot_row(CLIENT) + SLOT_DEADLINE] = time.monotonic_ns() - 1
    short.stage.handler.turn()
    assert memory.responses[0].pop() == [CLIENT]
    assert offsets_in(short.read()) == []


def test_who_does_not_want_to_wait_is_answered_at_once(pair):
    assert offsets_in(pair.ask(2, max_wait_ms=0)) == []
    assert offsets_in(pair.ask(2, min_bytes=0)) == []
    assert pair.short.short_ways == 2


def test_several_partitions_are_read_in_order_within_the_limits(pair):
    one = batch(50)
    for partition in (0, 1, 1):
        pair.produce(one, topic="two", partition=partition)
    pair.ask(2, 2, topic="two")
    pair.ask(2, 2, topic="two", max_bytes=len(one))
    pair.ask(2, 2, topic="two", max_bytes=1)
    pair.ask(2, (2, len(one) + 5), topic="two")
    pair.ask(2, (2, 5), topic="two")
    pair.ask((2, 5), (2, 5), topic="two")
    pair.ask(3, (2, 5), topic="two")
    assert pair.ask(3, 4, topic="two") is None
    assert pair.short.short_ways == 8


def test_records_that_do_not_fit_the_block_come_the_usual_way(pair):
    assert pair.ask(2) is None
    assert pair.produce(batch(2000))
    assert offsets_in(pair.answer()) == [2]
    assert pair.produce(batch(50_000)) is False
    assert offsets_in(pair.ask(3)) == [3]
    assert pair.short.short_ways == 1


def test_the_brokers_limit_is_the_lower_one(tmp_path):
    with pairs(tmp_path, fetch_max_bytes=200) as pair:
        for _ in range(3):
            pair.produce(batch(20))
        assert len(pair.ask(2)) < 400
        assert pair.short.short_ways == 1


@settings(max_examples=25)
@given(data=st.data())
def test_any_fetch_ends_the_same_either_way(tmp_path_factory, data):
    """What is changed is mostly a bit or two of a plain one."""
    wanted = st.integers(0, 4) | st.tuples(st.integers(1, 4), st.integers(0, 300))
    flips = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 7)), max_size=2)
    with pairs(tmp_path_factory.mktemp("data"), fetch_max_bytes=400) as pair:
        for _ in range(8):
            for _ in range(data.draw(st.integers(0, 2))):
                topic, partition = data.draw(
                    st.sampled_from([("one", 0), ("two", 0), ("two", 1)])
                )
                size = data.draw(st.sampled_from([0, 60, 400]))
                pair.produce(batch(size), topic=topic, partition=partition)
            changes = data.draw(st.just([]) | flips)

            def change(frame, changes=changes):
                # Not the request's header, nor an id of a topic: those differ.
                changed = bytearray(frame)
                for position, bit in changes:
                    changed[18 + position % (len(frame) - 18)] ^= 1 << bit
                return bytes(changed)

            answer = pair.ask(
                *data.draw(st.lists(wanted, min_size=1, max_size=2)),
                change=change,
                topic=data.draw(st.sampled_from(["one", "two", "two", "none"])),
                version=data.draw(st.integers(4, 12)),
                isolation_level=data.draw(st.integers(0, 1)),
                max_bytes=data.draw(st.sampled_from([1, 150, 1 << 20])),
                min_bytes=data.draw(st.sampled_from([0, 1, 1, 200])),
                max_wait_ms=data.draw(st.sampled_from([0, 60_000, 60_000])),
            )
            if answer is None and not pair.produce(batch(90)):
                pair.expire()
            elif answer is None:
                pair.answer()


# -- what keeps from it, and what comes in between ----------------------------------


def test_an_offset_in_the_middle_of_a_batch_goes_the_usual_way(pair):
    pair.produce(batch(10, 5))
    assert offsets_in(pair.ask(4)) == [2]
    assert pair.short.short_ways == 0


def test_what_one_reader_has_found_the_next_one_reads_the_short_way(pair):
    pair.produce(batch(50, 3))
    first = pair.ask(3)
    assert offsets_in(first) == [2]
    assert pair.short.short_ways == 0
    assert pair.ask(3) == first
    assert pair.short.short_ways == 1
    assert offsets_in(pair.ask(0)) == [0, 1, 2]  # asked for when it was warmed
    assert pair.short.short_ways == 2


def test_what_is_out_of_range_is_told_at_once(pair):
    for offset in (-1, 9):
        answer = FetchResponse.decode(11, pair.ask(offset)[8:])
        assert answer.responses[0].partitions[0].error_code == 1


@pytest.mark.parametrize("offset", [1, 2])
def test_less_than_nothing_is_nothing(pair, offset):
    """At the end of the log it was called damaged."""
    answer = pair.ask((offset, -1), max_wait_ms=0)
    (partition,) = FetchResponse.decode(11, answer[8:]).responses[0].partitions
    assert partition.error_code == 0


def test_readers_of_committed_data_stop_at_an_open_transaction(pair):
    for each in pair.both:
        log = each.stage.log("one")
        log.row.publish(log.view.state()._replace(first_unstable_offset=2))
    pair.produce(batch(20))
    assert pair.ask(2, isolation_level=1) is None
    assert offsets_in(pair.expire()) == []
    assert pair.short.short_ways == 0
    assert offsets_in(pair.ask(2)) == [2]
    assert pair.short.short_ways == 1


def test_what_is_stable_ends_no_sooner_than_the_log_begins(pair):
    """Records of an open transaction were deleted."""
    for each in pair.both:
        log = each.stage.log("one")
        log.row.publish(log.view.state()._replace(first_unstable_offset=0))
        assert log.delete_records(1) == 1
    answer = FetchResponse.decode(11, pair.ask(2, max_wait_ms=0)[8:])
    assert answer.responses[0].partitions[0].last_stable_offset == 1
    assert pair.short.short_ways == 1


def test_readers_of_committed_data_are_told_of_aborted_transactions(pair):
    pair.produce(batch(20))
    for each in pair.both:
        path = each.stage.log("one").view.segments.get(0).txn_index_path
        append_aborted(path, AbortedTransaction(7, 2, 2, 2), 3)
    answer = FetchResponse.decode(11, pair.ask(2, isolation_level=1)[8:])
    aborted = answer.responses[0].partitions[0].aborted_transactions
    assert [(each.producer_id, each.first_offset) for each in aborted] == [(7, 2)]
    assert pair.short.short_ways == 0


def test_it_is_answered_when_its_topic_is_deleted(pair):
    assert pair.ask(2, version=12) is None
    for each in pair.both:
        stage = each.stage
        rows = stage.registry.topic("one").partitions
        stage.registry.delete_topic("one")
        for row in rows:
            stage.memory.table.row(row).status = RowStatus.DELETED
            stage.purgatory.notify_waiters(stage.memory.table.row(row))
        stage.handler._see_to_parked()
        assert stage.memory.responses[0].pop() == [CLIENT]
    answer = FetchResponse.decode(12, pair.answer()[9:])
    assert answer.responses[0].partitions[0].error_code == 3


def test_it_is_answered_when_its_log_goes_offline(pair):
    assert pair.ask(2) is None
    for each in pair.both:
        row = each.stage.log("one").row
        row.status = RowStatus.OFFLINE
        each.stage.purgatory.notify_waiters(row)
        each.stage.handler._see_to_parked()
        assert each.stage.memory.responses[0].pop() == [CLIENT]
    answer = FetchResponse.decode(11, pair.answer()[8:])
    assert answer.responses[0].partitions[0].error_code == 56


def test_it_waits_on_when_metadata_changes_that_is_not_its_own(pair):
    assert pair.ask(2) is None
    for each in pair.both:
        each.stage.registry.create_topic("another", 1)
        each.stage.purgatory.notify_waiters(each.stage.log("one").row)
        each.stage.handler._see_to_parked()
        assert each.stage.memory.responses[0].pop() == []
        assert each.stage.purgatory.size == 1
    assert pair.produce(batch(20))
    assert offsets_in(pair.answer()) == [2]


def test_what_another_process_appends_is_read_wherever_it_rolled(short):
    """Its notice comes over the ring; of its segment this process knows nothing."""
    assert short.ask(short.frame({0: 2})) is None
    log = short.stage.log("one")

    def others_appends():
        with log.row.locked():
            log.roll_locked(time.time_ns() // 1_000_000)
        short.produce()

    assert fork(others_appends) == 0
    short.stage.handler._see_to_parked()
    short.stage.memory.responses[0].pop()
    assert offsets_in(short.read()) == [2]
    for offset in (3, 4):
        short.produce()
        assert offsets_in(short.ask(short.frame({0: offset}))) == [offset]
    assert short.short_ways == 3


def test_a_stop_of_the_broker_answers_it(pair):
    assert pair.ask(2) is None
    for each in pair.both:
        each.stage.purgatory.end_early()
        each.stage.channel.flush()
        assert each.stage.memory.responses[0].pop() == [CLIENT]
    assert offsets_in(pair.answer()) == []


# -- deaths -------------------------------------------------------------------------


@pytest.mark.parametrize("waits", ["", "in turn", "asleep"])
def test_a_handler_killed_at_any_step_leaves_a_fetch_that_can_be_done_again(
    short, waits
):
    stage = short.stage
    records = produce_request("one", 0, batch(30))
    offset = stage.log("one").row.log_end_offset

    def whole():
        if waits:
            stage.publish(short.frame({0: offset}), CLIENT)
            stage.handler.turn()
            stage.publish(records, PRODUCER)
        else:
            stage.publish(records, PRODUCER)
            stage.publish(short.frame({0: offset}), CLIENT)
        stage.handler._wait(16) if waits == "asleep" else stage.handler.turn()

    total = steps_of(whole)
    stage.memory.responses[0].pop()
    assert short.short_ways == 1
    for step in deaths(total, 25, seed=2):
        offset = stage.log("one").row.log_end_offset

        def doomed(step=step):
            kill_at_step(step)
            whole()
            die()

        assert fork(doomed) == -signal.SIGKILL
        stage.log("one").row.settle()
        memory, words = stage.memory, stage.memory.control.words
        memory.ring.reclaim(0)
        answered = memory.responses[0].waiting()
        again = [
            slot
            for slot in (CLIENT, PRODUCER)
            if state_of(memory, slot) in (SlotState.CLAIMED, SlotState.PARKED)
            and slot not in answered
            and slot not in memory.ring.waiting()
        ]
        for slot in again:
            words[slot_row(slot) + SLOT_STATE] = (
                words[slot_row(slot) + SLOT_STATE] & ~STATE_MASK | SlotState.CLAIMED
            )
        memory.ring.put_back(again)
        memory.notices[0].overflow()
        if stage.log("one").row.log_end_offset == offset and PRODUCER not in (
            *memory.ring.waiting(),
            *answered,
        ):
            stage.publish(records, PRODUCER)
        if CLIENT not in (*memory.ring.waiting(), *answered):
            stage.publish(short.frame({0: offset}), CLIENT)
        while memory.ring.waiting():
            stage.handler.turn()
        stage.handler._see_to_parked()
        memory.responses[0].pop()
        assert offsets_in(short.read()) == [offset]
        assert stage.purgatory.size == 0
