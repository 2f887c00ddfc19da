"""What the coordinator appends: by the compiled core, and the same by Python."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.coordinator.coordinator_topic import _append, _cut
from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.record_batch import iter_records
from mpbroker.storage.cleaning.retention import apply_retention
from mpbroker.storage.log.own_appends import OwnAppends
from mpbroker.storage.log.partition_log import PartitionLog
from tests.storage.batches import batch, batches_in, read_all, read_bytes, validated
from tests.storage.conftest import OpenLog
from tests.support.children import die, fork, kill_at_step, steps_of

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core is not there"
)

PRODUCER, OTHER = 7, 8
NOW = 1_700_000_000_000


@pytest.fixture
def own(table: PartitionTable) -> OwnAppends:
    return OwnAppends(table)


def end(
    producer: int = PRODUCER,
    epoch: int = 0,
    *,
    commit: bool = True,
    coordinator: int = 0,
) -> bytes:
    marker = EndTransactionMarker(commit, coordinator)
    return build_end_transaction_marker(producer, epoch, marker, NOW)


def write(
    log: PartitionLog, producer: int = PRODUCER, epoch: int = 0, sequence: int = 0
) -> None:
    """A record of a transaction, as another process appends it."""
    fields = (producer, epoch, sequence)
    log.append(
        batch(b"t", timestamp=NOW, producer=fields, transactional=True), now_ms=NOW
    )


def planned(log: PartitionLog) -> PartitionLog:
    """With two records, by whose appends the core knows how to go on."""
    log.append_plan()
    for _ in range(2):
        log.append(batch(b"first", timestamp=NOW), now_ms=NOW)
    return log


class Pair:
    """A partition as the coordinator has it, and as whoever else writes there."""

    def __init__(self, open_log: OpenLog, name: str, **config: Any) -> None:
        self.log = open_log(name=name, **config)
        self.others = open_log(name=name, row=self.log.row.index, **config)

    def begun(self) -> Pair:
        """With a transaction that is open, of a producer that the coordinator knows."""
        write(self.others)
        self.log.append(validated(end()), now_ms=NOW)
        write(self.others, sequence=1)
        planned(self.log)
        return self


# -- records ---------------------------------------------------------------------------

sizes = st.integers(0, 200)
texts = st.builds(lambda size, byte: bytes([byte]) * size, sizes, st.integers(0, 255))


def test_records_are_the_same_bytes_either_way(
    open_log: OpenLog, own: OwnAppends
) -> None:
    short, usual = (
        planned(open_log(name=name, index_interval_bytes=1 << 30))
        for name in ("short-0", "usual-0")
    )

    def compare(records: list[tuple[bytes, bytes | None]]) -> None:
        begin = usual.lookup.latest()
        for raw in _cut(records, NOW):
            _append(usual, raw, Codec.NONE, NOW)
        assert (
            own.append(short, records, NOW)
            == usual.lookup.latest()
            == begin + len(records)
        )
        assert read_bytes(short, begin) == read_bytes(usual, begin)
        states = [
            log.view.state()._replace(segment_created_ms=0) for log in (short, usual)
        ]
        assert states[0] == states[1]

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.tuples(texts, st.none() | texts), min_size=1, max_size=9))
    def check(records: list[tuple[bytes, bytes | None]]) -> None:
        compare(records)

    check()
    for size in (8_191, 8_192, 16_000):
        compare([(b"k", bytes(size)), (bytes(size % 999), None)])
    compare([(b"k", b"v")] * 256)


@pytest.mark.parametrize(
    "records",
    [[], [("text", b"")], [(b"k", "text")], [(b"k",)], [b"k"], [(b"k", b"v" * 20_000)]],
)
def test_odd_records_are_left_to_the_usual_way(
    open_log: OpenLog, own: OwnAppends, records: Any
) -> None:
    log = planned(open_log())
    assert own.append(log, records, NOW) is None
    assert log.lookup.latest() == 2


def test_a_log_goes_on_the_usual_way_where_a_segment_is_full(
    open_log: OpenLog, own: OwnAppends
) -> None:
    log = planned(open_log(segment_bytes=1024, index_interval_bytes=200))
    short, last = 0, 2
    for _ in range(60):
        done = own.append(log, [(b"k", b"v" * 50)], NOW)
        if done is None:
            done = _append(log, [(NOW, b"k", b"v" * 50, ())], Codec.NONE, NOW)
        else:
            short += 1
        assert done == last + 1
        last = done
    assert 40 < short < 60
    assert [offset for offset, _ in read_all(log)] == list(range(62))


def test_nothing_is_made_of_a_segment_that_is_gone(
    open_log: OpenLog, own: OwnAppends
) -> None:
    """Others have rolled since, and retention has removed what they left."""
    pair = Pair(open_log, "t-0", retention_bytes=0)
    pair.log.append(batch(b"first", timestamp=NOW), now_ms=NOW)
    with pair.others.row.locked():
        pair.others.roll_locked(NOW)
    pair.others.append(batch(b"second", timestamp=NOW), now_ms=NOW)
    assert apply_retention(pair.others, NOW)
    directory = Path(pair.log.directory)
    for path in directory.glob("*.deleted"):
        path.unlink()
    assert own.append(pair.log, [(b"k", b"v")], NOW) is None
    assert not list(directory.glob("00000000000000000000.*"))


# -- markers ---------------------------------------------------------------------------


def ends_alike(
    open_log: OpenLog, own: OwnAppends, play: Callable[[Pair, Any], None]
) -> int:
    """Play the same on two partitions; how many markers the core appended."""
    pairs = [Pair(open_log, name).begun() for name in ("short-0", "usual-0")]
    taken = 0

    def short(log: PartitionLog, data: bytes) -> int:
        nonlocal taken
        done = own.append_marker(log, data, NOW)
        if done is None:
            return usual(log, data)
        taken += 1
        return done

    def usual(log: PartitionLog, data: bytes) -> int:
        return log.append(validated(data), now_ms=NOW).last_offset + 1

    for pair, append in zip(pairs, (short, usual), strict=True):
        play(pair, append)
    assert read_bytes(pairs[0].log, 0) == read_bytes(pairs[1].log, 0)
    stable = [pair.others.lookup.last_stable_offset() for pair in pairs]
    assert stable[0] == stable[1]
    # What its own process knows is what a start would read.
    for pair in pairs:
        write(pair.others, OTHER)
        pair.log.append(validated(end(OTHER)), now_ms=NOW)
        assert pair.log.view.producers is not None
        assert not pair.log.view.producers.ongoing.keys() - {stable[0]}
    return taken


def test_a_commit_is_the_same_bytes_either_way(
    open_log: OpenLog, own: OwnAppends
) -> None:
    def play(pair: Pair, append: Any) -> None:
        assert append(pair.log, end(epoch=1)) == 6
        assert pair.others.lookup.last_stable_offset() == 6
        for epoch in range(1, 4):
            write(pair.others, epoch=epoch)
            assert pair.others.lookup.last_stable_offset() == 4 + 2 * epoch
            append(pair.log, end(epoch=epoch + 1))

    assert ends_alike(open_log, own, play) == 4


def test_what_has_ended_is_not_ended_once_more(
    open_log: OpenLog, own: OwnAppends
) -> None:
    def play(pair: Pair, append: Any) -> None:
        assert [append(pair.log, end(epoch=1)) for _ in range(3)] == [6, 6, 6]

    assert ends_alike(open_log, own, play) == 3


def test_a_transaction_of_another_producer_stays_open(
    open_log: OpenLog, own: OwnAppends
) -> None:
    def play(pair: Pair, append: Any) -> None:
        write(pair.others, OTHER)
        pair.log.append(validated(end(OTHER)), now_ms=NOW)
        write(pair.others, OTHER, sequence=1)
        append(pair.log, end(epoch=1))
        assert pair.others.lookup.last_stable_offset() == 7

    assert ends_alike(open_log, own, play) == 1


@pytest.mark.parametrize(
    "marker",
    [
        end(commit=False),  # goes into an index, too
        end(OTHER),  # is the first that is heard of it
    ],
    ids=["abort", "unknown"],
)
def test_what_is_not_plain_is_ended_the_usual_way(
    open_log: OpenLog, own: OwnAppends, marker: bytes
) -> None:
    def play(pair: Pair, append: Any) -> None:
        append(pair.log, marker)

    assert ends_alike(open_log, own, play) == 0


def test_the_core_refuses_nobody(open_log: OpenLog, own: OwnAppends) -> None:
    log = Pair(open_log, "t-0").begun().log
    log.append(validated(end(epoch=3, coordinator=2)), now_ms=NOW)
    end_offset = log.lookup.latest()
    assert own.append_marker(log, end(epoch=2, coordinator=2), NOW) is None
    assert own.append_marker(log, end(epoch=4, coordinator=1), NOW) is None
    assert log.lookup.latest() == end_offset


# -- deaths ----------------------------------------------------------------------------


def test_killed_anywhere_in_a_marker_its_successor_ends_the_transaction_once(
    open_log: OpenLog, own: OwnAppends
) -> None:
    pair = Pair(open_log, "t-0", index_interval_bytes=100).begun()
    for _ in range(4):
        planned(pair.log)  # by then it has opened its indexes
    total = steps_of(lambda: own.append_marker(pair.log, end(epoch=1), NOW))
    assert total > 5
    seen = set()
    for epoch in range(1, total + 1):
        write(pair.others, epoch=epoch)
        before, marker = pair.others.lookup.latest(), end(epoch=epoch + 1)

        def doomed(step: int = epoch, marker: bytes = marker) -> None:
            kill_at_step(step)
            own.append_marker(pair.log, marker, NOW)
            die()

        assert fork(doomed) == -signal.SIGKILL
        seen.add(pair.others.lookup.latest() - before)
        if own.append_marker(pair.log, marker, NOW) is None:
            # It has found the lock as its dead owner left it.
            pair.log.append(validated(marker), now_ms=NOW)
        assert pair.others.lookup.latest() == before + 1
        assert pair.others.lookup.last_stable_offset() == before + 1
    assert seen == {0, 1}


def test_killed_anywhere_in_an_append_nothing_of_it_is_torn(
    open_log: OpenLog, own: OwnAppends
) -> None:
    log = open_log(index_interval_bytes=100)
    for _ in range(4):
        planned(log)  # by then it has opened its indexes
    records: list[tuple[bytes, bytes | None]] = [(b"key", b"value"), (b"gone", None)]
    total = steps_of(lambda: own.append(log, records, NOW))
    assert total > 5
    for step in range(1, total + 1):
        log.append(
            batch(b"first", timestamp=NOW), now_ms=NOW
        )  # and its plan is right again
        before = log.lookup.latest()

        def doomed(step: int = step) -> None:
            kill_at_step(step)
            own.append(log, records, NOW)
            die()

        assert fork(doomed) == -signal.SIGKILL
        log.row.settle()
        assert log.lookup.latest() - before in (0, 2)
        end_offset = log.lookup.latest()
        assert own.append(log, records, NOW) == end_offset + 2
    for _, data in batches_in(read_bytes(log, 0)):
        found = [(record.key, record.value) for record in iter_records(data)]
        assert found in (records, [(None, b"first")])
