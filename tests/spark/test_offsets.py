"""Ranges are cut without a gap or an overlap, and limited without starving anyone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.client.cluster import TopicPartition
from mpbroker.spark.offsets import (
    OffsetRange,
    from_json,
    limit_offsets,
    made_again,
    split_ranges,
    to_json,
    topic_ids_from_json,
)

PARTITIONS = st.builds(
    TopicPartition, st.sampled_from(["a", "b.c"]), st.integers(0, 40)
)
RANGES = st.dictionaries(
    PARTITIONS, st.tuples(st.integers(0, 1 << 50), st.integers(0, 5_000)), max_size=8
).map(
    lambda found: [
        OffsetRange(partition, start, start + size)
        for partition, (start, size) in found.items()
    ]
)
LIMITS = st.none() | st.integers(1, 300)


@given(RANGES, LIMITS, LIMITS)
def test_the_parts_are_the_whole(ranges, min_partitions, max_records):
    parts = split_ranges(ranges, min_partitions, max_records)
    assert all(part.size > 0 for part in parts)
    if max_records is not None:
        assert all(part.size <= max_records for part in parts)
    for whole in ranges:
        mine = sorted(part for part in parts if part.partition == whole.partition)
        bounds = [whole.start] + [part.end for part in mine]
        assert [part.start for part in mine] == bounds[:-1]
        assert bounds[-1] == (whole.end if whole.size else whole.start)


def test_a_large_partition_is_cut_in_more_parts_than_a_small_one():
    large, small = TopicPartition("t", 0), TopicPartition("t", 1)
    parts = split_ranges(
        [OffsetRange(large, 0, 900), OffsetRange(small, 0, 100)], 10, None
    )
    assert [part.partition for part in parts].count(large) == 9
    assert len(parts) == 10


@pytest.mark.parametrize("asked", [8, 10, 20])
def test_small_partitions_do_not_raise_the_number_of_parts(asked):
    sizes = [1, 1, 1, 1, 100]
    ranges = [
        OffsetRange(TopicPartition("t", number), 0, size)
        for number, size in enumerate(sizes)
    ]
    parts = split_ranges(ranges, asked, None)
    assert len(parts) == asked
    assert parts[:4] == ranges[:4]


@given(
    st.dictionaries(
        PARTITIONS, st.tuples(st.integers(0, 1 << 50), st.integers(-9, 9_000))
    ),
    st.integers(1, 10_000),
)
def test_a_limit_takes_a_share_of_everyone_and_goes_on_to_the_end(found, max_rows):
    start = {partition: begin for partition, (begin, _) in found.items()}
    end = {partition: begin + size for partition, (begin, size) in found.items()}
    limited = limit_offsets(start, end, max_rows)
    assert limited.keys() == end.keys()
    new = 0
    for partition, offset in limited.items():
        assert offset <= end[partition]
        if end[partition] > start[partition]:
            assert offset > start[partition]
            new += offset - start[partition]
    assert new <= max_rows + len(found)


@given(
    st.dictionaries(PARTITIONS, st.integers(0, 1 << 62)),
    st.dictionaries(st.sampled_from(["a", "b.c"]), st.uuids().map(lambda id_: id_.hex)),
)
def test_a_checkpoint_brings_back_the_offsets(offsets, topic_ids):
    assert from_json(to_json(offsets)) == offsets
    document = to_json(offsets, topic_ids)
    assert from_json(document) == offsets
    assert topic_ids_from_json(document) == topic_ids


def test_a_topic_with_another_id_was_made_again():
    before = {"t": "1", "u": "2", "gone": "3"}
    assert made_again(before, {"t": "1", "u": "4", "new": "5"}) == {"u"}
