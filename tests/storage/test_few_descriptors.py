"""Whatever a log is asked, a process without a descriptor makes room and answers."""

from collections.abc import Callable
from typing import Any

import pytest

from mpbroker.storage.log.partition_log import PartitionLog
from tests.network.descriptors import descriptors_left
from tests.storage.batches import batch
from tests.storage.conftest import OpenLog

_RECORDS = 6

Asked = Callable[[PartitionLog], Any]


def _append(log: PartitionLog) -> int:
    sent = batch(b"x", producer=(7, 0, _RECORDS))
    return log.append(sent, now_ms=1).base_offset


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (
            lambda log: log.reader.read(0, 10, min_one_batch=True).high_watermark,
            _RECORDS,
        ),
        (lambda log: log.lookup.latest(), _RECORDS),
        (lambda log: log.lookup.max_timestamp(), (5, 1_005)),
        (lambda log: log.lookup.offset_for_timestamp(1_003), (3, 1_003)),
        (lambda log: log.lookup.end_offset_for_epoch(0), (0, _RECORDS)),
        (lambda log: log.delete_records(2), 2),
        (_append, _RECORDS),
    ],
)
def test_the_files_of_others_are_closed_for_whatever_is_asked(
    open_log: OpenLog, ask: Asked, answer: object, *, is_loaded: bool
) -> None:
    first = open_log(name="asked", segment_bytes=200)
    for number in range(_RECORDS):
        sent = batch(b"r", timestamp=1_000 + number, producer=(7, 0, number))
        first.append(sent, now_ms=1)
    first.close()
    row = first.row.index if is_loaded else None
    log = open_log(row=row, name="asked", segment_bytes=200)
    others = [open_log(name=f"other-{number}") for number in range(40)]
    for other in others:
        other.append(batch(b"o"), now_ms=1)

    def close_files() -> None:
        for each in [*others, log]:
            each.close()

    log.view.release_descriptors = close_files
    with descriptors_left(0):
        assert ask(log) == answer
