"""ListOffsets, of a log that says what a test wants."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from mpbroker.server.handlers.list_offsets import handle_list_offsets
from mpbroker.storage.files.leader_epochs import LeaderEpochs
from tests.server.contexts import context, fake_logs
from tests.support.metadata import start

LATEST, MAX_TIMESTAMP = -1, -3
UNCOMMITTED, COMMITTED = 0, 1


@pytest.mark.parametrize(
    ("timestamp", "isolation_level", "found"),
    [
        (LATEST, UNCOMMITTED, (5, -1)),
        (LATEST, COMMITTED, (2, -1)),
        (MAX_TIMESTAMP, UNCOMMITTED, (3, 1000)),
        (MAX_TIMESTAMP, COMMITTED, (-1, -1)),
        (1000, UNCOMMITTED, (3, 1000)),
        (1000, COMMITTED, (-1, -1)),
    ],
)
def test_a_committed_reader_is_told_no_offset_behind_the_last_stable_one(
    tmp_path, timestamp, isolation_level, found
):
    """Offset 3 has the largest timestamp, and a transaction is open from 2 on."""
    registry = start(tmp_path)
    registry.create_topic("t", 1)
    log = SimpleNamespace(
        latest=lambda: 5,
        last_stable_offset=lambda: 2,
        max_timestamp=lambda budget: (3, 1000),
        offset_for_timestamp=lambda timestamp, budget: (3, 1000),
        epochs=LeaderEpochs([]),
    )
    asked = ListOffsetsPartition(partition_index=0, timestamp=timestamp)
    request = ListOffsetsRequest(
        isolation_level=isolation_level,
        topics=[ListOffsetsTopic(name="t", partitions=[asked])],
    )
    logs = fake_logs(look=lambda topic, index: log)
    response = handle_list_offsets(request, context(registry, version=7, logs=logs))
    (answer,) = response.topics[0].partitions
    assert answer.error_code == 0
    assert (answer.offset, answer.timestamp) == found


@pytest.mark.parametrize(
    ("version", "later"),
    [
        (4, ErrorCode.LEADER_NOT_AVAILABLE),
        (7, ErrorCode.OFFSET_NOT_AVAILABLE),
    ],
)
def test_lookups_by_timestamp_share_a_budget(tmp_path, version, later):
    """Three hundred batches of 3 KB, of 100 MB each, took a handler 39 s."""
    registry = start(tmp_path)
    registry.create_topic("t", 4)

    def look_up(timestamp, budget):
        budget.check()
        budget.left -= 60_000_000
        return 3, 1000

    log = SimpleNamespace(
        latest=lambda: 5,
        offset_for_timestamp=look_up,
        epochs=LeaderEpochs([]),
    )
    rows = [
        ListOffsetsPartition(partition_index=index, timestamp=timestamp)
        for index, timestamp in enumerate([1000, 1000, 1000, LATEST])
    ]
    request = ListOffsetsRequest(topics=[ListOffsetsTopic(name="t", partitions=rows)])
    logs = fake_logs(look=lambda topic, index: log)
    response = handle_list_offsets(
        request, context(registry, version=version, logs=logs)
    )
    answers = response.topics[0].partitions
    assert [(each.error_code, each.offset) for each in answers] == [
        (0, 3),
        (0, 3),
        (later, -1),
        (0, 5),
    ]
