"""The records of a transaction in the log, and the allowed changes of its state."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, product
from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.coordinator.outbox import AppendedMarker
from mpbroker.coordinator.transactions.transaction_metadata import (
    MAX_EPOCH,
    PREVIOUS,
    IllegalTransitionError,
    TransactionMetadata,
    TransactionState,
)
from mpbroker.coordinator.transactions.transaction_records import (
    MarkedPartition,
    MarkedTopic,
    PartitionsSchema,
    TransactionLogValue,
    TransactionSnapshot,
    UnsyncedMarkers,
    read_markers,
    read_transaction,
    state_value,
    transaction_key,
    transaction_value,
)
from mpbroker.protocol.errors import ProtocolError

S = TransactionState


@pytest.mark.parametrize(("before", "after"), list(product(S, S)))
def test_no_transition_but_those_of_the_table(before, after):
    transaction = TransactionMetadata("x", 1, 1000, 0)
    transaction.state = before
    if before in PREVIOUS[after]:
        transaction.transition_to(after, 1)
        assert transaction.state is after
    else:
        with pytest.raises(IllegalTransitionError):
            transaction.transition_to(after, 1)
        assert transaction.state is before


def test_a_record_is_the_bytes_that_kafka_writes():
    transaction = TransactionMetadata("id", 7, 1000, 5)
    transaction.producer_epoch = 2
    transaction.add([("t", 1), ("t", 0)], 0, 9)
    assert transaction.key.hex() == "0000" + "0002" + b"id".hex()
    read = read_transaction(transaction.key, transaction.value())
    assert read is not None and read[1] is not None
    assert transaction_value(read[1], 0).hex() == (
        "0000" + "0000000000000007" + "0002" + "000003e8" + "01"
        "00000001" + "0001" + b"t".hex() + "00000002" + "00000000" + "00000001"
        "0000000000000009" + "0000000000000009"
    )
    assert transaction.value().hex() == (
        "0001" + "0000000000000007" + "0002" + "000003e8" + "01"
        "02" + "02" + b"t".hex() + "03" + "00000000" + "00000001" + "00"
        "0000000000000009" + "0000000000000009" + "00"
    )


ids = st.integers(-1, (1 << 63) - 1)


markers = st.lists(
    st.builds(
        AppendedMarker,
        ids,
        st.integers(-1, MAX_EPOCH),
        st.booleans(),
        st.sampled_from(["a", "b", "ü" * 200]),
        st.sampled_from([bytes(16), bytes(range(16))]),
        st.integers(0, (1 << 31) - 1),
        ids,
    ),
    max_size=5,
).map(tuple)

states = st.tuples(
    ids,
    ids,
    ids,
    st.integers(-1, MAX_EPOCH),
    st.integers(0, (1 << 31) - 1),
    st.sampled_from(TransactionState),
    st.none()
    | st.sets(st.tuples(st.text(max_size=200), st.integers(0, (1 << 31) - 1))),
    ids,
    ids,
    st.integers(0, 2),
    markers,
    markers,
)


def marker_rows(markers: Iterable[AppendedMarker]) -> list[UnsyncedMarkers]:
    """Markers as a record says them, in the same order."""
    return [
        UnsyncedMarkers(
            producer_id=producer_id,
            producer_epoch=epoch,
            committed=commit,
            topics=[
                MarkedTopic(
                    topic=topic,
                    topic_id=topic_id,
                    partitions=[
                        MarkedPartition(partition=each.partition, offset=each.offset)
                        for each in places
                    ],
                )
                for (topic, topic_id), places in groupby(end, itemgetter(3, 4))
            ],
        )
        for (producer_id, epoch, commit), end in groupby(markers, itemgetter(0, 1, 2))
    ]


@given(states)
@settings(max_examples=100)
def test_a_record_written_by_hand_is_that_of_the_codec(fields):
    value, partitions = state_value(TransactionSnapshot(*fields)), fields[6]
    topics = {}
    for topic, partition in sorted(partitions or ()):
        topics.setdefault(topic, []).append(partition)
    made = TransactionLogValue(
        producer_id=fields[0],
        previous_producer_id=fields[1],
        next_producer_id=fields[2],
        producer_epoch=fields[3],
        transaction_timeout_ms=fields[4],
        transaction_status=fields[5],
        transaction_partitions=None
        if partitions is None
        else [
            PartitionsSchema(topic=topic, partition_ids=numbers)
            for topic, numbers in topics.items()
        ],
        transaction_last_update_timestamp_ms=fields[7],
        transaction_start_timestamp_ms=fields[8],
        client_transaction_version=fields[9],
        unsynced_markers=marker_rows(fields[10]),
        expected_markers=marker_rows(fields[11]),
    )
    assert value == transaction_value(made)
    assert read_markers(made.unsynced_markers) == fields[10]
    assert read_markers(made.expected_markers) == fields[11]


@given(st.binary(max_size=60), st.none() | st.binary(max_size=60))
@settings(max_examples=100)
def test_any_bytes_are_a_record_or_refused(key, value):
    try:
        read = read_transaction(b"\0\0" + key, value)
    except ProtocolError:
        return
    assert read is None or isinstance(read[0], str)


def test_a_record_is_read_as_it_was_written():
    value = TransactionLogValue(
        producer_id=1,
        previous_producer_id=2,
        next_producer_id=3,
        producer_epoch=4,
        transaction_timeout_ms=5,
        transaction_status=2,
        transaction_partitions=None,
        transaction_last_update_timestamp_ms=6,
        transaction_start_timestamp_ms=7,
        client_transaction_version=2,
    )
    read = read_transaction(transaction_key("x"), transaction_value(value))
    assert read == ("x", value)
