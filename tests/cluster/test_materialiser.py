"""Local logs that are made from a cluster's database and its store."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpbroker.cluster import materialiser
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.materialiser import (
    Materialiser,
    MaterialiserSettings,
    SharedPartition,
)
from mpbroker.cluster.object_writer import object_path
from mpbroker.cluster.sequencer import ObjectBatch, Sequencer
from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.metadata.log_config import LogConfig
from mpbroker.protocol.records.batch_header import (
    ATTRIBUTES_POSITION,
    parse_batch_header,
)
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.protocol.records.log_validator import ValidationPolicy, validate_produce
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.remote.object_store import ObjectStore
from tests.storage.batches import batch, read_all, read_bytes

PARTITIONS = 3


class Site:
    """A database, a store, and the local logs of one node."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.database = ClusterDatabase(url)
        self.sequencer = Sequencer(self.database)
        self.topic = uuid.uuid4()
        self.logs: dict[SharedPartition, PartitionLog] = {}
        self.grown: list[PartitionLog] = []
        self.table = PartitionTable.create()
        self.rows = 0
        (directory / "store").mkdir()
        self.store = ObjectStore(f"file://{directory}/store", retry_s=1)
        self.begin()

    def begin(self, **settings: Any) -> None:
        """Begin anew, as a reader's successor does."""
        self.materialiser = Materialiser(
            self.sequencer,
            self.store,
            lambda: self.logs,
            self.grown.append,
            MaterialiserSettings(**settings),
        )

    def open_log(self, number: int = 0, log_start: int = 0) -> PartitionLog:
        """Open a local log, as a broker that starts does."""
        directory = self.directory / f"t-{number}"
        directory.mkdir(exist_ok=True)
        self.table.initialise_row(self.rows)
        row = self.table.row(self.rows)
        self.rows += 1
        hints = LoadHints(log_start_offset=log_start)
        log = PartitionLog(str(directory), row, LogConfig({}), hints)
        self.logs[SharedPartition(self.topic, number)] = log
        return log

    async def commit(self, *batches: tuple[int, bytes]) -> uuid.UUID:
        """Write an object as a node does; return its key."""
        (key,) = await self.sequencer.register_objects(1, 1)
        await self.store.put_async(object_path(key), b"".join(b for _, b in batches))
        rows, position = [], 0
        for part, data in batches:
            header = parse_batch_header(data)
            stamp = -1 if header.timestamp_type else header.max_timestamp
            rows.append(
                ObjectBatch(
                    self.topic,
                    part,
                    header.last_offset_delta + 1,
                    position,
                    len(data),
                    stamp,
                    header.producer_id,
                    header.producer_epoch,
                    header.base_sequence,
                )
            )
            position += len(data)
        await self.sequencer.commit_object(key, position, rows)
        return key

    def path(self, key: uuid.UUID) -> Path:
        return self.directory / "store" / object_path(key)


Test = Callable[[Site], Coroutine[Any, Any, None]]


@pytest.fixture
def run(cluster_url: str, tmp_path: Path) -> Iterator[Callable[[Test], None]]:
    sites = []

    def run_it(test: Test) -> None:
        async def main() -> None:
            site = Site(cluster_url, tmp_path)
            sites.append(site)
            await site.sequencer.create_partitions(site.topic, PARTITIONS)
            async with site.database:
                await test(site)

        asyncio.run(main())

    yield run_it
    for site in sites:
        for log in site.logs.values():
            log.close()


def records(*values: bytes, **options: Any) -> bytes:
    return bytes(batch(*values, **options).data)


def test_logs_get_the_same_records_at_the_same_offsets(run):
    async def test(site: Site) -> None:
        await site.commit((0, records(b"a", b"b")), (1, records(b"c")))
        await site.commit((0, records(b"d", producer=(7, 0, 0))))
        logs = [site.open_log(number) for number in range(2)]
        assert await site.materialiser.catch_up() == 3
        assert await site.materialiser.catch_up() == 0
        assert read_all(logs[0]) == [(0, b"a"), (1, b"b"), (2, b"d")]
        assert read_all(logs[1]) == [(0, b"c")]
        assert logs[0].producers.at(logs[0].view.state()).entries[7].epoch == 0
        assert set(site.grown) == set(logs)

    run(test)


def test_what_the_database_has_judged_is_not_judged_again(run):
    async def test(site: Site) -> None:
        log = site.open_log()
        await site.commit((0, records(b"a", producer=(7, 0, 0))))
        await site.materialiser.catch_up()
        # The database has forgotten the producer, and so takes any sequence.
        await site.database.rows("DELETE FROM mpbroker.producer")
        await site.commit((0, records(b"b", producer=(7, 0, 9))))
        assert await site.materialiser.catch_up() == 1
        assert read_all(log) == [(0, b"a"), (1, b"b")]

    run(test)


def test_a_log_goes_on_within_an_extent(run):
    async def test(site: Site) -> None:
        first, second = records(b"a"), records(b"b")
        await site.commit((0, first), (0, second))
        log = site.open_log()
        log.append_at(batch(b"a"), 0, now_ms=0)
        assert await site.materialiser.catch_up() == 1
        assert read_all(log) == [(0, b"a"), (1, b"b")]

    run(test)


def test_a_log_is_made_anew_and_begins_where_the_records_begin(run):
    async def test(site: Site) -> None:
        for value in (b"a", b"b", b"c"):
            await site.commit((0, records(value)))
        await site.sequencer.delete_records(site.topic, 0, 2)
        await site.sequencer.trim_extents(site.topic, 0)
        log = site.open_log()
        await site.materialiser.catch_up()
        await site.materialiser.catch_up()
        assert log.row.log_end_offset == 3
        site.begin()
        await site.materialiser.catch_up()
        assert read_all(log) == [(2, b"c")]
        # And again, in a directory that is empty.
        log.close()
        shutil.rmtree(log.directory)
        again = site.open_log(log_start=2)
        await site.materialiser.catch_up()
        assert read_all(again) == [(2, b"c")]
        assert (Path(again.directory) / f"{2:020}.log").exists()

    run(test)


def test_a_topic_whose_time_is_the_broker_s_has_the_time_of_the_commit(run):
    async def test(site: Site) -> None:
        policy = ValidationPolicy(timestamp_type="LogAppendTime")
        stamped = bytes(validate_produce(records(b"a"), policy, 5).data)
        await site.commit((0, stamped))
        log = site.open_log()
        await site.materialiser.catch_up()
        ((extent,),) = await site.sequencer.find_extents(
            [(site.topic, 0, 0)], max_extents=1, max_bytes=1
        )
        content = read_bytes(log, 0)
        header = parse_batch_header(content)
        assert header.max_timestamp == extent.committed_ms > 10**12
        assert header.crc == crc32c(content[ATTRIBUTES_POSITION:])
        assert log.view.state().max_timestamp == extent.committed_ms

    run(test)


@pytest.mark.parametrize("fault", ["missing", "short", "wrong", "other"])
def test_wrong_bytes_stop_one_partition_until_they_are_repaired(run, fault):
    async def test(site: Site) -> None:
        key = await site.commit((0, records(b"a")), (0, records(b"b")))
        await site.commit((1, records(b"c")))
        logs = [site.open_log(number) for number in range(2)]
        path = site.path(key)
        content = path.read_bytes()
        match fault:
            case "missing":
                path.unlink()
            case "short":
                path.write_bytes(content[:-1])
            case "wrong":
                path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            case "other":
                # One whole batch instead of two, with a right checksum.
                path.write_bytes(
                    next(
                        other
                        for size in range(len(content))
                        if len(other := records(bytes(size))) == len(content)
                    )
                )
        assert await site.materialiser.catch_up() == 1
        assert read_all(logs[0]) == []
        assert read_all(logs[1]) == [(0, b"c")]
        path.write_bytes(content)
        site.begin()
        assert await site.materialiser.catch_up() == 1
        assert read_all(logs[0]) == [(0, b"a"), (1, b"b")]

    run(test)


def test_a_log_of_another_database_is_left_alone(run):
    async def test(site: Site) -> None:
        log = site.open_log()
        log.append_at(batch(b"a", b"b"), 0, now_ms=0)
        await site.commit((0, records(b"x")))
        await site.commit((1, records(b"y")))
        other = site.open_log(1)
        assert await site.materialiser.catch_up() == 1
        assert read_all(log) == [(0, b"a"), (1, b"b")]
        assert read_all(other) == [(0, b"y")]

    run(test)


def test_a_round_is_bounded_and_serves_every_partition(run):
    async def test(site: Site) -> None:
        for _ in range(3):
            await site.commit(
                *((number, records(bytes(1000))) for number in range(PARTITIONS))
            )
        logs = [site.open_log(number) for number in range(PARTITIONS)]
        site.begin(round_bytes=3500)
        assert await site.materialiser.catch_up() == PARTITIONS
        assert [log.row.log_end_offset for log in logs] == [1, 1, 1]
        site.begin(round_bytes=1)  # one at least, and each in its turn
        for _ in range(PARTITIONS):
            assert await site.materialiser.catch_up() == 1
        assert [log.row.log_end_offset for log in logs] == [2, 2, 2]

    run(test)


def test_new_records_are_looked_for_until_the_end(run):
    async def test(site: Site) -> None:
        log = site.open_log()
        grown = asyncio.Event()
        site.materialiser = Materialiser(
            site.sequencer,
            site.store,
            lambda: site.logs,
            lambda _: grown.set(),
            MaterialiserSettings(poll_s=3600),
        )
        task = asyncio.ensure_future(site.materialiser.run())
        for number in range(3):
            await site.commit((0, records(b"%d" % number)))
            grown.clear()
            while log.row.log_end_offset <= number:
                site.materialiser.wake()
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert read_all(log) == [(0, b"0"), (1, b"1"), (2, b"2")]

    run(test)


def test_a_start_is_followed_in_the_next_look(run):
    async def test(site: Site) -> None:
        logs = [site.open_log(number) for number in range(2)]
        await site.commit((0, records(b"a")), (0, records(b"b")), (1, records(b"c")))
        assert await site.materialiser.catch_up() == 2
        site.grown.clear()
        await site.sequencer.delete_records(site.topic, 0, 1)
        assert await site.materialiser.catch_up() == 0
        assert [log.row.log_start_offset for log in logs] == [1, 0]
        assert site.grown == logs[:1]  # who waits for it is told
        # What is not there yet is taken first. Its start follows.
        await site.commit((0, records(b"d", b"e")))
        await site.sequencer.delete_records(site.topic, 0, -1)
        assert await site.materialiser.catch_up() == 1
        await site.materialiser.catch_up()
        assert logs[0].row.log_start_offset == logs[0].row.log_end_offset == 4
        await site.commit((0, records(b"f")))
        await site.materialiser.catch_up()
        assert read_all(logs[0]) == [(4, b"f")]

    run(test)


def test_a_start_behind_records_that_are_gone_is_reached(run):
    async def test(site: Site) -> None:
        log = site.open_log()
        for value in (b"a", b"b", b"c", b"d"):
            await site.commit((0, records(value)))
            if value == b"a":
                await site.materialiser.catch_up()
        await site.sequencer.delete_records(site.topic, 0, 3)
        await site.sequencer.trim_extents(site.topic, 0)
        while await site.materialiser.catch_up():
            pass
        await site.materialiser.catch_up()
        assert log.row.log_start_offset == 3
        assert read_all(log) == [(3, b"d")]

    run(test)


def test_it_says_when_nothing_is_lacking(run):
    async def test(site: Site) -> None:
        told: list[int] = []

        def begin(**settings: Any) -> None:
            site.materialiser = Materialiser(
                site.sequencer,
                site.store,
                lambda: site.logs,
                settings=MaterialiserSettings(**settings),
                caught_up=told.append,
            )

        begin()
        for number in range(2):
            site.open_log(number)
        keys = [await site.commit((0, records(b"%d" % number))) for number in range(2)]
        before = time.monotonic_ns()
        assert await site.materialiser.catch_up() == 2
        assert before < told.pop() < time.monotonic_ns()
        await site.materialiser.catch_up()
        assert len(told) == 1
        told.clear()
        # Limits cut what was found, or what was asked for.
        for _ in range(2):
            keys.append(await site.commit((0, records(bytes(1000)))))
        begin(partition_bytes=1)
        assert await site.materialiser.catch_up() == 1
        begin(round_bytes=1)
        assert await site.materialiser.catch_up() == 1
        assert not told or told == [min(told)]
        told.clear()
        # The bytes are not there.
        site.path(await site.commit((0, records(b"x")), (1, records(b"y")))).unlink()
        begin()
        assert await site.materialiser.catch_up() == 0
        await site.materialiser.catch_up()  # both are left alone for a moment
        assert not told

    run(test)


class AskedSequencer(Sequencer):
    """A sequencer that notes which partitions each look is about."""

    def __init__(self, database: ClusterDatabase) -> None:
        super().__init__(database)
        self.looks: list[set[int]] = []

    async def look(self, places: Any, **limits: Any) -> Any:
        self.looks.append({place[1] for place in places})
        return await super().look(places, **limits)


def test_many_partitions_are_asked_for_part_by_part(run, monkeypatch):
    async def test(site: Site) -> None:
        told: list[int] = []
        asked = AskedSequencer(site.database)
        monkeypatch.setattr(materialiser, "_PLACES_AT_ONCE", 2)
        reader = Materialiser(
            asked, site.store, lambda: site.logs, caught_up=told.append
        )
        logs = [site.open_log(number) for number in range(PARTITIONS)]
        await site.commit(*((number, records(b"a")) for number in range(PARTITIONS)))
        assert await reader.catch_up() == PARTITIONS
        assert [len(places) for places in asked.looks] == [2, 1]
        assert set.union(*asked.looks) == set(range(PARTITIONS))
        assert [read_all(log) for log in logs] == [[(0, b"a")]] * PARTITIONS
        assert len(told) == 1

    run(test)


def test_where_records_are_waited_for_is_looked_at_alone(run):
    async def test(site: Site) -> None:
        asked = AskedSequencer(site.database)
        reader = Materialiser(
            asked,
            site.store,
            lambda: site.logs,
            settings=MaterialiserSettings(poll_s=3600),
        )
        logs = [site.open_log(number) for number in range(PARTITIONS)]
        task = asyncio.ensure_future(reader.run())
        await site.commit((0, records(b"a")))
        while not logs[0].row.log_end_offset:
            reader.wake()
            await asyncio.sleep(0.001)
        asked.looks.clear()
        await site.commit((1, records(b"b")), (2, records(b"c")))
        while not logs[1].row.log_end_offset:
            reader.wake([SharedPartition(site.topic, 1)])
            await asyncio.sleep(0.001)
        # A look at all may have been asked for before; it saw nothing then, or all.
        if set(range(PARTITIONS)) not in asked.looks:
            assert all(places == {1} for places in asked.looks)
            assert logs[2].row.log_end_offset == 0
        while not logs[2].row.log_end_offset:
            reader.wake()
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        reader.wake([SharedPartition(site.topic, 1), SharedPartition(site.topic, 9)])
        asked.looks.clear()
        await site.commit((2, records(b"d")))
        assert await reader.catch_up(only_urgent=True) == 0
        assert asked.looks == [{1}]

    run(test)


def test_offsets_that_a_server_has_given_again_are_not_copied(run):
    async def test(site: Site) -> None:
        logs = [site.open_log(number) for number in range(2)]
        await site.commit((0, records(b"a")), (1, records(b"x")))
        while await site.materialiser.catch_up() or not logs[0].row.log_end_offset:
            pass
        await site.commit((0, records(b"b")))
        while logs[0].row.log_end_offset < 2:
            await site.materialiser.catch_up()
        # Another server goes on, which has not heard of "b".
        site.database.close()
        await site.database.rows("DELETE FROM mpbroker.extent WHERE base_offset = 1")
        await site.database.rows(
            "UPDATE mpbroker.partition_head SET high_watermark = 1 WHERE part = 0"
        )
        await site.commit((0, records(b"B")), (1, records(b"y")))
        await site.commit((0, records(b"c")))
        while logs[1].row.log_end_offset < 2:
            await site.materialiser.catch_up()
        await site.materialiser.catch_up()
        assert read_all(logs[0]) == [(0, b"a"), (1, b"b")]
        assert read_all(logs[1]) == [(0, b"x"), (1, b"y")]

    run(test)
