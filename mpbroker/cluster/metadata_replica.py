"""Keep a node's copy of the cluster's metadata, and commit changes of it.

All other processes of the node read the copy. They ask for changes through a socket,
see mpbroker/metadata/cluster_metadata_log.py. A change is committed in the database
first, and then copied from there, like the changes of all other nodes. So all copies
have the database's order. If this process is killed in between, the next process copies
the change.

The database is asked for new records twice a second. Changes are rare: most queries
only look into an index.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.cluster.errors import ClusterError, DatabaseUnavailableError
from mpbroker.cluster.shared_metadata_log import SharedMetadataLog
from mpbroker.metadata.cluster_metadata_log import (
    DONE,
    LENGTH_BYTES,
    MOVED,
    REFUSED,
    short_path,
)
from mpbroker.metadata.kraft_records import UnknownRecordError, decode_record
from mpbroker.metadata.topics import TopicRegistry
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.record_batch import iter_records, parse_batch_header

FOLLOW_EVERY_S: Final = 0.5
# A process that may send a change does so within this time, or loses its turn.
_DECIDE_S: Final = 5.0
# Clients are not told where the database is.
_NO_ANSWER: Final = "the cluster's database gives no answer; try again"
_LOG = get_logger(__name__)


class MetadataReplica:
    """Keeps a node's copy of the cluster's metadata up to date, and commits changes.

    Args:
        log: the cluster's metadata log. Its time limit is the longest time for which a
            change waits, while other changes of this node wait for their turn.
        registry: writes the copy; see ProcessParts.copy_registry().
        path: the path of the socket.
    """

    def __init__(
        self, log: SharedMetadataLog, registry: TopicRegistry, path: str
    ) -> None:
        self._log = log
        self._registry = registry
        self._path = path
        self._copying = asyncio.Lock()
        self._turn = asyncio.Lock()
        # Whether the last call to the database had no answer. If so, changes are
        # refused at once, until the database answers again.
        self._is_away = False
        self._is_checked = False

    async def run(self) -> None:
        """Follow the cluster's metadata and serve changes, until this is cancelled.

        Raises:
            ClusterError: the database refuses, or has records of a newer version.
        """
        with _listening(self._path) as sock:
            server = await asyncio.start_unix_server(self._serve, sock=sock)
            try:
                await self._follow()
            finally:
                server.close()

    async def _follow(self) -> None:
        while True:
            try:
                await self._copy()
                self._is_away = False
            except DatabaseUnavailableError as error:
                self._note_away(error)
            except ApiError as error:  # this node's disk
                _LOG.error("the cluster's metadata cannot be copied: %s", error)
            await asyncio.sleep(FOLLOW_EVERY_S)

    async def _copy(self) -> None:
        """Append to this node's copy the new records of the cluster's metadata log.

        Raises:
            ClusterError: the database does not answer, or refuses.
            ApiError: KAFKA_STORAGE_ERROR: the copy cannot be written.
        """
        async with self._copying:
            self._registry.catch_up()
            offset = self._registry.metadata_end().offset
            if not self._is_checked:
                await self._log.check_reaches(offset)
                self._is_checked = True
            values = await self._log.read(offset)
            if not values:
                return
            try:
                records = [decode_record(value) for value in values]
            except UnknownRecordError as error:
                raise ClusterError(
                    f"another node has changed the metadata with a newer mpbroker:"
                    f" {error}; upgrade this one, too"
                ) from None
            self._registry.copy_records(offset, records)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Let a process of this node change the metadata until it disconnects.

        Other processes wait until then. A process that sends nothing for 5 s is
        disconnected.
        """
        try:
            async with self._turn:
                await _say(writer, *await self._answer(None))
                while True:
                    async with asyncio.timeout(_DECIDE_S):
                        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
                        batch = await reader.readexactly(length)
                    await _say(writer, *await self._answer(batch))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the process has disconnected, or has lost its turn
        finally:
            writer.close()

    async def _answer(self, batch: bytes | None) -> tuple[int, str]:
        """Commit a change, if there is one, and update this node's copy of the log.

        Return the answer for the process that sent it: a code, and a text for an error.
        """
        if self._is_away:
            return REFUSED, _NO_ANSWER
        try:
            if batch is not None and not await self._commit(batch):
                return MOVED, ""
            await self._copy()
        except DatabaseUnavailableError as error:
            self._note_away(error)
            return REFUSED, _NO_ANSWER
        except ClusterError as error:
            _LOG.error("the cluster's metadata cannot be changed: %s", error)
            return REFUSED, "the cluster's database refuses; the broker's log says why"
        except ApiError as error:
            return REFUSED, str(error)
        return DONE, ""

    def _note_away(self, error: DatabaseUnavailableError) -> None:
        if not self._is_away:
            _LOG.warning("the cluster's metadata cannot be changed: %s", error)
        self._is_away = True

    async def _commit(self, batch: bytes) -> bool:
        values = [each.value or b"" for each in iter_records(memoryview(batch))]
        return await self._log.append(parse_batch_header(batch).base_offset, values)


async def _say(writer: asyncio.StreamWriter, kind: int, text: str) -> None:
    answer = bytes([kind]) + text.encode()
    writer.write(len(answer).to_bytes(LENGTH_BYTES) + answer)
    await writer.drain()


@contextmanager
def _listening(path: str) -> Iterator[socket.socket]:
    """Yield a listening socket at a path; only this user's processes can connect."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        before = os.umask(0o177)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)  # of a process that was killed
            with short_path(path) as short:
                sock.bind(short)
        finally:
            os.umask(before)
        sock.listen()
        own = os.stat(path).st_ino
        try:
            yield sock
        finally:
            with suppress(FileNotFoundError):
                if os.stat(path).st_ino == own:  # not a successor's
                    os.unlink(path)
