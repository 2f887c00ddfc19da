"""Offsets of open transactions among a shard's records, as `GroupOffsets` has them."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from mpbroker.coordinator.coordinator_topic import LoadedRecord
from mpbroker.coordinator.groups.group_offsets import GroupOffsets, OffsetAndMetadata
from mpbroker.coordinator.groups.group_records import (
    offset_key,
    offset_value,
    read_offset,
    read_record,
)
from mpbroker.coordinator.outbox import TransactionalRecord
from mpbroker.coordinator.pending_records import PendingRecords

KEY = offset_key("g", "t", 0)
Stored = dict[bytes, bytes]


def write(stored: Stored, records: Iterable[tuple[bytes, bytes | None]]) -> None:
    for key, value in records:
        if value is None:
            stored.pop(key, None)
        else:
            stored[key] = value


def pending(producer_id: int, value: bytes, key: bytes = KEY) -> TransactionalRecord:
    return TransactionalRecord(producer_id, 3, key, value)


def test_an_offset_is_kept_apart_until_its_transaction_ends():
    for commit in (True, False):
        stored: Stored = {KEY: b"old"}
        shard = PendingRecords()
        write(stored, shard.put([pending(1, b"new")]))
        assert stored[KEY] == b"old"
        loaded = PendingRecords().load(sorted(stored.items()))
        assert loaded == [
            LoadedRecord(KEY, b"old", -1, None),
            LoadedRecord(KEY, b"new", 1, None),
        ]
        write(stored, shard.end(1, commit=commit))
        assert stored == {KEY: b"new" if commit else b"old"}
        assert not shard


def test_an_end_without_offsets_writes_something_all_the_same():
    """It is done when that is in the database, with all that was written before."""
    shard = PendingRecords()
    ((key, value),) = shard.end(1, commit=True)
    assert value is None
    assert read_record(key, value) is None


def test_records_of_open_transactions_are_unknown_to_who_does_not_expect_them():
    """A node of the version before skips them."""
    ((key, value),) = PendingRecords().put([pending(1, b"value")])
    assert read_offset(key, value) is None
    assert read_record(key, value) is None


def test_a_deleted_offset_does_not_come_back():
    stored: Stored = {}
    shard = PendingRecords()
    write(stored, shard.put([pending(1, b"a"), pending(2, b"b")]))
    write(stored, [(KEY, None), *shard.outdo([(KEY, None)])])
    assert stored == {}
    for producer_id in (1, 2):
        write(stored, shard.end(producer_id, commit=True))
    assert stored == {}


def _value(number: int) -> OffsetAndMetadata:
    return OffsetAndMetadata(number, -1, "", 0, -1)


def _applied(records: Iterable[LoadedRecord]) -> GroupOffsets:
    """Apply loaded records as the coordinator does."""
    found = GroupOffsets()
    for record in records:
        read = read_offset(record.key, record.value)
        assert read is not None
        _, topic, partition, committed = read
        assert committed is not None
        value = OffsetAndMetadata._make(committed)
        if record.producer_id >= 0:
            found.put_pending(record.producer_id, topic, partition, value)
        else:
            found.put(topic, partition, value)
    return found


PLACES = st.integers(0, 1)
PRODUCERS = st.integers(1, 3)
EVENTS = st.one_of(
    st.tuples(st.just("pending"), PRODUCERS, PLACES),
    st.tuples(st.just("plain"), st.just(0), PLACES),
    st.tuples(st.just("deleted"), st.just(0), PLACES),
    st.tuples(st.just("commit"), PRODUCERS, st.just(0)),
    st.tuples(st.just("abort"), PRODUCERS, st.just(0)),
    st.tuples(st.just("loaded"), st.just(0), st.just(0)),
)


@given(st.lists(EVENTS, max_size=20))
def test_the_database_has_what_the_memory_has(events):
    """At each point, and also if another node goes on from the database."""
    stored: Stored = {}
    shard, memory = PendingRecords(), GroupOffsets()
    for number, (what, producer_id, place) in enumerate(events):
        key, value = offset_key("g", "t", place), _value(number)
        match what:
            case "pending":
                write(
                    stored,
                    shard.put([pending(producer_id, offset_value(*value), key)]),
                )
                memory.put_pending(producer_id, "t", place, value)
            case "plain":
                plain = [(key, offset_value(*value))]
                write(stored, [*plain, *shard.outdo(plain)])
                memory.put("t", place, value)
            case "deleted":
                write(stored, [(key, None), *shard.outdo([(key, None)])])
                memory.remove_pending("t", place)
                memory.remove("t", place)
            case "loaded":
                shard = PendingRecords()
                memory = _applied(shard.load(sorted(stored.items())))
            case _:
                write(stored, shard.end(producer_id, commit=what == "commit"))
                memory.complete(producer_id, commit=what == "commit")
        found = _applied(PendingRecords().load(sorted(stored.items())))
        assert sorted(found) == sorted(memory)
        assert found.pending() == memory.pending()
    for producer_id in (1, 2, 3):
        write(stored, shard.end(producer_id, commit=True))
        memory.complete(producer_id, commit=True)
    found = _applied(PendingRecords().load(sorted(stored.items())))
    assert sorted(found) == sorted(memory)
    assert not found.pending()
    assert not shard
