"""The writer of objects, with a real database and a directory as its store."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mpbroker.base.storage_errors import RemoteUnreachableError
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.migrations import create_cluster
from mpbroker.cluster.object_writer import (
    ObjectWriter,
    SharedBatch,
    WriterSettings,
    WrittenBatch,
    object_path,
)
from mpbroker.cluster.sequencer import Extent, Sequencer
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.log_validator import ValidationPolicy, validate_produce
from mpbroker.storage.remote.object_store import ObjectStore
from tests.cluster.conftest import execute
from tests.storage.batches import batch
from tests.support.patience import LONGEST_S

PARTITIONS = 3
NEVER_S = 3600.0
NEVER = WriterSettings(interval_s=NEVER_S)
LATE = ErrorCode.REQUEST_TIMED_OUT


class FaultyStore:
    """A directory whose puts may be held up, or fail.

    Attributes:
        refusals: how many puts fail from now on.
        held: puts wait for this, if it is set.
        puts: what was written, in the order of the beginnings.
    """

    def __init__(self, directory: Path) -> None:
        self.store = ObjectStore(f"file://{directory}", retry_s=1)
        self.directory = directory
        self.refusals = 0
        self.held: asyncio.Event | None = None
        self.puts: list[str] = []

    async def put_async(self, key: str, content: bytes) -> None:
        self.puts.append(key)
        if self.held is not None:
            await self.held.wait()
        if self.refusals:
            self.refusals -= 1
            raise RemoteUnreachableError("the store is away")
        await self.store.put_async(key, content)

    def bytes_of(self, extent: Extent) -> bytes:
        content = (self.directory / object_path(extent.object_key)).read_bytes()
        return content[extent.position : extent.position + extent.size]


class Node:
    """One node's writer and what a test looks at beside it."""

    def __init__(self, url: str, directory: Path, settings: WriterSettings) -> None:
        self.url = url
        self.database = ClusterDatabase(url, connections=2, timeout_s=LONGEST_S)
        self.sequencer = Sequencer(self.database)
        self.store = FaultyStore(directory)
        self.topic = uuid.uuid4()
        self.ahead_s = 0.0
        self.writer = ObjectWriter(
            self.sequencer,
            self.store,
            1,
            settings,
            lambda: time.monotonic() + self.ahead_s,
        )

    def write(
        self,
        connection: object,
        *batches: tuple[int, bytes],
        timeout_s: float = LONGEST_S,
    ) -> asyncio.Task[list[WrittenBatch]]:
        """Begin to write batches, of which each is a partition and bytes."""
        shared = [SharedBatch(self.topic, part, data) for part, data in batches]
        return asyncio.ensure_future(self.writer.write(connection, shared, timeout_s))

    async def execute(self, statement: str, *arguments: object) -> None:
        await asyncio.to_thread(execute, self.url, statement, *arguments)

    async def extents(self, partition: int = 0) -> list[Extent]:
        (found,) = await self.sequencer.find_extents(
            [(self.topic, partition, 0)], max_extents=1000, max_bytes=1 << 30
        )
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the writer go on until something is so."""
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running(
    url: str, directory: Path, settings: WriterSettings
) -> AsyncIterator[Node]:
    node = Node(url, directory, settings)
    await node.sequencer.create_partitions(node.topic, PARTITIONS)
    task = asyncio.ensure_future(node.writer.run())
    try:
        yield node
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        node.database.close()


Test = Callable[[Node], Coroutine[Any, Any, None]]


@pytest.fixture
def run(cluster_url: str, tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs a test with a node."""

    def run_it(test: Test, settings: WriterSettings = WriterSettings()) -> None:  # noqa: B008
        async def main() -> None:
            async with running(cluster_url, tmp_path, settings) as node:
                await test(node)

        asyncio.run(main())

    return run_it


def records(*values: bytes, **options: Any) -> bytes:
    return bytes(batch(*values, **options).data)


def test_batches_get_offsets_and_are_found_in_the_store(run):
    async def test(node: Node) -> None:
        sent = [(1, records(b"a", b"b")), (0, records(b"c")), (1, records(b"d"))]
        answers = await node.write("client", *sent)
        assert answers == [
            WrittenBatch(0, 0, -1),
            WrittenBatch(0, 0, -1),
            WrittenBatch(2, 0, -1),
        ]
        (one,) = await node.extents(1)
        assert (one.base_offset, one.last_offset) == (0, 2)
        assert node.store.bytes_of(one) == sent[0][1] + sent[2][1]
        (other,) = await node.extents(0)
        assert node.store.bytes_of(other) == sent[1][1]
        assert node.writer.held_bytes == 0

    run(test)


def test_a_lone_client_never_waits_for_the_interval(run):
    async def test(node: Node) -> None:
        for number in range(3):
            (answer,) = await node.write("alone", (0, records(b"x")))
            assert answer.base_offset == number
        assert len(await node.extents()) == 3

    run(test, NEVER)


def test_clients_that_take_turns_come_to_share_objects(run):
    async def test(node: Node) -> None:
        node.store.held = asyncio.Event()
        first = node.write("a", (0, records(b"1")))
        await node.until(lambda: len(node.store.puts) == 1)
        # While one object is under way, others gather for the next one.
        others = [node.write(each, (0, records(b"2"))) for each in "bc"]
        await asyncio.sleep(0)
        node.store.held.set()
        await first
        # It has just been answered, and may be here again at once: wait for it.
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(node.store.puts) == 1
        again = node.write("a", (0, records(b"3")))
        await asyncio.gather(again, *others)
        keys = [each.object_key for each in await node.extents()]
        assert len(keys) == len(node.store.puts) == 2

    run(test, NEVER)


def test_a_client_that_has_left_is_waited_for_an_interval(run):
    async def test(node: Node) -> None:
        await node.write("left", (0, records(b"1")))
        waiting = node.write("here", (0, records(b"2")))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(node.store.puts) == 1
        node.ahead_s += NEVER_S
        # What makes the writer look at the clock again.
        late = node.write("other", (0, records(b"3")))
        await asyncio.gather(waiting, late)

    run(test, NEVER)


def test_a_full_buffer_does_not_wait_for_the_interval(run):
    async def test(node: Node) -> None:
        await node.write("left", (0, records(b"1")))
        await node.write("here", (0, records(bytes(1000))))
        assert len(await node.extents()) == 2

    run(test, NEVER._replace(object_bytes=1000))


def test_a_retry_is_answered_with_its_first_offset_and_a_gap_is_refused(run):
    async def test(node: Node) -> None:
        sent = records(b"a", b"b", producer=(7, 0, 0))
        assert (await node.write("x", (0, sent)))[0].base_offset == 0
        assert (await node.write("x", (0, sent)))[0] == WrittenBatch(0, 0, -1)
        wrong = records(b"c", producer=(7, 0, 9))
        next_one = records(b"c", producer=(7, 0, 2))
        answers = await node.write("x", (0, wrong), (0, next_one), (9, next_one))
        assert [each.error_code for each in answers] == [
            ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
            ErrorCode.NONE,
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ]
        assert [each.base_offset for each in answers] == [-1, 2, -1]

    run(test)


def test_a_topic_whose_time_is_the_broker_s_is_answered_with_the_commit_s(run):
    async def test(node: Node) -> None:
        policy = ValidationPolicy(timestamp_type="LogAppendTime")
        stamped = bytes(validate_produce(records(b"a"), policy, 5).data)
        (answer,) = await node.write("x", (0, stamped))
        (extent,) = await node.extents()
        assert answer.log_append_time_ms == extent.max_timestamp == extent.committed_ms
        assert extent.committed_ms > 10**12

    run(test)


def test_objects_are_committed_in_the_order_of_their_rotation(run):
    async def test(node: Node) -> None:
        gates = [asyncio.Event() for _ in range(3)]
        put = node.store.put_async

        begun: list[str] = []

        async def gated(key: str, content: bytes) -> None:
            gate = gates[len(begun)]
            begun.append(key)
            await gate.wait()
            await put(key, content)

        node.store.put_async = gated  # type: ignore[method-assign]
        tasks = []
        for number in range(3):
            value = records(b"%d" % number, producer=(7, 0, number))
            tasks.append(node.write("x", (0, value)))
            await node.until(lambda: len(begun) == len(tasks))
        for gate in reversed(gates):
            gate.set()
        answers = [(await task)[0] for task in tasks]
        assert answers == [WrittenBatch(number, 0, -1) for number in range(3)]

    run(test, WriterSettings(interval_s=0))


def test_a_store_that_fails_for_a_while_only_delays(run):
    async def test(node: Node) -> None:
        node.store.refusals = 2
        (answer,) = await node.write("x", (0, records(b"a")))
        assert answer.base_offset == 0
        assert len(node.store.puts) == 3 and len(set(node.store.puts)) == 1

    run(test)


def test_a_request_does_not_wait_longer_than_it_wants_and_leaves_nothing(run):
    async def test(node: Node) -> None:
        node.store.held = asyncio.Event()
        with pytest.raises(ApiError, match=r"longer than 0.2 s") as late:
            await node.write("x", (0, records(b"a")), timeout_s=0.2)
        assert late.value.error_code == LATE
        await node.until(lambda: node.writer.held_bytes == 0)
        node.store.held.set()
        # What nobody waits for is not committed any more.
        (answer,) = await node.write("x", (0, records(b"b")))
        assert answer.base_offset == 0

    run(test)


def test_memory_is_bounded_while_the_store_is_away(run):
    async def test(node: Node) -> None:
        node.store.held = asyncio.Event()
        large = records(bytes(600))
        first = node.write("a", (0, large))
        second = node.write("b", (0, large), timeout_s=0.2)
        with pytest.raises(ApiError):
            await second
        assert node.writer.held_bytes == len(large)
        third = node.write("c", (0, large))
        node.store.held.set()
        assert [(await each)[0].base_offset for each in (first, third)] == [0, 1]

    run(test, WriterSettings(held_bytes=1000))


def test_a_request_above_the_bound_is_let_in_alone(run):
    async def test(node: Node) -> None:
        (answer,) = await node.write("a", (0, records(bytes(2000))))
        assert answer.base_offset == 0

    run(test, WriterSettings(held_bytes=1000, object_bytes=10))


def test_an_object_that_was_given_up_is_written_again_under_a_new_key(run):
    async def test(node: Node) -> None:
        node.store.held = asyncio.Event()
        written = node.write("a", (0, records(b"a")))
        await node.until(lambda: bool(node.store.puts))
        give_up = "UPDATE mpbroker.object SET state = 'd' WHERE key::text = $1"
        key = node.store.puts[0].split("/")[1]
        await node.execute(give_up, key)
        node.store.held.set()
        assert (await written)[0].base_offset == 0
        (extent,) = await node.extents()
        assert str(extent.object_key) != key

    run(test)


def test_keys_that_the_collector_may_soon_give_up_are_not_used(run):
    async def test(node: Node) -> None:
        await node.write("a", (0, records(b"a")))
        await node.execute("UPDATE mpbroker.object SET state = 'd' WHERE state = 'p'")
        node.ahead_s += 301
        await node.write("a", (0, records(b"a")))
        assert len(node.store.puts) == 2

    run(test)


def test_what_an_operator_has_to_repair_is_answered_at_once(run):
    async def test(node: Node) -> None:
        await node.write("a", (0, records(b"a")))
        await node.execute("ALTER TABLE mpbroker.extent RENAME TO lost")
        with pytest.raises(ApiError, match="mpbroker cluster") as refused:
            await node.write("a", (0, records(b"b")))
        assert refused.value.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        await node.execute("ALTER TABLE mpbroker.lost RENAME TO extent")
        assert (await node.write("a", (0, records(b"b"))))[0].base_offset == 1

    run(test)


def test_an_object_that_the_database_refuses_does_not_end_the_writer(run):
    async def test(node: Node) -> None:
        await node.execute(
            "ALTER TABLE mpbroker.extent ADD CONSTRAINT small CHECK (bytes < 500)"
        )
        with pytest.raises(ApiError, match="small") as refused:
            await node.write("a", (0, records(bytes(500))))
        assert refused.value.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert (await node.write("a", (0, records(b"b"))))[0].base_offset == 0

    run(test)


def test_producers_go_on_over_a_restart_of_the_database(own_server, tmp_path):
    url = own_server.url("postgres")

    async def main() -> None:
        async with ClusterDatabase(url) as database:
            await create_cluster(database, "here", "s3://bucket")
        async with running(url, tmp_path, WriterSettings()) as node:
            await node.write("x", (0, records(b"0", producer=(7, 0, 0))))
            own_server.kill()
            waiting = node.write("x", (0, records(b"1", producer=(7, 0, 1))))
            other = records(b"2", producer=(8, 0, 0))
            with pytest.raises(ApiError) as late:
                await node.write("y", (0, other), timeout_s=0.2)
            assert late.value.error_code == LATE
            own_server.start()
            # A request that was told so may be committed beside one that still waits.
            # Sent again, it is there once.
            answers = [*await waiting, *await node.write("y", (0, other))]
            assert sorted(answers) == [WrittenBatch(1, 0, -1), WrittenBatch(2, 0, -1)]
            (ends,) = await node.sequencer.ends([(node.topic, 0)])
            assert ends.high_watermark == 3

    asyncio.run(main())
