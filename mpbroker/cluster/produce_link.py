"""Send Produce requests from a handler to the writer of shared topics.

Beside the batches of a Produce, it takes the deletions of a DeleteRecords, and looks at
the ends of partitions.

A handler judges a Produce as any other, and sends the batches of shared partitions over
a Unix socket to the broker's writer, which answers behind the commit. The request stays
the handler's: it is parked, so its slot is delivered again if the handler dies.

    handler dies     another handler sends the same slot and generation; the writer goes
                     on with the request that it has, and answers the other handler
    writer dies      the link breaks; each handler sends its waiting requests to the
                     next writer. If a batch was committed before, the database
                     recognizes it by its producer id. For batches without one the
                     handler has the key of their object, which the writer has sent
                     before the commit

A message is JSON with its length in front, then the batches. A long message is in a
memfd, so that a message is sent completely or not at all.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.fdpass import FdsDroppedError, recv_fds, send_fds

if TYPE_CHECKING:
    Buffer = bytes | bytearray | memoryview

logger = get_logger(__name__)
_SOCKET: Final = ".cluster-writer"
_LENGTH: Final = struct.Struct("<I")
# Messages below this size go through the socket; its default buffer has room for some.
_INLINE_BYTES: Final = 32 * 1024
_IN_MEMFD: Final = b"m"


class LinkPath:
    """The address of a writer's socket in a directory, however long its path is."""

    def __init__(self, directory: str) -> None:
        self._fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def address(self) -> str:
        return f"/proc/self/fd/{self._fd}/{_SOCKET}"

    def close(self) -> None:
        os.close(self._fd)


class LinkedBatch(NamedTuple):
    """A validated batch of a shared partition.

    Attributes:
        records: the number of its offsets: its last offset delta + 1.
    """

    topic_id: bytes
    partition: int
    records: int
    data: Buffer


def send_message(sock: socket.socket, head: object, data: Iterable[Buffer]) -> None:
    """Send a message through a socket, completely or not at all.

    Args:
        head: the part that is sent as JSON.
        data: the bytes that follow it.

    Raises:
        BlockingIOError: the socket has no room; nothing was sent.
        OSError: the other process has closed the link.
    """
    text = orjson.dumps(head)
    parts = [_LENGTH.pack(len(text)), text, *data]
    if sum(map(len, parts)) < _INLINE_BYTES:
        sock.send(b"".join(parts))
        return
    fd = os.memfd_create("mpbroker-produce", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.writelines(parts)
        send_fds(sock, _IN_MEMFD, [fd])
    finally:
        os.close(fd)


def receive_message(sock: socket.socket) -> tuple[Any, memoryview] | None:
    """Receive a message; return its decoded JSON, and the bytes behind that.

    Return None if the other process has closed the link.

    Raises:
        BlockingIOError: there is no message yet.
    """
    try:
        content, fds = recv_fds(sock, _INLINE_BYTES, 1)
    except FdsDroppedError:
        logger.error("a request to the writer is lost: too many open files")
        return None  # as if the link had broken: both sides connect again
    except ConnectionError:
        return None
    if not content:
        return None
    for fd in fds:
        with os.fdopen(fd, "rb") as file:
            file.seek(0)
            content = file.read()
    view = memoryview(content)
    (length,) = _LENGTH.unpack_from(view)
    end = _LENGTH.size + length
    return orjson.loads(view[_LENGTH.size : end]), view[end:]


class LinkedRequest:
    """What the writer is to do for a request.

    Attributes:
        key: the slot and its generation.
        batches: whose bytes are sent.
        head: what the writer is told of it.
        results: of each part of the request; None: no answer yet.
        intent: the message of a writer that was about to commit the batches; {}: none.
        refusal: the error code and text for all parts; None: there is none.
        taken: called when no later request can overtake this one at the writer.
    """

    __slots__ = ("batches", "head", "intent", "key", "refusal", "results", "taken")

    def __init__(
        self,
        key: tuple[int, int],
        head: dict[str, Any],
        batches: Sequence[LinkedBatch] = (),
    ) -> None:
        self.key = key
        self.batches = batches
        self.head = {"slot": key[0], "generation": key[1], **head}
        self.intent: dict[str, Any] = {}
        self.results: list[tuple[int, ...]] | None = None
        self.refusal: tuple[int, str] | None = None
        self.taken: Callable[[], None] = lambda: None

    @property
    def is_answered(self) -> bool:
        return self.results is not None or self.refusal is not None


class LinkedProduce(LinkedRequest):
    """The batches of a Produce request that the writer is to write.

    The results are the base offset, error code and time of append of each batch.
    """

    __slots__ = ()

    def __init__(
        self,
        key: tuple[int, int],
        batches: Sequence[LinkedBatch],
        *,
        connection: int,
        row: int,
        timeout_ms: int,
        has_ids: bool,
        before: tuple[int, int] | None,
        taken: Callable[[], None],
    ) -> None:
        """Take a Produce request's batches, which the writer of shared topics gets.

        Args:
            connection: the number of the client's connection.
            row: the row (entry in shared memory) of any of the partitions: the writer
                sends a notice about it with the answer.
            timeout_ms: the time after which the writer gives up.
            has_ids: whether all batches have a producer id.
            before: the key of the connection's request before this one, which the
                writer must have first; None: it was answered before.
            taken: called when no later request can overtake this one at the writer.
        """
        head = {
            "connection": connection,
            "row": row,
            "timeout_ms": timeout_ms,
            "has_ids": has_ids,
            "before": before,
            "batches": [
                (each.topic_id.hex(), each.partition, each.records, len(each.data))
                for each in batches
            ],
        }
        super().__init__(key, head, batches)
        self.taken = taken


class LinkedDeletion(LinkedRequest):
    """The records of shared partitions that a DeleteRecords request removes.

    The results are the start and the error code of each partition.
    """

    __slots__ = ()

    def __init__(
        self,
        key: tuple[int, int],
        wanted: Sequence[tuple[bytes, int, int]],
        *,
        row: int,
        timeout_ms: int,
    ) -> None:
        """Take the topic, the partition and the new start of each; -1: the end.

        Args:
            row: as for LinkedProduce.
            timeout_ms: as for LinkedProduce.
        """
        deletions = [(topic.hex(), index, before) for topic, index, before in wanted]
        head = {"row": row, "timeout_ms": timeout_ms, "deletions": deletions}
        super().__init__(key, head)


class LinkedLook(LinkedRequest):
    """Shared partitions whose local logs must get what the cluster has now.

    The results are of each partition whether its log has all.
    """

    __slots__ = ()

    def __init__(
        self,
        key: tuple[int, int],
        places: Sequence[tuple[bytes, int]],
        *,
        row: int,
        timeout_ms: int,
    ) -> None:
        """Take the topic and the partition of each.

        Args:
            row: as for LinkedProduce.
            timeout_ms: as for LinkedProduce.
        """
        looks = [(topic.hex(), index) for topic, index in places]
        head = {"row": row, "timeout_ms": timeout_ms, "looks": looks}
        super().__init__(key, head)


class ProduceLink:
    """Sends one handler's Produce requests to the writer of shared topics.

    It also receives the writer's answers.

    Args:
        directory: the directory of the writer's socket.
        handler: the id of the handler, which gets a notice with each answer.
    """

    def __init__(self, directory: str, handler: int) -> None:
        self._path = LinkPath(directory)
        self._handler = handler
        self._socket: socket.socket | None = None
        self._waiting: dict[tuple[int, int], LinkedRequest] = {}
        self._unsent: deque[LinkedRequest] = deque()

    def submit(self, request: LinkedRequest) -> None:
        """Give a request to the writer, now or when it is there."""
        self._waiting[request.key] = request
        if self._socket is None:
            self.look()  # connects, and sends all waiting requests
        else:
            self._unsent.append(request)
            self._send()

    def forget(self, request: LinkedRequest) -> None:
        """Let go of a request, whose memory may be used again."""
        self._waiting.pop(request.key, None)
        if request in self._unsent:
            self._unsent.remove(request)

    def look(self) -> None:
        """Receive answers of the writer of shared topics.

        If another process is the writer by now, send it all waiting requests again.
        """
        while True:
            if self._socket is None and not self._connect():
                return
            if self._receive():
                self._send()
                return

    def _connect(self) -> bool:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(self._path.address)
        except OSError:
            sock.close()  # no writer is there; the next one sends a notice
            return False
        self._socket = sock
        self._unsent = deque(self._waiting.values())
        return True

    def _send(self) -> None:
        """Send requests while the socket has room; send the rest at the next answer."""
        while self._unsent and self._socket is not None:
            request = self._unsent[0]
            head = {**request.head, "handler": self._handler, "intent": request.intent}
            try:
                data = [each.data for each in request.batches]
                send_message(self._socket, head, data)
            except BlockingIOError:
                return
            except OSError:
                self._drop()
                return
            self._unsent.popleft()

    def _receive(self) -> bool:
        """Receive answers of shared topics' writer; return False if it is gone."""
        assert self._socket is not None
        while True:
            try:
                message = receive_message(self._socket)
            except BlockingIOError:
                return True
            if message is None:
                self._drop()
                return False
            head, _ = message
            key = head["slot"], head["generation"]
            request = self._waiting.get(key)
            if request is None:
                continue  # it was answered by its deadline
            if "places" in head:
                request.intent = head
                continue
            if "taken" in head:
                request.taken()
                continue
            del self._waiting[key]
            if "error" in head:
                request.refusal = (head["error"][0], head["error"][1])
            else:
                request.results = [tuple(each) for each in head["results"]]

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
