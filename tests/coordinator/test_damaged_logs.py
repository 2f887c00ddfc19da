"""A damaged batch of a coordinator's log hides no other batch."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.client.consumer.consumer import Consumer
from mpbroker.coordinator.coordinator_topic import CoordinatorTopic, LoadedRecord
from mpbroker.coordinator.outbox import TransactionalRecord
from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.metadata.log_config import LogConfig
from mpbroker.metadata.topic_names import OFFSETS_TOPIC
from mpbroker.metadata.topics import NewTopic
from mpbroker.protocol.records.batch_header import iter_batches
from mpbroker.protocol.records.compression import Codec
from mpbroker.storage.log.partition_log import PartitionLog
from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker

COUNT = 12
BASE, LENGTH, MAGIC, CRC, DELTA = (
    (0, ">q"),
    (8, ">i"),
    (16, ">b"),
    (17, ">I"),
    (23, ">i"),
)

# What is damaged, how, and whether what the batch says is known all the same: base
# offset, length and magic are not under its checksum.
DAMAGE: dict[str, tuple[tuple[int, str], Callable[[int], int], bool]] = {
    "base offset too high": (BASE, lambda is_: 1 << 40, True),
    "base offset a little too high": (BASE, lambda is_: is_ + 3, True),
    "base offset negative": (BASE, lambda is_: -1 - is_, True),
    "length negative": (LENGTH, lambda is_: -is_, False),
    "length of no header": (LENGTH, lambda is_: 3, False),
    "length a little too small": (LENGTH, lambda is_: is_ - 4, False),
    "length a little too large": (LENGTH, lambda is_: is_ + 4, False),
    "length of two": (LENGTH, lambda is_: 2 * is_ + 12, False),
    "length beyond the end": (LENGTH, lambda is_: is_ | 1 << 29, False),
    "magic": (MAGIC, lambda is_: 1, False),
    "checksum": (CRC, lambda is_: is_ ^ 1, False),
    "delta too high": (DELTA, lambda is_: is_ + 40, False),
    "delta beyond the end": (DELTA, lambda is_: 1 << 30, False),
    "delta negative": (DELTA, lambda is_: -7, False),
}
PLACES = {"first": 0, "middle": 5, "last": COUNT - 1}


def positions_of(path: Path) -> list[int]:
    """Return where the batches begin; call it before they are damaged."""
    found, at = [], 0
    for _, batch in iter_batches(path.read_bytes()):
        found.append(at)
        at += len(batch)
    return found


def write(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


def damage(path: Path, position: int, what: str) -> None:
    (place, layout), change, _ = DAMAGE[what]
    (is_,) = struct.unpack_from(layout, path.read_bytes(), position + place)
    write(path, position + place, struct.pack(layout, change(is_)))


class Logs:
    """A partition's log, and the topic that it is of."""

    def __init__(self, directory: Path, *, load_bytes: int, **config: int) -> None:
        self.path = directory / f"{0:020d}.log"
        settings = {key.replace("_", "."): value for key, value in config.items()}
        table = PartitionTable.create()
        os.close(table.segment.fd)  # it is mapped
        table.initialise_row(0)
        self.row = table.row(0)
        self.log = PartitionLog(str(directory), self.row, LogConfig(settings))
        self.found = SimpleNamespace(name=OFFSETS_TOPIC, partitions=[0])
        registry: Any = SimpleNamespace(topic=lambda name: self.found)
        self.topic = CoordinatorTopic(
            registry,
            lambda topic, partition: self.log,
            lambda topic, partition: True,
            NewTopic(OFFSETS_TOPIC, 1, {}),
            codec=Codec.NONE,
            load_bytes=load_bytes,
        )

    def append(self, key: bytes, value: bytes = b"v", more: int = 1) -> None:
        """Append a batch, of several records perhaps."""
        self.topic.append(0, [(key, value)] * more, 1)

    def loaded(self) -> list[bytes]:
        return [record.key for record in self.records()]

    def records(self) -> Iterator[LoadedRecord]:
        for records in self.topic.load(0):
            yield from records

    def positions(self) -> list[int]:
        return positions_of(self.path)

    def write(self, position: int, content: bytes) -> None:
        write(self.path, position, content)

    def damage(self, position: int, what: str) -> None:
        damage(self.path, position, what)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Logs]]:
    made = []

    def make(load_bytes: int = 1 << 20, **config: int) -> Logs:
        made.append(Logs(tmp_path, load_bytes=load_bytes, **config))
        return made[-1]

    yield make
    for each in made:
        each.log.close()


def keys(count: int = COUNT) -> list[bytes]:
    return [b"key %d" % n for n in range(count)]


@pytest.mark.parametrize("load_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("interval", [100, 4096])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", DAMAGE)
def test_all_but_the_damaged_batch_is_loaded_also_after_appends_behind_it(
    make: Callable[..., Logs],
    caplog: pytest.LogCaptureFixture,
    what: str,
    place: str,
    interval: int,
    load_bytes: int,
) -> None:
    logs = make(load_bytes, index_interval_bytes=interval)
    for key in keys():
        logs.append(key, more=3)
    number = PLACES[place]
    logs.damage(logs.positions()[number], what)
    expected = [key for key in keys() for _ in range(3)]
    if not DAMAGE[what][2]:
        del expected[3 * number : 3 * number + 3]
    assert logs.loaded() == expected
    first, *more = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert not more
    # Of an offset that is a little too high only the next one can tell.
    named = 3 * number + (6 if what == "base offset a little too high" else 0)
    if place != "last" or named == 3 * number:
        assert f"{OFFSETS_TOPIC}-0 is damaged at offset {named}:" in first
    logs.append(b"new")
    assert logs.loaded() == [*expected, b"new"]


def test_a_batch_inside_a_clients_record_is_not_taken_for_a_batch_of_the_log(
    make: Callable[..., Logs],
) -> None:
    """Otherwise a client could write any records about other groups."""
    logs = make(index_interval_bytes=4096)
    logs.append(b"first")
    logs.append(b"forged")
    data = logs.path.read_bytes()
    forged = bytearray(data[logs.positions()[1] :])
    struct.pack_into(">q", forged, 0, 3)  # as good an offset as any
    logs.append(b"theirs", b"." + bytes(forged) + b"." + bytes(forged))
    logs.append(b"last")
    logs.damage(logs.positions()[2], "length negative")
    assert logs.loaded() == [b"first", b"forged", b"last"]


@pytest.mark.parametrize("numbers", [(4, 6), (4, 5)])
@pytest.mark.parametrize("what", ["length negative", "magic", "checksum"])
def test_whole_batches_around_two_damaged_ones_are_loaded(
    make: Callable[..., Logs], what: str, numbers: tuple[int, int]
) -> None:
    logs = make()
    for key in keys():
        logs.append(key)
    positions = logs.positions()
    for number in numbers:
        logs.damage(positions[number], what)
    assert logs.loaded() == [k for n, k in enumerate(keys()) if n not in numbers]


@pytest.mark.parametrize("interval", [100, 4096])
@pytest.mark.parametrize("filled", [b"\0", b"\xff", b"\2"])
def test_all_that_is_beside_a_lost_page_is_loaded(
    make: Callable[..., Logs],
    caplog: pytest.LogCaptureFixture,
    filled: bytes,
    interval: int,
) -> None:
    logs = make(index_interval_bytes=interval)
    for key in keys(300):
        logs.append(key)
    positions = logs.positions()
    logs.write(4096, filled * 4096)
    first = sum(position <= 4096 for position in positions) - 1
    behind = sum(position < 8192 for position in positions)
    assert 0 < first < behind < 300
    assert logs.loaded() == [*keys(300)[:first], *keys(300)[behind:]]
    assert caplog.text.count("is damaged") == 1


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("what", ["length negative", "length beyond the end", "magic"])
def test_a_damaged_batch_does_not_hide_the_next_segment(
    make: Callable[..., Logs], what: str, place: str
) -> None:
    logs = make(segment_bytes=600, index_interval_bytes=100)
    for key in keys(40):
        logs.append(key)
    assert len(list(logs.path.parent.glob("*.log"))) > 3
    positions = logs.positions()
    number = 0 if place == "first" else len(positions) - 1
    logs.damage(positions[number], what)
    assert logs.loaded() == [key for n, key in enumerate(keys(40)) if n != number]


def test_files_that_change_meanwhile_hide_nothing_and_repeat_nothing(
    make: Callable[..., Logs],
) -> None:
    logs = make(1, segment_bytes=600, index_interval_bytes=100)
    for key in keys(40):
        logs.append(key)
    logs.damage(logs.positions()[3], "length negative")
    loaded = []
    for records in logs.topic.load(0):
        loaded += [record.key for record in records]
        logs.row.structure_version += 2  # as compaction does
    assert loaded == [key for n, key in enumerate(keys(40)) if n != 3]


def test_batches_below_the_log_start_are_not_loaded_and_not_reported_as_damaged(
    make: Callable[..., Logs], caplog: pytest.LogCaptureFixture
) -> None:
    logs = make(index_interval_bytes=4096)
    for key in keys():
        logs.append(key, more=3)
    logs.row.log_start_offset = 10
    loaded = [b"key 3", b"key 3", *(key for key in keys()[4:] for _ in range(3))]
    assert logs.loaded() == loaded
    assert not caplog.records
    logs.damage(logs.positions()[6], "length negative")
    assert logs.loaded() == [key for key in loaded if key != b"key 6"]


def test_holes_that_compaction_has_left_are_no_damage(
    make: Callable[..., Logs], caplog: pytest.LogCaptureFixture
) -> None:
    logs = make(segment_bytes=600)
    for key in keys(40):
        logs.append(key)
    positions = logs.positions()
    data = logs.path.read_bytes()
    holed = data[: positions[2]] + data[positions[4] : positions[6]]
    logs.path.write_bytes(holed)
    assert logs.loaded() == [*keys(2), *keys(6)[4:], *keys(40)[len(positions) :]]
    assert not caplog.records


@pytest.mark.parametrize("what", ["base offset too high", "length negative"])
def test_records_of_transactions_behind_damage_are_loaded(
    make: Callable[..., Logs], what: str
) -> None:
    logs = make()
    logs.append(b"first")
    logs.append(b"damaged")
    logs.topic.append_transactional(0, [TransactionalRecord(7, 0, b"theirs", b"v")], 1)
    logs.append(b"last")
    logs.damage(logs.positions()[1], what)
    loaded = [(record.key, record.producer_id) for record in logs.records()]
    whole = [(b"first", -1), (b"damaged", -1), (b"theirs", 7), (b"last", -1)]
    if not DAMAGE[what][2]:
        del whole[1]
    assert loaded == whole


PARTITIONS = 100


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("length negative", 0),
        ("base offset too high", 20),
        ("delta beyond the end", 20),
    ],
)
def test_committed_offsets_behind_damage_survive_and_those_that_come_then(
    make_broker: Callable[..., Broker], what: str, number: int
) -> None:
    broker = make_broker({"offsets.topic.num.partitions": 1})
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic("t", PARTITIONS)

    def group() -> Consumer:
        return Consumer(bootstrap_servers=broker.bootstrap, group_id="g")

    def committed() -> dict[int, int]:
        with group() as consumer:
            found = ((n, consumer.committed(("t", n))) for n in range(PARTITIONS))
            return {n: offset for n, offset in found if offset is not None}

    with group() as consumer:
        for n in range(PARTITIONS):
            consumer.commit({("t", n): 1000 + n})
    broker.stop()
    path = broker.data_dir / f"{OFFSETS_TOPIC}-0" / f"{0:020d}.log"
    damage(path, positions_of(path)[number], what)
    lost = 0 if DAMAGE[what][2] else 1
    expected = {n: 1000 + n for n in range(PARTITIONS)}
    broker.start()
    found = committed()
    missing = expected.keys() - found.keys()
    assert len(missing) == lost
    for n in missing:
        del expected[n]
    assert found == expected
    assert f"{OFFSETS_TOPIC}-0 is damaged at offset {number}" in broker.log_tail()
    with group() as consumer:
        for n in range(0, PARTITIONS, 3):
            consumer.commit({("t", n): 2000 + n})
            expected[n] = 2000 + n
    broker.stop()
    broker.start()
    assert committed() == expected
