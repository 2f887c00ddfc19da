"""What was found for a fetch stays what it is, whatever is closed before it is read."""

from __future__ import annotations

import os

import pytest

from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from mpbroker.server.fetch.fetch_service import read_small
from tests.server.core_cache.handler_stage import Stage, produce_request


def batch(value):
    builder = RecordBatchBuilder()
    builder.append(1_700_000_000_000, None, value)
    return bytes(builder.build())


@pytest.mark.parametrize("reopened", [True, False])
def test_a_file_closed_behind_a_read_is_read_by_nobody_elses_number(
    memory, tmp_path, reopened
):
    """As when there is no descriptor left for the next partition of the request."""
    stage = Stage(memory, tmp_path / "data", short=False)
    for name in ("a", "b"):
        stage.registry.create_topic(name, 1)
        stage.ask(produce_request(name, 0, batch(name.encode() * 10)))
    first, second = stage.log("a"), stage.log("b")
    second.close()
    found = first.reader.read(0, 1 << 20, min_one_batch=True)
    assert b"a" * 10 in read_small(found)
    stage.logs.close_files()
    if reopened:
        # The lowest number that is free: other files may have had lower ones.
        taken = []
        while not taken or taken[-1] < found.fd:
            taken.append(os.open(stage.log("b").view.segments.get(0).path, os.O_RDONLY))
        assert taken[-1] == found.fd
    try:
        assert read_small(found) is None  # the file is sent by its name
    finally:
        if reopened:
            for fd in taken:
                os.close(fd)
