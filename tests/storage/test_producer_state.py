"""Idempotent producers: resent batches, gaps, epochs, and what survives a start."""

import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.storage_errors import CorruptLogError, CorruptSnapshotError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from mpbroker.storage.files.txn_index import ENTRY_BYTES
from mpbroker.storage.log import log_loader
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.producers import (
    producer_recall,
    producer_replay,
    producer_state,
)
from mpbroker.storage.producers.producer_replay import parse_marker, replay_range
from mpbroker.storage.producers.producer_snapshot import (
    decode_snapshot,
    encode_snapshot,
)
from mpbroker.storage.producers.producer_state import (
    AppendedBatch,
    ProducerEntry,
    ProducerState,
)
from tests.storage.batches import Validated, batch, read_all, validated
from tests.storage.conftest import OpenLog

_MAX_SEQUENCE = 2**31 - 1


def send(log: PartitionLog, epoch: int, sequence: int, records: int = 1) -> int:
    sent = batch(*[b"v"] * records, producer=(7, epoch, sequence))
    return log.append(sent, now_ms=1).base_offset


def refusal(log: PartitionLog, epoch: int, sequence: int) -> ErrorCode:
    before = log.lookup.latest()
    with pytest.raises(ApiError) as refused:
        send(log, epoch, sequence)
    assert log.lookup.latest() == before
    return refused.value.error_code


def marker(*, commit: bool, coordinator_epoch: int = 0) -> Validated:
    end = EndTransactionMarker(commit, coordinator_epoch)
    return validated(build_end_transaction_marker(7, 0, end, 1_000))


def test_a_resent_batch_is_answered_with_its_first_offset(open_log: OpenLog) -> None:
    log = open_log()
    log.append(batch(b"other"), now_ms=1)
    sent = batch(b"a", b"b", producer=(7, 0, 0), timestamp=5_000)
    first = log.append(sent, now_ms=1)
    again = log.append(sent, now_ms=1)
    assert (again.base_offset, again.last_offset, again.duplicate) == (1, 2, True)
    assert again.log_append_time_ms == 5_001
    assert (first.base_offset, first.duplicate) == (1, False)
    assert log.lookup.latest() == 3


def test_the_last_five_batches_are_remembered_and_no_more(open_log: OpenLog) -> None:
    log = open_log()
    offsets = [send(log, 0, sequence) for sequence in range(6)]
    assert [send(log, 0, sequence) for sequence in range(1, 6)] == offsets[1:]
    assert refusal(log, 0, 0) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_gap_is_refused_and_the_missing_batch_still_fits(open_log: OpenLog) -> None:
    log = open_log()
    send(log, 0, 0)
    assert refusal(log, 0, 2) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert send(log, 0, 1) == 1


def test_a_new_epoch_starts_at_sequence_0_and_ends_the_old_one(
    open_log: OpenLog,
) -> None:
    log = open_log()
    send(log, 3, 0)
    assert refusal(log, 4, 1) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    send(log, 4, 0)
    assert refusal(log, 3, 1) == ErrorCode.INVALID_PRODUCER_EPOCH


def test_an_unknown_producer_may_start_at_any_sequence(open_log: OpenLog) -> None:
    log = open_log()
    send(log, 0, 42)
    assert refusal(log, 0, 44) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_sequences_wrap_to_0(open_log: OpenLog) -> None:
    log = open_log()
    send(log, 0, _MAX_SEQUENCE - 1, records=4)  # the last record has sequence 1
    assert send(log, 0, _MAX_SEQUENCE - 1, records=4) == 0
    assert send(log, 0, 2) == 4


@pytest.mark.parametrize("clean", [True, False])
def test_sequences_survive_a_start(open_log: OpenLog, clean: bool) -> None:
    log = open_log(segment_bytes=400)
    for sequence in range(10):
        send(log, 0, sequence)
    if clean:
        log.sync.take_snapshot()
    never = 2**62  # the test's records are from 1970
    hints = LoadHints(clean=clean, producer_id_expiration_ms=never)
    again = open_log(segment_bytes=400, hints=hints)
    assert send(again, 0, 9) == 9
    assert refusal(again, 0, 11) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert send(again, 0, 10) == 10


@pytest.mark.parametrize("segment_bytes", [400, 1 << 20])
def test_a_snapshot_is_no_reason_to_call_a_resent_batch_a_gap(
    open_log: OpenLog, segment_bytes: int
) -> None:
    log = open_log(segment_bytes=segment_bytes, index_interval_bytes=100)
    offsets = []
    for sequence in range(9):
        offsets.append(send(log, 0, sequence))
        log.append(batch(b"another's", producer=(8, 0, sequence)), now_ms=1)
        if sequence == 7:
            log.sync.take_snapshot()
    # The next broker, and a process that looks at this partition for the first time.
    hints = LoadHints(clean=True, producer_id_expiration_ms=2**62)
    for row in (None, log.row.index):
        again = open_log(row=row, hints=hints, segment_bytes=segment_bytes)
        assert refusal(again, 0, 10) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert [send(again, 0, sequence) for sequence in range(4, 9)] == offsets[4:]
        assert refusal(again, 0, 3) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert send(again, 0, 9) > offsets[-1]


def test_what_is_recalled_of_a_producer_is_its_own_and_of_its_epoch(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(index_interval_bytes=100)
    for sequence in range(40):
        send(log, 0, sequence)
        log.append(batch(b"another's", producer=(8, 1, sequence)), now_ms=1)
    kept = [send(log, 1, sequence) for sequence in range(2)]
    log.sync.take_snapshot()
    hints = LoadHints(clean=True, producer_id_expiration_ms=2**62)
    again = open_log(hints=hints)
    assert refusal(again, 0, 38) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert [send(again, 1, sequence) for sequence in range(2)] == kept
    # No further back than this; what lies there is a gap, as everywhere in Kafka.
    monkeypatch.setattr(producer_recall, "RECALL_BYTES", 10)
    again = open_log(hints=hints)
    other = batch(b"another's", producer=(8, 1, 35))
    with pytest.raises(ApiError) as refused:
        again.append(other, now_ms=1)
    assert refused.value.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_process_that_looks_late_leaves_the_snapshots_of_others(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log()
    send(log, 0, 0)
    late = open_log(row=log.row.index)
    state = late.view.state()  # as it is read before the lock is taken
    send(log, 0, 1)
    log.sync.take_snapshot()
    late.producers.at(state)
    assert (tmp_path / "t-0" / f"{2:020d}.snapshot").exists()


def test_a_snapshot_ahead_of_a_cut_log_is_not_believed(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log()
    for sequence in range(4):
        send(log, 0, sequence)
    log.sync.take_snapshot()
    path = Path(log.reader.read(3, 1, min_one_batch=True).segment_path)
    path.write_bytes(path.read_bytes()[:-1])
    again = open_log()
    assert again.lookup.latest() == 3
    assert not list((tmp_path / "t-0").glob("*.snapshot"))
    assert send(again, 0, 3) == 3


def test_a_torn_snapshot_is_passed_over_for_an_older_one(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log()
    for sequence in range(4):
        send(log, 0, sequence)
        log.sync.take_snapshot()
    newest = sorted((tmp_path / "t-0").glob("*.snapshot"))[-1]
    newest.write_bytes(newest.read_bytes()[:-3])
    assert refusal(open_log(), 0, 5) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_snapshot_stays_where_a_start_after_a_crash_begins_to_read(
    open_log: OpenLog, tmp_path: Path
) -> None:
    """Rolls leave none where nobody writes with a producer id."""
    housekeeper = open_log(segment_bytes=1_000)
    housekeeper.lookup.latest()  # loads it; so the other knows nothing of producers
    log = open_log(row=housekeeper.row.index, segment_bytes=1_000)

    def grow() -> int:
        for _ in range(4):
            end = log.append(batch(b"x" * 100), now_ms=1).last_offset + 1
        housekeeper.sync.take_snapshot()
        return end

    ends = [grow() for _ in range(3)]
    housekeeper.sync.flush()
    point = housekeeper.sync.flush_indexes()
    ends += [grow() for _ in range(9)]
    kept = {int(path.stem) for path in (tmp_path / "t-0").glob("*.snapshot")}
    bases = {int(path.stem) for path in (tmp_path / "t-0").glob("*.log")}
    assert point not in bases and len(bases) > 2
    assert kept - bases == {point, *ends[-2:]}


def test_an_idle_producer_is_forgotten(open_log: OpenLog) -> None:
    log = open_log(hints=LoadHints(producer_id_expiration_ms=1_000))
    log.append(batch(b"a", producer=(7, 0, 0), timestamp=1_000), now_ms=1_000)
    later = batch(b"b", producer=(7, 0, 9), timestamp=1_000_000)
    assert log.append(later, now_ms=1_000_000).base_offset == 1


def test_a_producer_of_old_records_is_not_forgotten_while_it_writes(
    open_log: OpenLog,
) -> None:
    now_ms = int(time.time() * 1000)
    log = open_log()
    other = open_log(row=log.row.index)
    old = batch(b"dated 1970", producer=(7, 0, 0), timestamp=1)
    assert log.append(old, now_ms=now_ms).base_offset == 0
    for handle in (other, log):
        again = handle.append(old, now_ms=now_ms + 700_000)
        assert (again.base_offset, again.duplicate) == (0, True)
    log.sync.take_snapshot()
    started = open_log()
    assert started.append(old, now_ms=now_ms + 700_000).duplicate
    day_later = now_ms + 86_400_000 + 1_000_000
    assert not open_log().append(old, now_ms=day_later).duplicate


def test_another_process_learns_of_producers_from_the_log(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=300)
    other = open_log(row=log.row.index, segment_bytes=300)
    for sequence in range(0, 20, 2):
        send(log, 0, sequence)
        log.append(batch(b"without a producer"), now_ms=1)
        send(other, 0, sequence + 1)
    assert refusal(log, 0, 21) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert send(other, 0, 18) == send(log, 0, 18)


def test_a_process_that_looks_late_knows_what_others_wrote_since_a_clean_start(
    open_log: OpenLog,
) -> None:
    # Nobody has written a snapshot: the log was empty, or was not there, by then.
    hints = LoadHints(clean=True)
    log = open_log(hints=hints)
    first = [send(log, 0, sequence) for sequence in range(3)]
    late = open_log(row=log.row.index, hints=hints)
    assert [send(late, 0, sequence) for sequence in range(3)] == first
    assert refusal(late, 0, 7) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert send(late, 0, 3) == 3


def test_a_process_that_looks_late_knows_of_transactions_open_since_a_clean_start(
    open_log: OpenLog,
) -> None:
    hints = LoadHints(clean=True)
    log = open_log(hints=hints)
    log.append(batch(b"plain"), now_ms=1)
    log.append(batch(b"t", producer=(7, 0, 0), transactional=True), now_ms=1)
    late = open_log(row=log.row.index, hints=hints)
    late.append(batch(b"t", producer=(8, 0, 0), transactional=True), now_ms=1)
    assert late.lookup.last_stable_offset() == 1
    late = open_log(row=log.row.index, hints=hints)
    late.append(marker(commit=False), now_ms=1)
    assert late.lookup.last_stable_offset() == 2
    found = late.reader.read(1, 1_000, min_one_batch=True, read_committed=True)
    assert found.aborted_transactions == [(7, 1)]


def test_what_a_clean_stop_closed_is_not_read_for_producers(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    for _ in range(5):
        log.append(batch(b"plain"), now_ms=1)
    hints = LoadHints(clean=True, recovery_point=5, closed_end=5)
    log = open_log(hints=hints)
    send(log, 0, 0)
    late = open_log(row=log.row.index, hints=hints)
    began = []
    replay = log_loader.replay_log

    def noted(producers: ProducerState, *rest: object) -> None:
        began.append(producers.end_offset)
        replay(producers, *rest)

    monkeypatch.setattr(log_loader, "replay_log", noted)
    assert send(late, 0, 0) == 5
    assert began == [5]


def test_an_open_transaction_holds_the_last_stable_offset(open_log: OpenLog) -> None:
    log = open_log()
    log.append(batch(b"plain"), now_ms=1)
    log.append(batch(b"t", producer=(7, 0, 0), transactional=True), now_ms=1)
    log.append(batch(b"plain"), now_ms=1)
    assert (log.lookup.last_stable_offset(), log.lookup.latest()) == (1, 3)
    found = log.reader.read(0, 1_000, min_one_batch=True, read_committed=True)
    assert found.length == len(batch(b"plain").data)
    assert (
        log.reader.read(1, 1_000, min_one_batch=True, read_committed=True).length == 0
    )
    assert open_log().lookup.last_stable_offset() == 1
    log.append(marker(commit=True), now_ms=1)
    assert log.lookup.last_stable_offset() == log.lookup.latest() == 4
    committed = log.reader.read(0, 1_000, min_one_batch=True, read_committed=True)
    assert committed.aborted_transactions == []
    assert len(read_all(log)) == 3
    assert open_log().lookup.last_stable_offset() == 4


def test_an_aborted_transaction_is_named_to_readers_of_committed_data(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log()
    log.append(batch(b"t", producer=(7, 0, 0), transactional=True), now_ms=1)
    log.append(marker(commit=False), now_ms=1)
    found = log.reader.read(0, 1_000, min_one_batch=True, read_committed=True)
    assert found.aborted_transactions == [(7, 0)]
    index = tmp_path / "t-0" / f"{0:020d}.txnindex"
    assert index.stat().st_size == ENTRY_BYTES
    assert struct.unpack(">hqqqq", index.read_bytes()) == (0, 7, 0, 1, 2)
    log.append(batch(b"t", producer=(7, 0, 1), transactional=True), now_ms=1)
    log.append(marker(commit=False), now_ms=1)
    assert index.stat().st_size == 2 * ENTRY_BYTES
    late = log.reader.read(2, 1_000, min_one_batch=True, read_committed=True)
    assert late.aborted_transactions == [(7, 2)]


def test_a_plain_write_inside_a_transaction_is_refused(open_log: OpenLog) -> None:
    log = open_log()
    log.append(batch(b"t", producer=(7, 0, 0), transactional=True), now_ms=1)
    assert refusal(log, 0, 1) == ErrorCode.INVALID_TXN_STATE


def test_a_marker_of_an_older_coordinator_is_refused(open_log: OpenLog) -> None:
    log = open_log()
    log.append(batch(b"t", producer=(7, 0, 0), transactional=True), now_ms=1)
    log.append(marker(commit=True, coordinator_epoch=5), now_ms=1)
    with pytest.raises(ApiError) as refused:
        log.append(marker(commit=True, coordinator_epoch=4), now_ms=1)
    assert refused.value.error_code == ErrorCode.TRANSACTION_COORDINATOR_FENCED


_INT64 = st.integers(0, 2**63 - 1)


@given(
    st.dictionaries(
        _INT64,
        st.tuples(
            st.integers(0, 2**15 - 1),
            st.integers(-1, 2**31 - 1),
            st.integers(-1, 2**63 - 1),
            st.integers(0, 2**31 - 1),
        ),
        max_size=5,
    )
)
def test_snapshots_are_read_back_as_written(
    producers: dict[int, tuple[int, int, int, int]],
) -> None:
    state = ProducerState(42)
    for producer_id, (epoch, coordinator, timestamp, sequence) in producers.items():
        entry = ProducerEntry(producer_id, epoch, coordinator, timestamp)
        first = (sequence - 3) & _MAX_SEQUENCE
        entry.batches.append(AppendedBatch(first, sequence, 10, 13, timestamp))
        state.add(entry)
    content = encode_snapshot(state)
    again = decode_snapshot(content, 42)
    assert encode_snapshot(again) == content
    for producer_id, entry in state.entries.items():
        assert again.entries[producer_id].batches == entry.batches


@given(st.binary(max_size=200))
def test_any_bytes_are_a_snapshot_or_a_corrupt_one(content: bytes) -> None:
    with pytest.raises(CorruptSnapshotError):
        decode_snapshot(content, 0)


@given(st.booleans(), st.integers(-1, 2**31 - 1), st.integers(0, 2**50))
def test_a_marker_is_read_alike_by_its_form_and_by_its_fields(
    commit: bool, epoch: int, timestamp: int
) -> None:
    usual = build_end_transaction_marker(
        7, 0, EndTransactionMarker(commit, epoch), timestamp
    )
    # With a byte more in its value, as a later version may have.
    builder = RecordBatchBuilder(producer_id=7, producer_epoch=0, control=True)
    key, value = struct.pack(">hh", 0, commit), struct.pack(">hib", 0, epoch, 0)
    builder.append(timestamp, key, value)
    read = parse_marker(usual)
    assert read == (commit, epoch, 0, timestamp)
    assert read == parse_marker(memoryview(builder.build()))


def stored(path: Path) -> bytes:
    """A log of two producers, one of which commits a transaction and begins another."""
    end = EndTransactionMarker(True, 3)
    batches = [
        batch(b"a", b"b", producer=(7, 0, 0), timestamp=5_000).data,
        batch(b"no producer").data,
        batch(b"c", producer=(8, 1, 0), transactional=True).data,
        build_end_transaction_marker(8, 1, end, 6_000),
        batch(b"d", producer=(8, 1, 1), transactional=True).data,
        batch(b"e", producer=(7, 0, 2)).data,
    ]
    whole, offset = b"", 0
    for each in batches:
        whole += struct.pack(">q", offset) + bytes(each)[8:]
        offset += struct.unpack_from(">i", each, 23)[0] + 1
    path.write_bytes(whole)
    return whole


def replayed(path: Path, end: int, known: int = 0) -> tuple[object, ...]:
    producers = ProducerState(known)
    with open(path, "rb") as file:
        replay_range(producers, file.fileno(), 0, end)
    entries = {
        number: [getattr(entry, name) for name in ProducerEntry.__slots__]
        for number, entry in producers.entries.items()
    }
    return producers.end_offset, entries, producers.ongoing


@pytest.mark.parametrize("known", [0, 2, 3, 4, 7])
def test_a_few_batches_are_replayed_from_memory_as_many_are_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    size = len(stored(tmp_path / "log"))
    short = replayed(tmp_path / "log", size, known)
    monkeypatch.setattr(producer_replay, "_SHORT_BYTES", -1)
    assert short == replayed(tmp_path / "log", size, known)


@pytest.mark.parametrize("spoilt", [11, 16])  # a length, a magic
def test_batches_that_are_none_are_corruption_few_or_many(
    tmp_path: Path, spoilt: int
) -> None:
    data = bytearray(stored(tmp_path / "log"))
    first = 12 + struct.unpack_from(">i", data, 8)[0]
    data[first + spoilt] ^= 1
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(CorruptLogError):
        replayed(tmp_path / "log", len(data))
    with pytest.raises(CorruptLogError):
        replayed(tmp_path / "log", first - 1)


def test_a_partition_forgets_the_oldest_of_too_many_producers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer_state, "MAX_PRODUCERS", 32)
    state = ProducerState()

    def write(producer_id: int, offset: int, transactional: int = 0) -> None:
        # Timestamps are the clients', and say nothing about the order.
        sent = AppendedBatch(0, 0, offset, offset, 1_000_000 - offset)
        state.apply(producer_id, 0, sent, transactional)

    for producer_id in range(32):
        write(producer_id, producer_id, transactional=producer_id == 0)
    write(1, 32)
    assert len(state.entries) == 32
    write(32, 33)
    assert sorted(state.entries) == [0, 1, *range(4, 33)]
    assert state.ongoing == {0: 0}
    end = producer_state.EndTransactionMarker(1, 0, 34, 0)
    write(33, 35)
    state.apply_marker(34, 0, end)
    assert len(state.entries) == 31
    assert state.check(2, 0, 5, 5, 0) is None  # as an expired one: any sequence


def test_a_partition_with_open_transactions_alone_forgets_no_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer_state, "MAX_PRODUCERS", 16)
    state = ProducerState()
    for offset in range(20):
        state.apply(offset, 0, AppendedBatch(0, 0, offset, offset, 0), 1)
    assert len(state.entries) == len(state.ongoing) == 20
