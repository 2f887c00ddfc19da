"""Which acks there are, and what becomes of errors that nobody waits to be told of."""

from __future__ import annotations

import pytest

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import ResponseKind
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.produce import ProduceResponse
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.server.core_cache.handler_stage import Stage, produce_request
from tests.support.memory import broker_memory


@pytest.fixture(
    params=[
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not IS_COMPILED, reason="the compiled core is not there"
            ),
        ),
    ],
    ids=["usual", "short"],
)
def stage(request, tmp_path):
    with broker_memory() as memory:
        made = Stage(memory, tmp_path / "data", short=request.param)
        made.registry.create_topic("t", 1)
        ask(made)  # from here on the short way is known
        yield made
        made.logs.close_files()


def batch() -> bytes:
    builder = RecordBatchBuilder()
    builder.append(1_700_000_000_000, None, b"x", ())
    return bytes(builder.build())


def ask(stage, topic="t", records=None, **fields):
    """The error, None: nothing was answered, or "closed"."""
    records = batch() if records is None else records
    kind, answer = stage.ask(produce_request(topic, 0, records, **fields))
    if kind is ResponseKind.CLOSE:
        return "closed"
    if kind is ResponseKind.NONE:
        return None
    response = ProduceResponse.decode(9, memoryview(answer), 9)
    return response.responses[0].partition_responses[0].error_code


@pytest.mark.parametrize("acks", [2, 3, -2, 127, 256, -32768, 32767])
def test_other_acks_than_none_one_and_all_are_refused_and_append_nothing(stage, acks):
    end = stage.log("t").row.log_end_offset
    assert ask(stage, acks=acks) == ErrorCode.INVALID_REQUIRED_ACKS
    assert ask(stage, "missing", acks=acks) == ErrorCode.INVALID_REQUIRED_ACKS
    assert stage.log("t").row.log_end_offset == end


def test_without_acks_an_error_closes_the_connection_and_success_says_nothing(stage):
    """So the producer, which waits for no answer, learns of it all the same."""
    end = stage.log("t").row.log_end_offset
    assert ask(stage, acks=0) is None
    assert stage.log("t").row.log_end_offset == end + 1
    assert ask(stage, "missing", acks=0) == "closed"
    damaged = bytearray(batch())
    damaged[-1] ^= 1  # its CRC is another's
    assert ask(stage, records=bytes(damaged), acks=0) == "closed"
    assert stage.log("t").row.log_end_offset == end + 1
    assert ask(stage, records=bytes(damaged)) == ErrorCode.CORRUPT_MESSAGE


# -- acks=all without the disk ---------------------------------------------------------


@pytest.fixture
def syncing(tmp_path):
    """With a disk that never ends a sync, and two topics: one waits for it."""
    with broker_memory() as memory:
        made = Stage(memory, tmp_path / "data", short=IS_COMPILED, syncs=True)
        made.registry.create_topic("disk", 1)
        made.registry.create_topic("cache", 1, {"flush.acks.all": "false"})
        yield made
        made.logs.close_files()


def is_parked(stage, topic) -> bool:
    """Whether a produce with acks=all waits for the disk."""
    stage.publish(produce_request(topic, 0, batch(), acks=-1))
    stage.handler.turn()
    answered = stage.memory.responses[0].pop()
    return not answered


def test_a_topic_may_answer_acks_all_from_the_page_cache(syncing):
    for end in range(1, 5):  # the core learns by the first one
        assert ask(syncing, "cache", acks=-1) == ErrorCode.NONE
        row = syncing.log("cache").row
        assert (row.log_end_offset, row.durable_end_offset) == (end, 0)
    assert is_parked(syncing, "disk")


def test_acks_all_waits_again_when_the_topic_wants_it(syncing):
    assert ask(syncing, "cache", acks=-1) == ErrorCode.NONE
    syncing.registry.alter_topic_config("cache", lambda before: {})
    assert is_parked(syncing, "cache")


def test_what_the_core_has_learnt_is_forgotten_when_the_topic_does_not_wait(syncing):
    assert ask(syncing, "disk") == ErrorCode.NONE
    syncing.registry.alter_topic_config("disk", lambda _: {"flush.acks.all": "false"})
    assert ask(syncing, "disk", acks=-1) == ErrorCode.NONE
