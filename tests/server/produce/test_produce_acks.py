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
