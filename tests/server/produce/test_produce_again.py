"""A produce that is executed again is answered and not appended again."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from mpbroker.ipc.arena import BLOCK_BYTES, PROGRESS_WORDS
from mpbroker.ipc.layout import (
    SLOT_BLOCK,
    SLOT_PROGRESS,
    SLOT_PROGRESS_OFFSET,
    slot_row,
)
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.metadata.log_config import LogConfig
from mpbroker.network.request_channel import HandlerEnd, ProcessorEnd
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from mpbroker.protocol.records.log_validator import HeavyRequestError
from mpbroker.protocol.records.record_batch import (
    Codec,
    RecordBatchBuilder,
    iter_records,
)
from mpbroker.server.core_cache import NoCoreCache
from mpbroker.server.produce.produce_handler import ProduceHandler
from mpbroker.server.produce.produce_service import SlotProgress
from mpbroker.storage.log.partition_log import AppendResult

SLOT = 3
NOW = 1_700_000_000_000


def batch(value=b"x", codec=Codec.NONE):
    builder = RecordBatchBuilder(codec)
    builder.append(NOW, None, value)
    return bytes(builder.build())


class Log:
    """Appends to a row, as PartitionLog does, and keeps what it was given."""

    def __init__(self, memory, index):
        self.row = memory.table.row(index)
        self.appended = []
        self.refuses = None

    def append(self, batch, *, slot=-1, ordinal=0, now_ms, is_open=None):
        if self.refuses:
            raise self.refuses
        with self.row.locked():
            base = self.row.log_end_offset
            self.row.set_intent(slot, ordinal, base)
            self.row.publish(LogState(log_end_offset=base + 1))
            self.row.clear_intent()
        self.appended.append(bytes(batch.data))
        return AppendResult(base, -1, 0, False, base)


class Stage:
    """One request in a slot, executed as often as the test likes."""

    def __init__(self, memory, partitions=4):
        self.memory = memory
        for index in range(8, partitions):  # the fixture has made eight
            memory.table.initialise_row(index)
        self.logs = [Log(memory, index) for index in range(partitions)]
        self.topic = SimpleNamespace(
            name="t",
            partitions=list(range(partitions)),
            config=LogConfig({}),
            is_internal=False,
        )
        topics = SimpleNamespace(
            topic=lambda name: self.topic if name == "t" else None,
            topic_by_id=lambda topic_id: None,
        )
        self.told = []
        self.handler = ProduceHandler(
            topics,
            lambda topic, index: self.logs[index],
            self.told.append,
            NoCoreCache().learn_produce,
        )
        self.channel = HandlerEnd(
            0,
            memory.control,
            memory.arena,
            memory.arena_layout,
            memory.ring,
            memory.responses,
        )
        self.progress = SlotProgress(self.channel, SLOT)

    def receive(self, length=1000, extent=0):
        """A request of a length, in its slot's block or in an extent."""
        words, block = self.memory.control.words, self.memory.arena_layout.block(SLOT)
        words[slot_row(SLOT) + SLOT_BLOCK] = block
        end = ProcessorEnd(
            self.memory.control, self.memory.ring, self.memory.responses[0]
        )
        at = extent or block
        progress = (extent + length + 7) & ~7 if extent else block + 13 * 1024
        end.send_request(SLOT, at + 4, length - 4, progress, 1)

    def execute(self, partitions, acks=1, *, has_turn=True):
        request = ProduceRequest(
            acks=acks,
            topic_data=[TopicProduceData(name="t", partition_data=partitions)],
        )
        outcome = self.handler.handle(request, 9, self.progress, NOW, has_turn=has_turn)
        return [
            (answer.index, answer.error_code, answer.base_offset)
            for answer in outcome.response.responses[0].partition_responses
        ]


@pytest.fixture
def stage(memory):
    made = Stage(memory)
    made.receive()
    return made


def data(index, records=None):
    return PartitionProduceData(index=index, records=records)


def test_a_second_execution_gives_the_same_answer_and_appends_nothing(stage):
    request = [data(index, batch()) for index in range(4)]
    first = stage.execute(request)
    assert first == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)]
    assert stage.execute(request) == first
    assert [len(log.appended) for log in stage.logs] == [1, 1, 1, 1]


def test_the_last_batch_counts_of_a_partition_that_is_named_again(stage):
    """As in Kafka. A thousand batches of one partition kept a handler busy."""
    request = [
        data(1, batch(b"a")),
        data(2, batch(b"b")),
        data(1, batch(b"c")),
        data(1, batch(b"d")),
        data(3, batch(b"e")),
    ]
    answers = [(2, 0, 0), (1, 0, 0), (3, 0, 0)]
    assert stage.execute(request) == stage.execute(request) == answers
    values = [
        [record.value for each in log.appended for record in iter_records(each)]
        for log in stage.logs
    ]
    assert values == [[], [b"d"], [b"b"], [b"e"]]


def test_a_batch_that_inflates_to_much_waits_for_its_turn_and_is_appended_once(stage):
    request = [
        data(0, batch()),
        data(9, batch()),
        data(1, batch(bytes(5_000_000), Codec.GZIP)),
        data(2, batch()),
    ]
    with pytest.raises(HeavyRequestError):
        stage.execute(request, has_turn=False)
    assert [len(log.appended) for log in stage.logs] == [1, 0, 0, 0]
    unknown = (9, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1)
    answers = [(0, 0, 0), unknown, (1, 0, 0), (2, 0, 0)]
    assert stage.execute(request) == stage.execute(request) == answers
    assert [len(log.appended) for log in stage.logs] == [1, 1, 1, 0]


def test_a_usual_batch_waits_for_no_turn(stage):
    request = [data(1, batch(bytes(4_000_000), Codec.GZIP))]
    assert stage.execute(request, has_turn=False) == [(1, 0, 0)]


@pytest.mark.parametrize("done", [0, 1, 2, 3, 4])
def test_an_execution_goes_on_where_the_dead_one_stopped(stage, done):
    request = [data(index, batch()) for index in range(4)]

    class DiedError(BaseException):
        pass

    if done < 4:
        stage.logs[done].refuses = DiedError()
        with pytest.raises(DiedError):
            stage.execute(request)
        stage.logs[done].refuses = None
    else:
        stage.execute(request)
    assert stage.execute(request) == [(index, 0, 0) for index in range(4)]
    assert [len(log.appended) for log in stage.logs] == [1, 1, 1, 1]


def test_what_was_refused_before_is_refused_again_although_it_could_succeed_now(stage):
    """What follows it was appended: the answer must not depend on who died when."""
    request = [data(0, batch()), data(1, batch())]
    stage.logs[0].refuses = ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "disk")
    first = stage.execute(request)
    assert first == [(0, 56, -1), (1, 0, 0)]
    stage.logs[0].refuses = None
    assert stage.execute(request) == first
    assert stage.logs[0].appended == []


def test_waiting_fetches_are_told_again_of_what_a_dead_handler_appended(stage):
    request = [data(2, batch())]
    stage.execute(request)
    stage.told.clear()
    stage.execute(request)
    assert stage.told == [stage.logs[2]]


def test_the_next_request_in_the_same_slot_starts_afresh(stage):
    request = [data(0, batch())]
    assert stage.execute(request) == [(0, 0, 0)]
    stage.receive()
    assert stage.execute(request) == [(0, 0, 1)]


def test_with_acks_all_a_second_execution_waits_for_the_disk_too(stage):
    request = ProduceRequest(
        acks=-1,
        topic_data=[TopicProduceData(name="t", partition_data=[data(0, batch())])],
    )
    for _ in range(2):
        outcome = stage.handler.handle(request, 9, stage.progress, NOW)
        assert outcome.needed == {0: (stage.logs[0], 1)}


# -- more partitions than can be noted ----------------------------------------------


def neighbours(stage):
    """All of the slot's block behind its progress words, and the next slot's."""
    block = stage.memory.arena_layout.block(SLOT)
    at = block + 13 * 1024 + 8 * PROGRESS_WORDS
    return stage.memory.arena.view[at : block + 2 * BLOCK_BYTES]


def test_a_request_that_names_thousands_of_partitions_writes_on_no_other(memory):
    """Without records a partition takes six bytes: two thousand fit a block."""
    stage = Stage(memory, partitions=2101)
    stage.receive()
    area = neighbours(stage)
    area[:] = b"n" * len(area)
    request = [*map(data, range(2100)), data(2100, batch())]
    answers = stage.execute(request)
    assert bytes(area) == b"n" * len(area)
    assert {code for _, code, _ in answers[:PROGRESS_WORDS]} == {
        ErrorCode.INVALID_RECORD
    }
    assert {code for _, code, _ in answers[PROGRESS_WORDS:]} == {
        ErrorCode.INVALID_REQUEST
    }
    assert stage.logs[2100].appended == []  # it could not be noted as done
    assert stage.execute(request) == answers


def test_all_partitions_that_have_records_can_be_noted(memory):
    smallest = batch(b"")
    fit = 13 * 1024 // (len(smallest) + 6)
    stage = Stage(memory, partitions=fit)
    stage.receive()
    answers = stage.execute([data(n, smallest) for n in range(fit)])
    assert {code for _, code, _ in answers} == {0}
    assert stage.memory.control.words[slot_row(SLOT) + SLOT_PROGRESS] == fit
    again = stage.execute([data(n, smallest) for n in range(fit)])
    assert again == answers


def test_a_large_request_has_as_many_progress_words_as_its_extent_has_room_for(stage):
    extents = stage.memory.arena_layout.request_extents(0)
    from mpbroker.ipc.arena import extent_bytes

    length = 100_000
    extent = extents.allocate(extent_bytes(length))
    stage.receive(length, extent)
    capacity = stage.channel.progress_capacity(SLOT)
    where = stage.memory.control.words[slot_row(SLOT) + SLOT_PROGRESS_OFFSET]
    assert where + 8 * capacity <= extent + extent_bytes(length)
    assert capacity >= length // 67


@pytest.mark.parametrize("count", [1, 5])
def test_two_handlers_of_one_log_never_give_one_offset_twice(memory, count):
    stages = [Stage(memory), Stage(memory)]
    offsets = []
    for stage in itertools.chain(*[stages] * count):
        stage.receive()
        offsets += [base for _, _, base in stage.execute([data(0, batch())])]
    assert offsets == list(range(2 * count))
