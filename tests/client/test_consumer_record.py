"""Records made of a batch: by columns in C, and by the twin in Python."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer.consumer_record import (
    ConsumerRecord,
    _records_in_python,
    records_of,
)
from mpbroker.client.consumer.fetcher import FetchedBatch
from mpbroker.protocol.records.batch_header import (
    LOG_APPEND_TIME,
    RecordBatchError,
    parse_batch_header,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from mpbroker.protocol.records.record_columns import IS_COMPILED

needs_core = pytest.mark.skipif(not IS_COMPILED, reason="_columns is not compiled")

BYTES = st.none() | st.binary(max_size=5)
HEADERS = st.lists(st.tuples(st.text(max_size=3), BYTES), max_size=3)
RECORDS = st.lists(st.tuples(BYTES, BYTES, HEADERS), min_size=1, max_size=20)


def batch_of(records, first_offset=0, append_time=None):
    builder = RecordBatchBuilder()
    for number, (key, value, headers) in enumerate(records):
        builder.append(1_000 + number * 7, key, value, headers)
    data = memoryview(bytes(builder.build()))
    header = parse_batch_header(data)
    if append_time is not None:
        header = header._replace(
            attributes=header.attributes | LOG_APPEND_TIME << 3,
            max_timestamp=append_time,
        )
    return FetchedBatch(TopicPartition("t", 3), first_offset, header, data)


@needs_core
@given(RECORDS, st.integers(0, 20))
def test_columns_and_the_twin_make_the_same_records(records, first_offset):
    batch = batch_of(records, first_offset)
    found = list(records_of(batch))
    assert found == list(_records_in_python(batch))
    assert len(found) == max(0, len(records) - first_offset)
    assert all(type(record) is ConsumerRecord for record in found)
    for record, (key, value, headers) in zip(
        found, records[first_offset:], strict=True
    ):
        assert (record.key, record.value) == (key, value)
        assert list(record.headers) == headers


@needs_core  # the twin reads the header in the batch itself
def test_the_brokers_time_is_every_records():
    batch = batch_of([(None, b"a", ()), (None, b"b", ())], append_time=77)
    found = list(records_of(batch))
    assert [(r.timestamp, r.timestamp_type) for r in found] == [(77, 1)] * 2


def test_a_damaged_batch_is_an_error():
    batch = batch_of([(b"k", b"v", ())] * 3)
    data = bytearray(batch.data)
    data[-9] ^= 0x40
    with pytest.raises(RecordBatchError):
        list(records_of(batch._replace(data=memoryview(data))))
