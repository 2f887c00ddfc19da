"""Send answers: bytes of shared memory, and ranges of log segments by sendfile.

A partly sent answer stays with its connection until the socket takes more. The kernel
counts how much of it was sent, so a successor knows where to continue.
"""

import contextlib
import errno
import os
import select
from collections import OrderedDict
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

from mpbroker.base.file_id import has_id
from mpbroker.ipc.response_parts import BytesPart, FilePart
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel import Channel
from mpbroker.network.channel_selector import CLOSED, ChannelSelector
from mpbroker.network.errors import SegmentGoneError

_MAX_OPEN_SEGMENTS: Final = 128
# At most this much of an answer is sent in one turn, so that a fast reader of a large
# answer does not delay the processor's other connections.
_MAX_SEND_BYTES: Final = 4 * 1024 * 1024


def _names_of(path: str) -> Iterator[str]:
    """Yield the paths that a segment file may have by now."""
    yield path
    yield path + ".deleted"
    directory, file = os.path.split(path)
    parent, partition = os.path.split(directory)
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(f"{partition}.") and name.endswith("-delete"):
                yield f"{parent}/{name}/{file}"


class SendResult(IntEnum):
    """Says how far an answer was sent, and what is to be done next."""

    SENT = 0  # the kernel has the last byte
    BLOCKED = 1  # the socket is full; an event will come when it is not
    CLOSED = 2
    MORE = 3  # the socket would take more, but other connections are served first


class SegmentFiles:
    """Keeps open the log segments from which answers were sent lately.

    One descriptor is reserved, so that a segment can always be opened: existing
    connections get their answers even if no descriptor is left for new ones.
    """

    def __init__(self, max_open: int = _MAX_OPEN_SEGMENTS) -> None:
        self._max_open = max_open
        self._fds: OrderedDict[tuple[str, int], int] = OrderedDict()
        # The reserved descriptor: an epoll, which needs no file and no close at exit.
        self._place: select.epoll | None = None
        self._keep_place()

    def fd(self, path: str, file_id: int) -> int:
        """Return a descriptor of the segment file with this path and id.

        Compaction and retention rename a segment before they drop it, and keep it for
        file.delete.delay.ms. So a file with the suffix ".deleted" is taken too, and one
        in the directory that a moved partition has left.

        Raises:
            SegmentGoneError: no file of that name has this id any more, or the file
                cannot be opened. The caller closes the connection and goes on.
        """
        key = (path, file_id)
        fd = self._fds.get(key)
        if fd is not None:
            self._fds.move_to_end(key)
            return fd
        for name in _names_of(path):
            try:
                fd = self._open(name)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SegmentGoneError(f"{name}: {error.strerror}") from None
            if has_id(fd, file_id):
                self._keep(key, fd)
                return fd
            os.close(fd)
        raise SegmentGoneError(f"{path} (id {file_id}) is no longer there")

    def _open(self, name: str) -> int:
        try:
            return os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        if self._fds:
            os.close(self._fds.popitem(last=False)[1])
        elif self._place is not None:
            self._place.close()
            self._place = None
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC)

    def _keep_place(self) -> None:
        if self._place is None:
            with contextlib.suppress(OSError):  # then there is no reserve
                self._place = select.epoll(flags=select.EPOLL_CLOEXEC)

    def _keep(self, key: tuple[str, int], fd: int) -> None:
        self._fds[key] = fd
        if len(self._fds) > self._max_open:
            _, oldest = self._fds.popitem(last=False)
            os.close(oldest)

    def close_unused(self) -> None:
        """Close all open files, so that deleted segments free their disk space.

        To be called when the processor is idle. A file that is needed later is opened
        anew.
        """
        while self._fds:
            os.close(self._fds.popitem()[1])
        self._keep_place()


class ResponseSender:
    """Sends answers to clients' sockets, as much as a socket takes at a time."""

    def __init__(self, arena: Segment, selector: ChannelSelector) -> None:
        self._view = arena.view
        self._selector = selector
        self._files = SegmentFiles()

    def send_bytes(self, channel: Channel, offset: int, length: int) -> SendResult:
        """Send an answer that is contiguous in shared memory: the common case."""
        count = self._selector.send(channel, self._view[offset : offset + length])
        if count == length:
            return SendResult.SENT
        if count == CLOSED:
            return SendResult.CLOSED
        return self.send_parts(channel, [BytesPart(offset, length)], count)

    def send_parts(
        self, channel: Channel, parts: list[BytesPart | FilePart], sent: int = 0
    ) -> SendResult:
        """Send an answer of several parts, in order.

        Args:
            channel: the connection.
            parts: the parts of the whole answer, in memory or in files; the list is
                used up.
            sent: how many bytes of the answer have been sent before.

        Raises:
            SegmentGoneError: a part cannot be sent any more: close the connection.
        """
        parts.reverse()
        while parts and sent >= parts[-1].length:
            sent -= parts.pop().length
        channel.outgoing = parts
        channel.part_sent = sent
        return self.resume(channel)

    def resume(self, channel: Channel) -> SendResult:
        """Send more of an answer, until the socket is full or 4 MiB are sent.

        Raises:
            SegmentGoneError: a part cannot be sent any more: close the connection.
        """
        outgoing = channel.outgoing
        budget = _MAX_SEND_BYTES
        while outgoing:
            if budget <= 0:
                return SendResult.MORE
            part = outgoing[-1]
            sent = channel.part_sent
            if isinstance(part, BytesPart):
                start = part.offset + sent
                count = self._selector.send(
                    channel,
                    self._view[start : part.offset + part.length],
                    more=len(outgoing) > 1,
                )
            else:
                count = self._send_file(channel, part, sent)
            if count == 0:
                return SendResult.BLOCKED
            if count == CLOSED:
                return SendResult.CLOSED
            channel.part_sent = sent + count
            budget -= count
            if channel.part_sent == part.length:
                outgoing.pop()
                channel.part_sent = 0
        return SendResult.SENT

    def _send_file(self, channel: Channel, part: FilePart, sent: int) -> int:
        fd = self._files.fd(part.path, part.file_id)
        length = min(part.length - sent, _MAX_SEND_BYTES)
        try:
            return self._selector.send_file(channel, fd, part.position + sent, length)
        except EOFError as error:
            raise SegmentGoneError(
                f"{part.path} is shorter than it was: {error}"
            ) from None

    def close_unused(self) -> None:
        self._files.close_unused()
