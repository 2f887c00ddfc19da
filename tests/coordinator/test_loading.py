"""Reading the logs: decoding by hand as by the schema, only the newest records."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from mpbroker.coordinator.coordinator_topic import LoadedRecord, newest
from mpbroker.coordinator.groups.group_records import (
    OffsetCommitKey,
    OffsetCommitValue,
    offset_key,
    offset_value,
    read_offset,
    read_record,
)
from mpbroker.coordinator.transactions.transaction_metadata import TransactionState
from mpbroker.coordinator.transactions.transaction_records import (
    TransactionSnapshot,
    read_transaction,
    state_value,
    transaction_key,
    what_counts,
)
from mpbroker.coordinator.versioned import versioned
from mpbroker.protocol.errors import ProtocolError
from tests.coordinator.transactions.transaction_rig import TransactionRig

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def by_table(key: bytes, value: bytes | None) -> object:
    """Return what `read_record` reads, as `read_offset` would; None: another kind."""
    try:
        found = read_record(key, value)
    except (ProtocolError, UnicodeDecodeError):
        return None
    if found is None or not isinstance(found[0], OffsetCommitKey):
        return None
    row = found[1]
    committed = None
    if isinstance(row, OffsetCommitValue):
        committed = (
            row.offset,
            row.leader_epoch,
            row.metadata,
            row.commit_timestamp,
            row.expire_timestamp,
        )
    return found[0].group, found[0].topic, found[0].partition, committed


@given(NAMES, NAMES, INT32, INT64, INT32, NAMES, INT64)
def test_an_offset_is_read_as_it_was_written(
    group, topic, partition, offset, epoch, metadata, timestamp
):
    key = offset_key(group, topic, partition)
    value = offset_value(offset, epoch, metadata, timestamp, -1)
    found = read_offset(key, value)
    assert found == by_table(key, value)
    expected = (group, topic, partition, (offset, epoch, metadata, timestamp, -1))
    assert found == expected
    assert read_offset(key, None) == (group, topic, partition, None)


@given(NAMES, st.integers(0, 4), st.binary(max_size=4), st.integers(0, 40))
def test_records_that_are_not_plain_are_left_to_the_table(group, version, more, cut):
    """Other versions, expiry times, bytes that lie: never another answer."""
    row = OffsetCommitValue(offset=3, metadata="m", commit_timestamp=5)
    value = versioned(row, version)
    for key in (offset_key(group, "t", 1), versioned(OffsetCommitKey(group=group), 0)):
        for lie in (value, value + more, value[:cut]):
            found = read_offset(key, lie)
            assert found is None or found == by_table(key, lie)
        for lie in (key + more, key[:cut]):
            found = read_offset(lie, value)
            assert found is None or found == by_table(lie, value)


@given(st.binary(max_size=60), st.binary(max_size=60) | st.none())
def test_any_bytes_are_an_offset_to_both_or_to_the_table_alone(key, value):
    found = read_offset(key, value)
    assert found is None or found == by_table(key, value)


def record(key: bytes, value: bytes | None, producer_id: int = -1) -> LoadedRecord:
    return LoadedRecord(key, value, producer_id, None)


def test_only_the_newest_record_of_a_key_is_taken_over_and_in_its_place():
    records = [
        record(b"a", b"1"),
        record(b"b", b"1"),
        record(b"a", None),
        record(b"c", b"1"),
    ]
    assert newest(records) == records[1:]


def test_among_transactions_every_record_counts():
    marker = LoadedRecord(b"", None, 7, True)
    records = [record(b"a", b"1"), record(b"a", b"2", 7), marker, record(b"a", b"3")]
    assert newest(records) == records


IDS = st.sampled_from(["a", "b"])
EPOCHS = st.none() | st.integers(0, 2)


@given(st.lists(st.tuples(IDS, EPOCHS), max_size=12), st.integers(1, 5), st.booleans())
def test_replaced_records_of_transactions_are_left_out_too(said, step, newer):
    """None is a record that deletes. Only the record before has the last epoch."""
    log: list[LoadedRecord] = []
    for number, (name, epoch) in enumerate(said):
        value = None
        if epoch is not None:
            state = TransactionState.ONGOING
            ids = (7, -1, -1)
            value = state_value(
                TransactionSnapshot(*ids, epoch, 1, state, [("t", 0)], number, 0, 2)
            )
        log.append(record(transaction_key(name), value))
    if newer:
        log.insert(len(log) // 2, record(transaction_key("a"), b"\0\2"))

    def replayed(pick):
        rig = TransactionRig()
        for start in range(0, len(log), step):
            for each in pick(log[start : start + step]):
                with suppress(ProtocolError):
                    rig.coordinator.replay(*read_transaction(each.key, each.value))
        return {
            each.transactional_id: (each.value(), each.last_producer_epoch)
            for each in rig.coordinator.all()
        }

    assert replayed(what_counts) == replayed(list)


def test_of_an_id_two_records_are_taken_over_however_many_there_are():
    ids = (7, -1, -1)
    log = [
        record(
            transaction_key("a"),
            state_value(
                TransactionSnapshot(
                    *ids, epoch // 3, 1, TransactionState.EMPTY, None, 1, 1, 2
                )
            ),
        )
        for epoch in range(12)
    ]
    assert what_counts(log) == [log[8], log[11]]
