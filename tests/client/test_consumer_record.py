"""Fetched batches are decoded as their records are taken, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer.consumer_record import (
    ConsumerRecord,
    Deserializers,
    FetchedRecords,
    RecordDeserializationError,
    records_of,
)
from mpbroker.client.consumer.fetcher import FetchedBatch
from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    LOG_APPEND_TIME,
    RecordBatchError,
    parse_batch_header,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder


def batch_of(records, first_offset=0, append_time=None, partition=3):
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
    return FetchedBatch(TopicPartition("t", partition), first_offset, header, data)


def values_of(*values, partition=3, first_offset=0):
    records = [(None, value, ()) for value in values]
    return batch_of(records, first_offset, partition=partition)


def damaged(batch):
    data = bytearray(batch.data)
    data[BATCH_HEADER_SIZE] ^= 0x40  # the first record's length
    return batch._replace(data=memoryview(data))


def fetched(*batches, value_deserializer=None):
    queue = FetchedRecords(Deserializers(None, value_deserializer))
    queue.add(batches)
    return queue


def taken(queue, limit):
    return {
        where.partition: [record.value for record in records]
        for where, records in queue.take(limit).items()
    }


def test_a_record_has_its_place_and_the_fields_of_the_batch():
    found = records_of(batch_of([(b"a", b"b", ()), (None, b"c", [("n", None)])], 1))
    assert found == [
        ConsumerRecord("t", 3, 1, 1_007, None, b"c", [("n", None)], 0, None)
    ]
    assert type(found[0]) is ConsumerRecord


def test_the_brokers_time_is_every_records():
    batch = batch_of([(None, b"a", ()), (None, b"b", ())], append_time=77)
    found = records_of(batch)
    assert [(r.timestamp, r.timestamp_type) for r in found] == [(77, 1)] * 2


def test_a_damaged_batch_is_an_error():
    with pytest.raises(RecordBatchError):
        records_of(damaged(batch_of([(b"k", b"v", ())] * 3)))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(0, 6))),
    st.lists(st.integers(1, 7), min_size=1),
)
def test_all_records_are_taken_once_and_in_order_by_any_limits(batches, limits):
    queue = FetchedRecords(Deserializers())
    expected = {0: [], 1: [], 2: []}
    for number, (partition, count, first) in enumerate(batches):
        values = [b"%d/%d" % (number, index) for index in range(count)]
        expected[partition] += values[first:]
        queue.add([values_of(*values, partition=partition, first_offset=first)])
    found = {0: [], 1: [], 2: []}
    turn = 0
    while queue:
        limit = limits[turn % len(limits)]
        turn += 1
        if limit == 1 and turn % 2:
            one = queue.take_one()
            got = {} if one is None else {one[0].partition: [one[1].value]}
        else:
            got = taken(queue, limit)
        count = sum(map(len, got.values()))
        assert count == limit or (count < limit and not queue)
        for partition, values in got.items():
            found[partition] += values
    assert found == expected
    assert queue.take(1) == {}
    assert queue.take_one() is None


def test_records_of_partitions_that_are_not_kept_are_dropped():
    queue = fetched(
        values_of(b"a", b"b", partition=1),
        values_of(b"c", partition=2),
        values_of(b"d", partition=1),
    )
    assert taken(queue, 1) == {1: [b"a"]}
    queue.keep(TopicPartition("t", 1).__ne__)
    assert taken(queue, 9) == {2: [b"c"]}
    assert not queue


def test_records_before_a_damaged_batch_come_first_and_it_is_not_skipped():
    queue = fetched(values_of(b"a"), damaged(values_of(b"b")), values_of(b"c"))
    assert taken(queue, 9) == {3: [b"a"]}
    for take in (queue.take_one, lambda: queue.take(1)):
        with pytest.raises(RecordBatchError):
            take()
    assert queue


def test_records_before_a_refused_one_come_first_and_it_is_not_skipped():
    def refuse_b(topic, data):
        if data == b"b":
            raise ValueError("no b")
        return data.decode()

    queue = fetched(values_of(b"a", b"b"), value_deserializer=refuse_b)
    assert taken(queue, 9) == {3: ["a"]}
    for take in (queue.take_one, lambda: queue.take(1)):
        with pytest.raises(RecordDeserializationError) as caught:
            take()
        assert caught.value.offset == 1
