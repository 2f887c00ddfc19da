"""A node's writer and reader in a process of their own, which kills itself.

    python -m tests.cluster.dying_node DATABASE DIRECTORY TOPIC POINT

It writes the batches of ``SENT``, copies them into DIRECTORY/t-0, and dies at a named
point; without one, it ends when all is there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any, Final

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.materialiser import Materialiser, SharedPartition
from mpbroker.cluster.object_writer import ObjectWriter, SharedBatch
from mpbroker.cluster.sequencer import Sequencer
from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.metadata.log_config import LogConfig
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.remote.object_store import ObjectStore
from tests.storage.batches import batch

POINTS: Final = (
    "before the put",
    "behind the put",
    "behind the commit",
    "before the first append",
    "within the first append",
    "behind the first append",
)
SENT: Final = [
    bytes(batch(b"%d" % number, producer=(7, 0, number)).data) for number in range(3)
]
PATIENCE_S: Final = 60.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingStore(ObjectStore):
    """A store whose user dies around a put."""

    point = ""

    async def put_async(self, key: str, content: bytes) -> None:
        if self.point == "before the put":
            die()
        await super().put_async(key, content)
        if self.point == "behind the put":
            die()


class DyingSequencer(Sequencer):
    """A sequencer whose user dies before it hears of the commit."""

    point = ""

    async def commit_object(self, *arguments: Any) -> Any:
        done = await super().commit_object(*arguments)
        if self.point == "behind the commit":
            die()
        return done


class DyingLog(PartitionLog):
    """A log whose writer dies around the first append."""

    point = ""

    def append_at(self, *arguments: Any, **options: Any) -> bool:
        if self.point == "before the first append":
            die()
        appended = super().append_at(*arguments, **options)
        if self.point == "behind the first append":
            die()
        return appended

    def _write(self, *arguments: Any) -> None:
        if self.point == "within the first append":
            write = os.pwrite

            def write_half(fd: int, data: Any, position: int) -> int:
                write(fd, data[: len(data) // 2], position)
                die()
                return 0

            os.pwrite = write_half
        super()._write(*arguments)


async def run(url: str, directory: Path, topic: uuid.UUID, point: str) -> None:
    """Write and copy until all is there; print the offsets that were acknowledged."""
    for each in (DyingStore, DyingSequencer, DyingLog):
        each.point = point
    async with ClusterDatabase(url, connections=2) as database:
        sequencer = DyingSequencer(database)
        store = DyingStore(f"file://{directory}/store", retry_s=1)
        writer = ObjectWriter(sequencer, store, 1)
        log = open_log(directory, DyingLog)
        place = SharedPartition(topic, 0)
        reader = Materialiser(sequencer, store, lambda: {place: log})
        tasks = [asyncio.ensure_future(each.run()) for each in (writer, reader)]
        # Twice in one request, as one extent; and once behind it.
        for some in (SENT[:2], SENT[2:]):
            shared = [SharedBatch(topic, 0, each) for each in some]
            for done in await writer.write("client", shared, PATIENCE_S):
                print(done.base_offset, done.error_code, flush=True)
        while log.row.log_end_offset < len(SENT):
            reader.wake()
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        log.close()


def open_log(directory: Path, kind: type[PartitionLog] = PartitionLog) -> PartitionLog:
    """Open the local log, as a broker that starts does."""
    table = PartitionTable.create()
    table.initialise_row(0)
    (directory / "t-0").mkdir(exist_ok=True)
    return kind(str(directory / "t-0"), table.row(0), LogConfig({}))


if __name__ == "__main__":
    url, directory, topic, *point = sys.argv[1:]
    asyncio.run(run(url, Path(directory), uuid.UUID(topic), "".join(point)))
    # As the broker's processes end: a thread of the store's client that still looks for
    # the interpreter while that goes would end this process by SIGABRT.
    os._exit(0)
