"""The order of one connection's requests at the writer, whoever sends them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mpbroker.cluster.object_writer import SharedBatch, WrittenBatch
from mpbroker.cluster.produce_link import LinkedBatch, LinkedProduce, ProduceLink
from mpbroker.cluster.produce_server import ProduceServer
from tests.support.patience import PATIENCE_S

TOPIC = uuid.uuid4()
Key = tuple[int, int]


class HeldWriter:
    """Takes batches into its buffer, and writes them when it is told to."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.full = asyncio.Event()
        self.full.set()  # it is not
        self.commit = asyncio.Event()

    async def write(
        self,
        connection: int,
        batches: list[SharedBatch],
        timeout_s: float,
        committing: object,
        entered: Callable[[], None],
    ) -> list[WrittenBatch]:
        await self.full.wait()
        self.taken += [bytes(batch.data) for batch in batches]
        entered()
        await self.commit.wait()
        return [WrittenBatch(len(self.taken), 0, -1) for _ in batches]

    async def recall(self, *_: object) -> None:
        raise AssertionError("nothing was about to be committed")


class Topics:
    async def ready(self, topic_id: uuid.UUID) -> None: ...

    async def visible(self, ends: Mapping[Any, int]) -> None: ...

    async def up_to_date(self, places: Sequence[Any], timeout_s: float) -> list[bool]:
        return [True for _ in places]


class Site:
    """A writer and two handlers, which look whenever the writer sends a notice."""

    def __init__(self, directory: Path) -> None:
        self.writer = HeldWriter()
        self.waiting: set[Key] = set()  # requests that are not answered
        self.told: list[bytes] = []  # the requests behind which others may be sent
        self.links = [ProduceLink(str(directory), number) for number in range(2)]
        self.server = ProduceServer(
            str(directory),
            self.writer,
            Topics(),
            None,  # type: ignore[arg-type]  # nothing is deleted
            lambda handler, row: None,
            lambda slot, generation: (slot, generation) in self.waiting,
        )

    def submit(self, handler: int, key: Key, data: bytes, before: Key | None) -> Any:
        self.waiting.add(key)
        produce = LinkedProduce(
            key,
            [LinkedBatch(TOPIC.bytes, 0, 1, data)],
            connection=1,
            row=0,
            timeout_ms=PATIENCE_S * 1000,
            has_ids=True,
            before=before,
            taken=lambda: self.told.append(data),
        )
        self.links[handler].submit(produce)
        return produce

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.001)
                for link in self.links:
                    link.look()


@pytest.fixture
def run(tmp_path):
    def run(body: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
        @asynccontextmanager
        async def running():
            site = Site(tmp_path)
            listening = asyncio.Event()
            server = asyncio.create_task(site.server.run(listening.set))
            await listening.wait()
            yield site
            for link in site.links:
                link._drop()
            server.cancel()
            with suppress(asyncio.CancelledError):
                await server

        async def main() -> None:
            async with running() as site:
                await body(site)

        asyncio.run(main())

    return run


def test_a_request_is_taken_when_it_is_in_the_buffer_and_before_its_answer(run):
    async def body(site: Site) -> None:
        site.writer.full.clear()
        first = site.submit(0, (1, 7), b"first", None)
        for _ in range(20):
            await asyncio.sleep(0)
            site.links[0].look()
        assert not site.told
        site.writer.full.set()
        await site.until(lambda: site.told == [b"first"])
        assert not first.is_answered
        second = site.submit(1, (2, 9), b"second", (1, 7))
        await site.until(lambda: site.told == [b"first", b"second"])
        site.writer.commit.set()
        await site.until(lambda: first.is_answered and second.is_answered)

    run(body)


def test_the_next_writer_waits_for_the_request_before(run):
    async def body(site: Site) -> None:
        site.waiting.add((1, 7))  # another handler has it, and sends it later
        site.submit(1, (2, 9), b"second", (1, 7))
        site.submit(1, (3, 2), b"third", (2, 9))
        other = site.submit(0, (5, 1), b"of another connection", None)
        await site.until(lambda: site.told == [b"of another connection"])
        site.submit(0, (1, 7), b"first", None)
        await site.until(lambda: len(site.told) == 4)
        assert site.writer.taken[1:] == [b"first", b"second", b"third"]
        site.writer.commit.set()
        await site.until(lambda: other.is_answered)

    run(body)


def test_a_request_before_that_has_its_answer_is_not_waited_for(run):
    async def body(site: Site) -> None:
        site.waiting.add((1, 7))
        second = site.submit(1, (2, 9), b"second", (1, 7))
        site.writer.commit.set()
        for _ in range(20):
            await asyncio.sleep(0)
            site.links[1].look()
        assert not second.is_answered
        site.waiting.remove((1, 7))
        await site.until(lambda: second.is_answered)

    run(body)


def test_the_next_handler_is_told_that_a_request_is_taken(run):
    async def body(site: Site) -> None:
        site.submit(0, (1, 7), b"first", None)
        await site.until(lambda: site.told)
        site.submit(1, (1, 7), b"first", None)
        await site.until(lambda: site.told == [b"first", b"first"])
        assert site.writer.taken == [b"first"]
        site.writer.commit.set()

    run(body)
