"""The short cut in C and the usual way in Python: the same answers, the same log."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import (
    ROW_INTENT,
    ROW_WAITERS,
    SLOT_INTENT,
    RowStatus,
    SlotState,
    slot_row,
)
from mpbroker.ipc.layout import ResponseKind as Kind
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.server.core_cache.handler_stage import Stage, produce_request
from tests.storage.batches import read_all
from tests.support.children import deaths, die, fork, kill_at_step, steps_of
from tests.support.memory import broker_memory, state_of

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core is not there"
)

NOW = time.time_ns() // 1_000_000
PRODUCE, API_VERSIONS = int(ApiKey.PRODUCE), int(ApiKey.API_VERSIONS)


def batch(values=(b"x",), *, key=None, at=NOW, headers=(), codec=Codec.NONE, **fields):
    builder = RecordBatchBuilder(codec, **fields)
    for number, value in enumerate(values):
        builder.append(at + number, key, value, headers)
    return bytes(builder.build())


def warm(stage, topic="one", partition=0):
    """After two produces the third can take the short cut."""
    for _ in range(2):
        stage.ask(produce_request(topic, partition, batch()))


@contextlib.contextmanager
def stages(directory, *, syncs=False):
    """One with the short cut, one without; a topic each of one partition and of two."""
    with broker_memory() as first, broker_memory() as second:
        pair = (
            Stage(first, directory / "short", short=True, syncs=syncs),
            Stage(second, directory / "usual", short=False, syncs=syncs),
        )
        for stage in pair:
            stage.registry.create_topic("one", 1)
            stage.registry.create_topic("two", 2)
        yield pair
        for stage in pair:
            stage.logs.close_files()


@pytest.fixture
def pair(tmp_path):
    with stages(tmp_path) as made:
        yield made


@pytest.fixture
def syncing(tmp_path):
    with stages(tmp_path, syncs=True) as made:
        for stage in made:
            warm(stage)
        yield made


@pytest.fixture
def short(pair):
    return pair[0]


def contents(stage):
    return [
        (read_all(log), log.row.snapshot()._replace(segment_created_ms=0))
        for log in (stage.log("one"), stage.log("two", 0), stage.log("two", 1))
    ]


# -- what takes it ------------------------------------------------------------------


@pytest.mark.parametrize("version", range(3, 13))
@pytest.mark.parametrize("acks", [-1, 0, 1])
def test_plain_produces_take_the_short_cut(pair, version, acks):
    # The first makes the segment's first batch, and the second looks at how old it is.
    for records in (
        batch([b"first"]),
        batch([b"second"]),
        batch([b"a", b"b", b""], key=b"k"),
        batch([bytes(3000)], headers=[("h", b"v"), ("", None)]),
    ):
        frame = produce_request("one", 0, records, acks=acks, version=version)
        assert pair[0].ask(frame) == pair[1].ask(frame)
        assert pair[0].progress() == pair[1].progress()
    assert pair[0].short_ways == [PRODUCE, PRODUCE]
    assert contents(pair[0]) == contents(pair[1])


def test_an_api_versions_that_was_answered_before_takes_it(pair):
    frame = encode_request_header(ApiKey.API_VERSIONS, 3, 5, "me") + b"\x03me\x021\0"
    other = encode_request_header(ApiKey.API_VERSIONS, 3, 6, "me") + b"\x03me\x022\0"
    for asked in (frame, frame, other, frame[:4] + b"\xff\0\0\1" + frame[8:]):
        assert pair[0].ask(asked) == pair[1].ask(asked)
    assert pair[0].short_ways == [API_VERSIONS] * 2


def test_a_refused_api_versions_is_not_remembered(short):
    short.api_versions_answers = iter([b"\0\x2a refused", b"\0\0 served"])
    frame = encode_request_header(ApiKey.API_VERSIONS, 3, 5, "me") + b"\x03me\x021\0"
    assert short.ask(frame)[1].endswith(b"refused")
    assert short.ask(frame)[1].endswith(b"served")


@pytest.mark.parametrize(
    "records",
    [
        batch([b"a"], codec=Codec.GZIP),
        batch([b"a"], producer_id=7, producer_epoch=0, base_sequence=0),
        batch([b"a"], at=-1),
        batch([b"a"])[:-1],
        batch([b"a"]) + b"\0",
        batch([b"a"])[:17] + b"\0\0\0\0" + batch([b"a"])[21:],
        batch([b"a"], at=NOW + 7_200_000),
        b"",
    ],
    ids=[
        "compressed",
        "idempotent",
        "timeless",
        "cut",
        "longer",
        "bad-crc",
        "tomorrow",
        "empty",
    ],
)
def test_what_is_not_plain_goes_the_usual_way_and_ends_the_same(pair, records):
    for frame in (
        produce_request("one", 0, batch()),
        produce_request("one", 0, batch()),
        produce_request("one", 0, records, version=7),  # its answers hold no clock
        produce_request("one", 0, batch([b"after"])),
    ):
        assert pair[0].ask(frame) == pair[1].ask(frame)
    assert pair[0].short_ways == [PRODUCE]
    assert contents(pair[0]) == contents(pair[1])


@pytest.mark.parametrize(
    ("times", "takes_it"),
    [
        ((NOW - (1 << 36), NOW), True),  # a delta of more than 32 bits
        ((NOW, NOW - (1 << 36)), True),
        ((0, 1 << 62), False),
        ((1 << 62, 0), False),
        ((0, (1 << 63) - 1), False),
    ],
)
def test_records_of_years_apart_end_the_same(pair, times, takes_it):
    builder = RecordBatchBuilder()
    for at in times:
        builder.append(at, None, b"x")
    for records in (batch(), batch(), bytes(builder.build())):
        frame = produce_request("one", 0, records, version=7)
        assert pair[0].ask(frame) == pair[1].ask(frame)
    assert pair[0].short_ways == [PRODUCE] * takes_it
    assert contents(pair[0]) == contents(pair[1])


@given(data=st.data())
def test_any_produce_ends_the_same_either_way(tmp_path_factory, data):
    """What is changed is mostly a bit or two of a plain one."""
    records = st.builds(
        batch,
        st.lists(st.binary(max_size=20), min_size=1, max_size=70),
        key=st.none() | st.binary(max_size=3),
        at=st.integers(NOW - 10, NOW),
    )
    frames = st.builds(
        produce_request,
        st.sampled_from(["one", "two", "none", "öne"]),
        st.integers(-1, 2),
        records,
        acks=st.sampled_from([-1, 0, 1, 1, 1, 2]),
        version=st.integers(3, 12),
    )
    with stages(tmp_path_factory.mktemp("data")) as pair:
        for stage in pair:
            warm(stage)
            warm(stage, "two", 0)
            warm(stage, "two", 1)
        for _ in range(6):
            frame = bytearray(data.draw(frames))
            for _ in range(data.draw(st.sampled_from([0, 0, 1, 2]))):
                # Not the header of the request: another API is another test.
                position = data.draw(st.integers(8, len(frame) - 1))
                frame[position] ^= 1 << data.draw(st.integers(0, 7))
            assert pair[0].ask(bytes(frame)) == pair[1].ask(bytes(frame))
        assert contents(pair[0]) == contents(pair[1])


# -- acks=all -----------------------------------------------------------------------


def test_acks_all_is_answered_when_it_is_on_disk_and_not_before(syncing):
    frame = produce_request("one", 0, batch(), acks=-1)
    answers = []
    for stage in syncing:
        stage.publish(frame, 3)
        stage.publish(frame, 4)
        stage.handler.turn()
        assert stage.memory.responses[0].waiting() == []
        assert {state_of(stage.memory, slot) for slot in (3, 4)} == {SlotState.PARKED}
        stage.end_syncs()
        first, second = stage.memory.responses[0].pop()
        answers.append([stage.answer_in(slot) for slot in (first, second)])
        assert sorted((first, second)) == [3, 4]
        assert stage.log("one").row.durable_end_offset == 4
    assert answers[0] == answers[1]
    assert syncing[0].short_ways == [PRODUCE] * 2
    assert contents(syncing[0]) == contents(syncing[1])


def test_what_came_too_late_for_a_sync_waits_for_the_next(syncing):
    stage = syncing[0]
    frame = produce_request("one", 0, batch(), acks=-1)
    stage.publish(frame, 3)
    stage.handler.turn()
    stage.publish(frame, 4)
    stage.handler.turn()
    stage.end_syncs()
    assert stage.memory.responses[0].pop() == [3]
    stage.end_syncs()
    assert stage.memory.responses[0].pop() == [4]


@pytest.mark.parametrize("version", [5, 9])
def test_a_disk_that_fails_is_told_of_either_way(syncing, version):
    frame = produce_request("one", 0, batch(), acks=-1, version=version)
    answers = []
    for stage in syncing:
        stage.publish(frame)
        stage.handler.turn()
        stage.end_syncs(error=5)
        answers.append(stage.answer(3))
    assert answers[0] == answers[1]
    assert struct.pack(">h", 56) in answers[0][1]  # KAFKA_STORAGE_ERROR
    assert syncing[0].short_ways == [PRODUCE]


def test_a_disk_that_does_not_answer_is_told_of_at_the_deadline(syncing):
    stage = syncing[0]
    stage.publish(produce_request("one", 0, batch(), acks=-1))
    stage.handler.turn()
    stage.purgatory.expire(1 << 62)
    stage.channel.flush()
    assert struct.pack(">h", 56) in stage.answer(3)[1]


# -- what keeps from it -------------------------------------------------------------


def test_metadata_that_changed_is_replayed_before_the_next_request(short):
    frame = produce_request("one", 0, batch())
    for _ in range(4):
        short.ask(frame)
    assert len(short.short_ways) == 2
    short.registry.create_topic("another", 1)
    short.ask(frame)
    assert len(short.short_ways) == 2
    short.ask(frame)
    assert len(short.short_ways) == 3


def test_a_topics_changed_limit_holds_for_the_next_request(short):
    frame = produce_request("one", 0, batch([bytes(300)]))
    warm(short)
    short.ask(frame)
    assert short.short_ways == [PRODUCE]
    short.registry.alter_topic_config("one", lambda _: {"max.message.bytes": "200"})
    before = len(read_all(short.log("one")))
    for _ in range(3):
        short.ask(frame)
    assert len(read_all(short.log("one"))) == before


def test_a_partition_that_is_offline_takes_nothing(short):
    frame = produce_request("one", 0, batch())
    warm(short)
    short.log("one").row.status = RowStatus.OFFLINE
    before = short.log("one").row.snapshot()
    kind, answer = short.ask(frame)
    assert kind == Kind.BYTES
    assert struct.pack(">h", 56) in answer  # KAFKA_STORAGE_ERROR
    assert short.log("one").row.snapshot() == before
    assert short.short_ways == []


def test_files_that_were_closed_are_opened_again_the_usual_way(pair):
    frame = produce_request("one", 0, batch())
    for stage in pair:
        warm(stage)
        stage.logs.close_files()
        stage.ask(frame)
        stage.ask(frame)
    assert pair[0].short_ways == [PRODUCE]
    assert contents(pair[0]) == contents(pair[1])


def test_a_full_segment_is_rolled_and_indexed_as_ever(pair):
    for stage in pair:
        stage.registry.alter_topic_config("one", lambda _: {"segment.bytes": "20000"})
    for number in range(120):
        frame = produce_request("one", 0, batch([bytes(400 + number)]))
        assert pair[0].ask(frame) == pair[1].ask(frame)
    assert len(pair[0].short_ways) > 100
    assert contents(pair[0]) == contents(pair[1])
    first, second = (
        {path.name: path.read_bytes() for path in Path(directory).iterdir()}
        for directory in (stage.log("one").directory for stage in pair)
    )
    for content in (first, second):
        del content["partition.metadata"]  # the topic's id
    assert first == second
    assert sum(name.endswith(".log") for name in first) > 2


def test_the_first_entries_of_an_index_need_nothing_of_the_usual_way(pair):
    frame = produce_request("one", 0, batch([bytes(3000)]))
    for stage in pair:
        warm(stage)
        for _ in range(6):
            stage.ask(frame)
    assert pair[0].short_ways == [PRODUCE] * 6
    assert pair[0].log("one").row.snapshot().index_entries > 1
    assert contents(pair[0]) == contents(pair[1])


def test_another_process_that_appended_or_rolled_is_seen(short):
    frame = produce_request("one", 0, batch())
    warm(short)

    def others_appends():
        for _ in range(3):
            short.ask(frame)
        log = short.log("one")
        with log.row.locked():
            log.roll_locked(NOW)
        short.ask(frame)

    assert fork(others_appends) == 0
    for _ in range(3):
        short.ask(frame)
    offsets = [offset for offset, _ in read_all(short.log("one"))]
    assert offsets == list(range(9))


def test_a_waiting_fetch_is_told_of_a_plain_produce(short):
    frame = produce_request("one", 0, batch())
    warm(short)
    row = short.log("one").row
    row.words[row.base + ROW_WAITERS] = 1 << 5
    short.ask(frame)
    assert short.short_ways == [PRODUCE]
    assert short.memory.notices[5].take() == ([row.index], False)
    assert row.words[row.base + ROW_WAITERS] == 0


def test_a_write_that_fails_is_answered_as_one_and_leaves_nothing(short):
    frame = produce_request("one", 0, batch())
    warm(short)
    log = short.log("one")
    before = log.row.snapshot()
    whole, read_only = (
        log.view.append_plan.segment._fd,
        os.open("/dev/null", os.O_RDONLY),
    )
    os.dup2(read_only, whole)
    os.close(read_only)
    _, answer = short.ask(frame)
    assert struct.pack(">h", 56) in answer
    assert log.row.snapshot() == before
    assert log.row.words[log.row.base + ROW_INTENT] == 0
    assert fork(log.row.settle) == 0  # the lock is free


# -- deaths -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5000])  # the second writes index entries
@pytest.mark.parametrize("asleep", [False, True])
def test_a_handler_killed_at_any_step_has_appended_once_when_it_is_done_again(
    short, size, asleep
):
    def work():
        if asleep:  # what wakes it is executed before it is back in Python
            short.handler._wait(16)
        else:
            short.handler.turn()

    def ask():
        short.publish(frame)
        work()
        return short.answer(3)

    frame = produce_request("one", 0, batch([bytes(size)]))
    warm(short)
    for _ in range(2):
        short.ask(frame)
    row = short.log("one").row
    total = steps_of(ask)
    assert total > 30
    outcomes = set()
    for step in deaths(total, 200, seed=1):
        start = row.log_end_offset
        short.publish(frame)

        def doomed(step=step):
            kill_at_step(step)
            work()
            die()

        assert fork(doomed) == -signal.SIGKILL
        # As the supervisor does: settle, then put back what was not answered.
        row.settle()
        committed = row.log_end_offset - start
        assert committed in (0, 1)
        assert row.snapshot().bytes_in == row.snapshot().active_size
        assert row.words[row.base + ROW_INTENT] == 0
        assert short.progress() == (committed, [start][:committed])
        outcomes.add(committed)
        short.memory.ring.reclaim(0)
        if not short.memory.responses[0].waiting():
            if not short.memory.ring.waiting():
                short.memory.ring.put_back([3])
            short.handler.turn()
        kind, answer = short.answer(3)
        assert kind == Kind.BYTES
        assert struct.pack(">hq", 0, start) in answer
        assert row.log_end_offset == start + 1
        assert short.memory.control.words[slot_row(3) + SLOT_INTENT] == 0
    assert outcomes == {0, 1}
    offsets = [offset for offset, _ in read_all(short.log("one"))]
    assert offsets == list(range(row.log_end_offset))


def test_a_dead_owner_of_the_lock_is_settled_before_anything_is_appended(short):
    frame = produce_request("one", 0, batch())
    warm(short)
    row = short.log("one").row

    def die_after_the_write():
        row.lock()
        row.set_intent(9, 0, row.log_end_offset)
        die()

    fork(die_after_the_write)
    short.ask(frame)
    assert row.words[row.base + ROW_INTENT] == 0
    assert short.memory.control.words[slot_row(9) + SLOT_INTENT] == 0
    assert short.progress(9)[0] == 0
    assert row.log_end_offset == 3
    short.ask(frame)
    assert short.short_ways == [PRODUCE]
