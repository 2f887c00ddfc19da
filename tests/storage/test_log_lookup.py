"""Offsets by their time, where a log begins within a batch."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpbroker.base.storage_errors import LookupLimitError
from mpbroker.protocol.records.record_batch import Codec, RecordBatchBuilder
from mpbroker.storage.log.log_lookup import LookupBudget
from tests.storage.batches import Validated, validated
from tests.storage.conftest import OpenLog

_names = itertools.count()


def stamped(timestamps: list[int]) -> Validated:
    """A batch of records of these times, in any order."""
    builder = RecordBatchBuilder()
    for timestamp in timestamps:
        builder.append(timestamp, None, b"r")
    return validated(builder.build())


def test_the_newest_record_may_be_in_a_batch_whose_first_ones_are_deleted(
    open_log: OpenLog,
) -> None:
    log = open_log()
    log.append(stamped([50, 90, 70, 60]), now_ms=1)
    assert log.lookup.max_timestamp() == (1, 90)
    log.delete_records(2)
    assert log.lookup.max_timestamp() == (2, 70)
    log.append(stamped([65]), now_ms=1)
    assert log.lookup.max_timestamp() == (2, 70)
    log.delete_records(3)
    assert log.lookup.max_timestamp() == (4, 65)
    log.delete_records(5)
    assert log.lookup.max_timestamp() is None


def test_a_budget_is_charged_for_what_records_inflate_to(open_log: OpenLog) -> None:
    log = open_log()
    for timestamp in (1, 2):
        builder = RecordBatchBuilder(Codec.GZIP)
        builder.append(timestamp, None, bytes(100_000))
        log.append(validated(builder.build()), now_ms=1)
    budget = LookupBudget(150_000)
    assert log.lookup.offset_for_timestamp(2, budget) == (1, 2)
    assert 49_000 < budget.left < 50_000
    assert log.lookup.max_timestamp(budget) == (1, 2)  # the last one may exceed it
    assert log.lookup.offset_for_timestamp(3, budget) is None  # by the index alone
    with pytest.raises(LookupLimitError):
        log.lookup.offset_for_timestamp(1, budget)
    assert log.lookup.offset_for_timestamp(1) == (0, 1)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    batches=st.lists(
        st.lists(st.integers(0, 30), min_size=1, max_size=5), min_size=1, max_size=12
    ),
    segment_bytes=st.integers(200, 1_500),
    data=st.data(),
)
def test_times_are_looked_up_among_the_records_that_are_left(
    open_log: OpenLog,
    batches: list[list[int]],
    segment_bytes: int,
    data: st.DataObject,
) -> None:
    name = f"looked-up-{next(_names)}"
    log = open_log(name=name, segment_bytes=segment_bytes, index_interval_bytes=100)
    for timestamps in batches:
        log.append(stamped(timestamps), now_ms=1)
    records = list(enumerate(itertools.chain.from_iterable(batches)))
    start = data.draw(st.integers(0, len(records)))
    log.delete_records(start)
    left = records[start:]
    newest = max((stamp for _, stamp in left), default=-1)
    assert log.lookup.max_timestamp() == next((r for r in left if r[1] == newest), None)
    for wanted in range(32):
        expected = next((r for r in left if r[1] >= wanted), None)
        assert log.lookup.offset_for_timestamp(wanted) == expected
    log.close()
