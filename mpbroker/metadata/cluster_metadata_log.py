"""ClusterMetadataLog: the metadata log of a broker that is a node of a cluster.

The cluster's database has the log of all nodes, and a node's files are a copy of it,
with the same offsets. One process of the node, the cluster-node, talks to the database
and writes the copy. All other processes read the copy as a broker's own log, and ask
the cluster-node for each change, through a Unix socket beside the files:

    connect                     wait for the turn
    <- DONE                     the turn has come; the copy has all committed records
    -> a batch of records       its base offset is the end of what the sender has read
    <- DONE                     the records are committed, and in the copy
       MOVED                    another node was faster: decide again
    close                       the turn ends

A frame is a length of 4 bytes, big-endian, and that many bytes; an answer's first byte
is DONE, MOVED or REFUSED. REFUSED, with a text, may come instead of any answer. No
mutex is held while a process waits, so it may die at any moment: the batch that it has
sent is committed as a whole, or not at all.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from mpbroker.metadata.metadata_image import MetadataRecord
from mpbroker.metadata.metadata_log import (
    MetadataLog,
    MetadataMovedError,
    metadata_log_path,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

DONE: Final = 0
MOVED: Final = 1
REFUSED: Final = 2
LENGTH_BYTES: Final = 4
_SOCKET_NAME: Final = "cluster-node.sock"
# The cluster-node answers earlier, unless it is stopped. If it has died, it is started
# again within two seconds.
_PATIENCE_S: Final = 10.0
_START_S: Final = 4.0
_CONNECT_EVERY_S: Final = 0.05


def change_socket_path(log_dir: str) -> str:
    """Return the path of the socket that takes changes of a cluster's metadata.

    One process of the node, the cluster-node, serves this socket.

    Args:
        log_dir: the first directory of ``log.dirs``.
    """
    return os.path.join(os.path.dirname(metadata_log_path(log_dir)), _SOCKET_NAME)


@contextmanager
def short_path(path: str) -> Iterator[str]:
    """Yield a path of a file that is short enough for a Unix socket's address."""
    place = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{place}/{os.path.basename(path)}"
    finally:
        os.close(place)


class ClusterMetadataLog(MetadataLog):
    """Reads a node's copy of the cluster's metadata log, and asks for changes of it.

    The process cluster-node makes the changes.
    """

    is_shared = True

    _turn: _Turn | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the exclusive right of this node's processes to change the metadata.

        The copy then has all records of the database. If the cluster-node cannot be
        asked, append() raises the error; this method raises none.
        """
        self._turn = _Turn(os.path.join(self._directory, _SOCKET_NAME))
        try:
            yield
        finally:
            self._turn.close()
            self._turn = None

    def append(self, records: Sequence[MetadataRecord], now_ms: int) -> None:
        """Commit records for all nodes, and wait until this node's copy has them.

        Raises:
            MetadataMovedError: another node has changed the metadata since the turn
                began.
            ApiError: REQUEST_TIMED_OUT: the cluster-node or the database gives no
                answer. The records may be committed nevertheless.
        """
        assert self._turn is not None, "append() belongs to a turn"
        batch = self._batches.encode([_for_all(each) for each in records], now_ms)
        self._turn.append(batch)


def _for_all(record: MetadataRecord) -> MetadataRecord:
    """Return a record without its "row" (an index in this node's shared memory)."""
    if "row" not in record:
        return record
    return {name: value for name, value in record.items() if name != "row"}


class _Turn:
    """A connection to the process cluster-node, for one change of the metadata.

    While it is open, no other process of this node can decide on a change.

    Args:
        path: the path of the cluster-node's socket.
    """

    def __init__(self, path: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(_PATIENCE_S)
        self._refusal = ""
        try:
            self._connect(path)
            kind, text = self._answer()
        except OSError as error:
            kind, text = REFUSED, _no_answer(error)
        if kind != DONE:
            self._refusal = text or "the cluster-node gave a wrong answer"

    def _connect(self, path: str) -> None:
        deadline = time.monotonic() + _START_S
        with short_path(path) as short:
            while True:
                try:
                    return self._sock.connect(short)
                except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                    if time.monotonic() > deadline:
                        raise
                time.sleep(_CONNECT_EVERY_S)

    def append(self, batch: bytes) -> None:
        """Send metadata records to the process cluster-node; wait for their commit.

        Raises:
            As ClusterMetadataLog.append().
        """
        if not self._refusal:
            try:
                self._sock.sendall(len(batch).to_bytes(LENGTH_BYTES) + batch)
                kind, text = self._answer()
            except OSError as error:
                kind, text = REFUSED, _no_answer(error)
            if kind == DONE:
                return
            if kind == MOVED:
                raise MetadataMovedError("another node has changed the metadata")
            self._refusal = text
        raise ApiError(ErrorCode.REQUEST_TIMED_OUT, self._refusal)

    def close(self) -> None:
        self._sock.close()

    def _answer(self) -> tuple[int, str]:
        length = int.from_bytes(self._receive(LENGTH_BYTES))
        answer = self._receive(length)
        return answer[0], answer[1:].decode("utf-8", "replace")

    def _receive(self, length: int) -> bytes:
        received = b""
        while len(received) < length:
            part = self._sock.recv(length - len(received))
            if not part:
                raise ConnectionResetError("it has ended")
            received += part
        return received


def _no_answer(error: OSError) -> str:
    return (
        "the process that changes the cluster's metadata gives no answer, try again:"
        f" {error.strerror or error}"
    )
