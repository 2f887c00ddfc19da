"""A Produce to several partitions, by the short cut in C and by the usual way."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import MASK_BITS, ROW_INTENT, SLOT_INTENT, slot_row
from mpbroker.ipc.layout import ResponseKind as Kind
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.server.core_cache.handler_stage import Stage
from tests.storage.batches import read_all
from tests.support.children import deaths, die, fork, kill_at_step, steps_of
from tests.support.memory import broker_memory

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core is not there"
)

NOW = time.time_ns() // 1_000_000
PRODUCE = int(ApiKey.PRODUCE)
STORAGE_ERROR = 56
PARTITIONS = {"one": 1, "two": 2, "wide": 60}
IDS = {name: name.encode().ljust(16, b"-") for name in (*PARTITIONS, "none")}
THREE = (("two", 1), ("one", 0), ("two", 0))


def batch(values=(b"x",), *, at=NOW, codec=Codec.NONE, **fields):
    builder = RecordBatchBuilder(codec, **fields)
    for number, value in enumerate(values):
        builder.append(at + number, None, value)
    return bytes(builder.build())


def by_producer(sequence):
    return batch(producer_id=7, producer_epoch=0, base_sequence=sequence)


def request(*partitions, acks=1, version=9):
    """A whole Produce of (topic, index, records), in this order, without its size.

    Neighbours of one topic are named together, so that a topic may be named twice.
    """
    topics = []
    for name, index, records in partitions:
        if not topics or topics[-1].name != name:
            # The codec writes the one or the other.
            topics.append(TopicProduceData(name=name, topic_id=IDS[name]))
        topics[-1].partition_data.append(
            PartitionProduceData(index=index, records=records)
        )
    message = ProduceRequest(acks=acks, timeout_ms=1000, topic_data=topics)
    header = encode_request_header(ApiKey.PRODUCE, version, 77, "test")
    return header + message.encode(version)


def to_three(records=None, **fields):
    return request(*((*each, records or batch()) for each in THREE), **fields)


def answers(answer, version=9):
    """(index, error code, base offset) of each partition."""
    response = ProduceResponse.decode(version, answer[9 if version >= 9 else 8 :])
    return [
        (partition.index, partition.error_code, partition.base_offset)
        for topic in response.responses
        for partition in topic.partition_responses
    ]


@contextlib.contextmanager
def stages(directory, *, syncs=False):
    """One with the short cut, one without; topics of the same ids."""
    with broker_memory() as first, broker_memory() as second:
        pair = (
            Stage(first, directory / "short", short=True, syncs=syncs),
            Stage(second, directory / "usual", short=False, syncs=syncs),
        )
        for stage in pair:
            for name, count in PARTITIONS.items():
                with patch(
                    "mpbroker.metadata.topics.random_uuid", lambda n=name: IDS[n]
                ):
                    stage.registry.create_topic(name, count)
            warm(stage)
        yield pair
        for stage in pair:
            stage.logs.close_files()


def warm(stage):
    """After two produces the third can take the short cut."""
    for _ in range(2):
        stage.ask(to_three())


@pytest.fixture
def pair(tmp_path):
    with stages(tmp_path) as made:
        yield made


@pytest.fixture
def syncing(tmp_path):
    """Their logs' first sync, which has directories to see to, is behind them."""
    with stages(tmp_path, syncs=True) as made:
        for stage in made:
            stage.publish(to_three(acks=-1))
            stage.handler.turn()
            stage.end_syncs()
            stage.answer(3)
            stage.short_ways.clear()
        yield made


@pytest.fixture
def short(pair):
    return pair[0]


def contents(stage):
    """Records and state of the three, without when a segment was made."""
    return [
        (read_all(log), log.row.snapshot()._replace(segment_created_ms=0))
        for log in (stage.log(*each) for each in THREE)
    ]


def known(stage):
    """What the process knows of its producers, as of the logs' ends."""
    return [
        (
            log.row.log_end_offset,
            {
                number: (entry.epoch, entry.batches)
                for number, entry in log.producers.at(log.view.state()).entries.items()
            },
        )
        for log in (stage.log(*each) for each in THREE)
    ]


def same(pair, *frames):
    """Ask both, and see that they cannot be told apart."""
    for frame in frames:
        assert pair[0].ask(frame) == pair[1].ask(frame)
        assert pair[0].progress() == pair[1].progress()
    assert contents(pair[0]) == contents(pair[1])


# -- what takes it ------------------------------------------------------------------


@pytest.mark.parametrize("version", range(3, 14))
def test_plain_batches_for_several_partitions_take_the_short_cut(pair, version):
    for acks in (-1, 0, 1):
        same(
            pair,
            to_three(acks=acks, version=version),
            to_three(batch([b"a", b"b", b""]), acks=acks, version=version),
            request(("two", 0, batch([bytes(900)])), acks=acks, version=version),
        )
    assert pair[0].short_ways == [PRODUCE] * 9


def test_batches_of_an_idempotent_producer_do_too(pair):
    same(pair, *(to_three(by_producer(sequence)) for sequence in range(8)))
    assert pair[0].short_ways == [PRODUCE] * 7  # the first makes it known
    assert known(pair[0]) == known(pair[1])


def test_a_partition_that_is_named_twice_goes_the_usual_way(pair):
    same(pair, to_three())
    assert pair[0].short_ways == [PRODUCE]
    twice = request(("one", 0, batch()), ("two", 0, batch()), ("one", 0, batch()))
    same(pair, twice)
    assert pair[0].short_ways == [PRODUCE]
    assert [offset for _, _, offset in answers(pair[0].answer_in(3)[1])] == [3, 3]


@pytest.mark.parametrize("count", [38, 41, 60])
def test_as_many_take_it_as_an_answer_has_room_for(pair, count):
    frame = request(*(("wide", index, batch()) for index in range(count)))
    same(pair, frame, frame, frame)
    assert pair[0].short_ways == [PRODUCE] * (count < 40)


# -- what does not ------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        ("two", 0, batch([b"a"], codec=Codec.GZIP)),
        ("two", 0, batch([b"a"])[:-1]),
        ("two", 0, batch([b"a"])[:17] + b"\0\0\0\0" + batch([b"a"])[21:]),
        ("two", 0, by_producer(0)),
        ("two", 0, by_producer(5)),
        ("two", 0, b""),
        ("two", 0, None),
        ("two", 2, batch()),
        ("two", -1, batch()),
        ("none", 0, batch()),
    ],
    ids=[
        "compressed",
        "cut",
        "bad-crc",
        "unknown-producer",
        "gap",
        "empty",
        "null",
        "partition-beyond",
        "partition-below",
        "no-topic",
    ],
)
def test_one_that_is_not_plain_takes_all_the_usual_way(pair, odd):
    others = [("one", 0, batch()), ("two", 1, batch())]
    for place in range(3):
        same(pair, request(*others[:place], odd, *others[place:], version=7))
        if odd[2] == by_producer(0):
            odd = (*odd[:2], by_producer(5))  # it was appended: now there is a gap
    assert pair[0].short_ways == []
    same(pair, to_three(version=7))
    assert pair[0].short_ways == [PRODUCE]


def test_a_partitions_batch_that_comes_again_is_answered_and_the_others_appended(pair):
    same(pair, to_three(by_producer(0)), to_three(by_producer(1)))
    again = request(
        ("one", 0, by_producer(1)),
        ("two", 0, by_producer(2)),
        ("two", 1, by_producer(9)),
    )
    same(pair, again, again)
    assert pair[0].short_ways == [PRODUCE]
    assert [code for _, code, _ in answers(pair[0].answer_in(3)[1])] == [0, 0, 45]
    assert known(pair[0]) == known(pair[1])


def test_any_count_or_length_ends_the_same_either_way(pair):
    """Of any four bytes, and cut anywhere: nothing is read that is not there."""
    frame = to_three(version=8)
    head = len(encode_request_header(ApiKey.PRODUCE, 8, 77, "test"))
    records = len(batch())
    places = [
        place
        for place in range(head, len(frame) - 3)
        if records not in frame[place : place + 4]  # counts are small, and so is a name
    ]
    for place in places[:: max(1, len(places) // 120)]:
        for value in (-1, 0, 1, 4, 1 << 20, (1 << 31) - 1):
            spoilt = frame[:place] + struct.pack(">i", value) + frame[place + 4 :]
            assert pair[0].ask(spoilt) == pair[1].ask(spoilt)
    assert contents(pair[0]) == contents(pair[1])


@pytest.mark.parametrize("version", [7, 9, 13])
def test_a_request_cut_anywhere_ends_the_same_either_way(pair, version):
    frame = to_three(version=version)
    head = len(encode_request_header(ApiKey.PRODUCE, version, 77, "test"))
    same(pair, *(frame[:end] for end in range(head, len(frame))))
    assert pair[0].short_ways == []
    same(pair, frame + b"\0", frame)


PARTITION = st.tuples(
    st.sampled_from(["one", "two", "two", "none"]),
    st.integers(-1, 2),
    st.builds(
        batch,
        st.lists(st.binary(max_size=20), min_size=1, max_size=30),
        at=st.integers(NOW - 10, NOW),
        codec=st.sampled_from([Codec.NONE] * 9 + [Codec.GZIP]),
    )
    | st.builds(by_producer, st.integers(0, 3)),
)
GOOD = st.sampled_from(THREE).flatmap(
    lambda each: st.tuples(
        st.just(each[0]), st.just(each[1]), st.builds(batch, st.just([b"v"]))
    )
)


@settings(max_examples=30)
@given(data=st.data())
def test_any_produce_to_several_ends_the_same_either_way(tmp_path_factory, data):
    """What is changed is mostly a bit or two of a plain one."""
    with stages(tmp_path_factory.mktemp("data")) as pair:
        for _ in range(6):
            parts = data.draw(
                st.lists(GOOD, max_size=5) | st.lists(PARTITION, max_size=5)
            )
            acks = data.draw(st.sampled_from([-1, 0, 1, 1, 1, 2]))
            version = data.draw(st.integers(3, 13))
            frame = bytearray(request(*parts, acks=acks, version=version))
            for _ in range(data.draw(st.sampled_from([0, 0, 1, 2]))):
                # Not the header of the request: another API is another test.
                position = data.draw(st.integers(8, len(frame) - 1))
                frame[position] ^= 1 << data.draw(st.integers(0, 7))
            assert pair[0].ask(bytes(frame)) == pair[1].ask(bytes(frame))
        assert contents(pair[0]) == contents(pair[1])
        assert known(pair[0]) == known(pair[1])


# -- what is found out when some are appended -----------------------------------------


def test_a_segment_that_must_be_rolled_hands_what_is_left_to_the_usual_way(pair):
    for stage in pair:
        for name in ("one", "two"):
            stage.registry.alter_topic_config(
                name, lambda _: {"segment.bytes": "20000"}
            )
    for number in range(60):
        # So the partitions' segments are full one after the other.
        same(
            pair,
            request(
                ("two", 1, batch([bytes(400 + number)])),
                ("one", 0, batch([bytes(600 + number)])),
                ("two", 0, batch([bytes(800 + number)])),
            ),
        )
    assert 45 < len(pair[0].short_ways) < 60
    for each in THREE:
        directory = Path(pair[0].log(*each).directory)
        assert len(list(directory.glob("*.log"))) > 1


def test_a_write_that_fails_fails_its_partition_and_no_other(short):
    log = short.log("one")
    before = log.row.snapshot()
    whole, read_only = (
        log.view.append_plan.segment._fd,
        os.open("/dev/null", os.O_RDONLY),
    )
    os.dup2(read_only, whole)
    os.close(read_only)
    _, answer = short.ask(to_three())
    assert answers(answer) == [(1, 0, 2), (0, STORAGE_ERROR, -1), (0, 0, 2)]
    assert log.row.snapshot() == before
    for each in THREE:
        row = short.log(*each).row
        assert row.words[row.base + ROW_INTENT] == 0
        assert fork(row.settle) == 0  # the lock is free
    assert [short.log(*each).row.log_end_offset for each in THREE] == [3, 2, 3]


def test_a_dead_owner_of_the_second_lock_is_settled_and_all_are_appended_once(short):
    row = short.log("one").row

    def die_after_the_intent():
        row.lock()
        row.set_intent(9, 0, row.log_end_offset)
        die()

    fork(die_after_the_intent)
    _, answer = short.ask(to_three())
    assert answers(answer) == [(1, 0, 2), (0, 0, 2), (0, 0, 2)]
    assert row.words[row.base + ROW_INTENT] == 0
    assert short.memory.control.words[slot_row(9) + SLOT_INTENT] == 0
    assert short.progress(9)[0] == 0
    assert short.short_ways == []
    short.ask(to_three())
    assert short.short_ways == [PRODUCE]


def test_fetches_that_wait_are_told_where_something_came(short):
    rows = [short.log(*each).row for each in THREE]
    for row in rows[1:]:
        row.add_waiter(5)
        row.add_waiter(MASK_BITS + 3)
    short.ask(to_three())
    assert short.short_ways == [PRODUCE]
    for handler in (5, MASK_BITS + 3):
        told = short.memory.notices[handler].take()
        assert told == ([row.index for row in rows[1:]], False)
    assert [row.take_waiters() for row in rows] == [0, 0, 0]


# -- acks=all -----------------------------------------------------------------------


def test_acks_all_waits_for_every_disk_write_and_not_for_less(syncing):
    for stage in syncing:
        stage.publish(to_three(acks=-1))
        stage.handler.turn()
        for _ in range(2):
            stage.disk.end(count=1)
            stage.handler._see_to_parked()
            assert stage.memory.responses[0].waiting() == []
        stage.end_syncs()
    assert syncing[0].answer(3) == syncing[1].answer(3)
    assert syncing[0].short_ways == [PRODUCE]
    for each in THREE:
        assert syncing[0].log(*each).row.durable_end_offset == 4


def test_on_a_quick_disk_it_is_answered_in_the_turn_that_took_it(syncing):
    for stage in syncing:
        stage.disk.is_quick = True
    assert syncing[0].ask(to_three(acks=-1)) == syncing[1].ask(to_three(acks=-1))
    assert syncing[0].short_ways == [PRODUCE]
    for stage in syncing:
        assert stage.disk.started == [] and stage.purgatory.size == 0


@pytest.mark.parametrize("version", [3, 5, 8, 9, 13])
def test_a_partition_that_fails_to_reach_the_disk_is_told_of_either_way(
    syncing, version
):
    ends = []
    for stage in syncing:
        stage.publish(to_three(acks=-1, version=version))
        stage.handler.turn()
        stage.disk.end(error=5, count=1)
        stage.end_syncs()
        ends.append(stage.answer(3))
    assert ends[0] == ends[1]
    assert syncing[0].short_ways == [PRODUCE]
    codes = [code for _, code, _ in answers(ends[0][1], version)]
    assert sorted(codes) == [0, 0, STORAGE_ERROR]


def test_all_that_a_slow_disk_holds_are_told_of_at_the_deadline(syncing):
    ends = []
    for stage in syncing:
        stage.publish(to_three(acks=-1))
        stage.handler.turn()
        stage.disk.end(count=1)
        stage.handler._see_to_parked()
        stage.purgatory.expire(1 << 62)
        stage.channel.flush()
        ends.append(stage.answer(3))
    assert ends[0] == ends[1]
    codes = [code for _, code, _ in answers(ends[0][1])]
    assert sorted(codes) == [0, STORAGE_ERROR, STORAGE_ERROR]


# -- deaths -------------------------------------------------------------------------


def die_at_each(stage, frames, wanted):
    """Kill the handler at steps of a request, and let another execute it again.

    Yields how many partitions the dead one had done, and the answer.
    """
    rows = [stage.log(*each).row for each in THREE]
    total = steps_of(lambda: stage.ask(next(frames)))
    for step in deaths(total, wanted, seed=1):
        starts = [row.log_end_offset for row in rows]
        stage.publish(next(frames))

        def doomed(step=step):
            kill_at_step(step)
            stage.handler.turn()
            die()

        assert fork(doomed) == -signal.SIGKILL
        # As the supervisor does: settle, then put back what was not answered.
        for row in rows:
            row.settle()
            assert row.words[row.base + ROW_INTENT] == 0
        done = [
            row.log_end_offset - start for row, start in zip(rows, starts, strict=True)
        ]
        assert sorted(done, reverse=True) == done  # in their order, each once
        assert stage.progress() == (sum(done), starts[: sum(done)])
        stage.memory.ring.reclaim(0)
        if not stage.memory.responses[0].waiting():
            if not stage.memory.ring.waiting():
                stage.memory.ring.put_back([3])
            stage.handler.turn()
        kind, answer = stage.answer(3)
        assert kind == Kind.BYTES
        expected = [
            (index, 0, start) for (_, index), start in zip(THREE, starts, strict=True)
        ]
        assert answers(answer) == expected
        assert [row.log_end_offset for row in rows] == [start + 1 for start in starts]
        assert stage.memory.control.words[slot_row(3) + SLOT_INTENT] == 0
        yield sum(done)


@pytest.mark.parametrize("size", [1, 2500])  # the second writes index entries
def test_a_handler_killed_at_any_step_has_appended_each_once(short, size):
    def frames():
        while True:
            yield to_three(batch([bytes(size)]))

    made = frames()
    for _ in range(4):  # the first index entries open their files, the usual way
        short.ask(next(made))
    assert set(die_at_each(short, made, 150)) == {0, 1, 2, 3}
    for each in THREE:
        offsets = [offset for offset, _ in read_all(short.log(*each))]
        assert offsets == list(range(short.log(*each).row.log_end_offset))


def test_a_producers_batches_are_appended_once_whoever_dies(short):
    def frames():
        sequence = 0
        while True:
            yield to_three(by_producer(sequence))
            sequence += 1

    made = frames()
    for _ in range(3):
        short.ask(next(made))
    assert set(die_at_each(short, made, 60)) == {0, 1, 2, 3}
    assert len(known(short)[0][1]) == 1
