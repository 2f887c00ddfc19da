"""The compiled walk of a compaction does what its Python twin does, byte for byte."""

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.record_batch import Codec
from mpbroker.storage.cleaning import compaction
from mpbroker.storage.cleaning.key_map import KeyMap
from mpbroker.storage.log.partition_log import PartitionLog
from tests.storage.batches import batch, validated
from tests.storage.conftest import OpenLog
from tests.storage.test_compaction import compact, roll

_cleaner = pytest.importorskip("mpbroker.native._cleaner", reason="needs a C compiler")
_names = itertools.count()
KEYS = st.none() | st.sampled_from([b"", b"a", b"b", b"cc", b"eight by", b"nine byte"])
VALUES = st.none() | st.sampled_from([b"", b"x", b"y" * 90])
COMMITTED, ABORTED = range(7, 9)  # producers of transactions

BATCHES = st.tuples(
    st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=6),
    st.sampled_from([Codec.NONE, Codec.NONE, Codec.NONE, Codec.LZ4]),
    st.sampled_from([None, None, 5, COMMITTED, ABORTED]),
)


def fill(log: PartitionLog, batches: list[tuple]) -> None:
    sequences = dict.fromkeys((5, COMMITTED, ABORTED), 0)
    for number, (pairs, codec, producer) in enumerate(batches):
        more: dict[str, object] = {}
        if producer is not None:
            more["producer"] = (producer, 0, sequences[producer])
            more["transactional"] = producer != 5
            sequences[producer] += len(pairs)
        # Times neither rise nor fall: the newest that stays may be any of them.
        time_ms = 1000 + number * 37 % 100
        log.append(batch(*pairs, codec=codec, timestamp=time_ms, **more), now_ms=1)
    for producer in (COMMITTED, ABORTED):
        if sequences[producer]:
            marker = EndTransactionMarker(int(producer == COMMITTED), 0)
            data = build_end_transaction_marker(producer, 0, marker, 1000)
            log.append(validated(data), now_ms=1)
    roll(log)


def files_of(log: PartitionLog) -> dict[str, bytes]:
    wanted = {".log", ".index", ".timeindex", ".txnindex"}
    return {
        path.name: path.read_bytes()
        for path in Path(log.directory).iterdir()
        if path.suffix in wanted
    }


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    batches=st.lists(BATCHES, min_size=1, max_size=25),
    max_keys=st.integers(2, 20),
    chunk_bytes=st.sampled_from([61, 200, 1 << 20]),
    times=st.lists(st.sampled_from([0, 500, 5_000]), min_size=1, max_size=4),
)
@example(
    batches=[([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")], Codec.NONE, None)] * 3,
    max_keys=9,
    chunk_bytes=61,
    times=[0],
)
def test_both_write_the_same_files(
    open_log: OpenLog,
    monkeypatch: pytest.MonkeyPatch,
    batches: list[tuple],
    max_keys: int,
    chunk_bytes: int,
    times: list[int],
) -> None:
    name, found = next(_names), []
    for kind, new_key_map in (("python", KeyMap), ("c", _cleaner.KeyMap)):
        monkeypatch.setattr(compaction, "new_key_map", new_key_map)
        monkeypatch.setattr(
            "mpbroker.storage.cleaning.chunk_reader.CHUNK_BYTES", chunk_bytes
        )
        log = open_log(
            name=f"{kind}{name}-0",
            cleanup_policy=("compact",),
            segment_bytes=900,
            index_interval_bytes=100,
            delete_retention_ms=1_000,
        )
        fill(log, batches)
        clean, states = 0, []
        for now_ms in times:
            clean = compact(log, now_ms, clean, max_keys)
            states.append((clean, files_of(log)))
        found.append(states)
        log.close()
    assert found[0] == found[1]


@given(
    st.lists(st.tuples(st.binary(max_size=20), st.integers(0, 1 << 60)), max_size=60),
    st.integers(1, 40),
)
def test_both_maps_hold_the_same(pairs, max_keys):
    maps = [KeyMap(max_keys), _cleaner.KeyMap(max_keys)]
    for key, offset in pairs:
        python, compiled = (each.put(key, offset) for each in maps)
        assert python == compiled
    assert len(maps[0]) == len(maps[1])
    for key, _ in [*pairs, (b"never put", 0)]:
        assert maps[0].get(key) == maps[1].get(key)


def test_a_map_keeps_all_keys_while_it_grows():
    keys = _cleaner.KeyMap(100_000)
    for number in range(100_000):
        assert keys.put(b"key %d" % number, number)
    assert not keys.put(b"one more", 1)
    assert len(keys) == 100_000
    assert all(keys.get(b"key %d" % n) == n for n in range(100_000))


@given(st.binary(max_size=300), st.integers(0, 300))
def test_bytes_that_are_no_batches_are_left_to_python(data, at):
    keys = _cleaner.KeyMap(10)
    if at > len(data):
        with pytest.raises(ValueError, match="outside the chunk"):
            keys.map_batches(data, at, 0)
        return
    magic = at + 16
    if magic < len(data):
        data = data[:magic] + b"\2" + data[magic + 1 :]
    stopped, is_full = keys.map_batches(data, at, 0)
    assert at <= stopped <= len(data)
    assert not is_full
    stopped, out, spans = keys.filter_batches(data, at, 0)
    assert at <= stopped <= len(data)
    assert len(out) == sum(size for size, _, _ in spans)


def test_a_batch_with_a_fault_is_left_to_python_in_both_passes():
    whole = bytes(batch((b"a", b"1"), (b"b", b"2")).data)
    keys = _cleaner.KeyMap(10)
    for end in range(61, len(whole)):
        # The batch says that it ends early: its last record is cut off.
        data = whole[:8] + (end - 12).to_bytes(4, "big") + whole[12:end]
        assert keys.map_batches(data, 0, 0) == (0, False)
        assert keys.filter_batches(data, 0, -1) == (0, b"", [])
    assert keys.map_batches(whole, 0, 0) == (len(whole), False)
