"""Describe connections so that another layout of shared memory can carry them on.

This runs when no process uses the connections any more: acceptors, processors and
handlers have ended. A record says where a connection is in its two streams and which
request is under way. It names bytes as ranges of the arena, which is handed over as it
is, and it names no row, slot or block (entries of connections, of requests, and space
for their bytes): those may differ between layouts. The kernel goes on counting both
streams, so a connection resumes at the byte, as after a death (see succession.py).
"""

import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import (
    CONNECTION_ACCEPT_SEQUENCE,
    CONNECTION_ACTIVE,
    CONNECTION_COOKIE,
    CONNECTION_LISTENER,
    CONNECTION_OPENED,
    SLOT_DEADLINE,
    SLOT_PROGRESS,
    SLOT_PROGRESS_OFFSET,
    SLOT_RECEIVED,
    SLOT_REQUEST_LENGTH,
    SLOT_RESPONSE_KIND,
    SLOT_RESPONSE_LENGTH,
    SLOT_RESPONSE_OFFSET,
    ConnectionSecurity,
    ResponseKind,
    connection_row,
    slot_row,
)
from mpbroker.ipc.response_parts import FilePart, read_parts
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel import Channel
from mpbroker.network.connection_rows import is_private, live_rows, security_of
from mpbroker.network.moves.hand_over import HAS_ROW
from mpbroker.network.moves.succession import Resumption, restore
from mpbroker.network.moves.tcp_counters import StreamCounts, stream_counts

_SIZE_BYTES: Final = 4
_BYTES: Final = int(ResponseKind.BYTES)
_PARTS: Final = int(ResponseKind.PARTS)


class KeptSocket(NamedTuple):
    """A client's socket; and its processor, if shared memory does not name it yet."""

    fd: int
    processor: int  # HAS_ROW: the connection has a row, which names its processor
    listener: int
    sequence: int  # the acceptor's number of the connection


class RequestRecord(NamedTuple):
    """The request of a connection that is with the handlers, or answered.

    Its bytes are the first frame of the received bytes that are not consumed.
    """

    frame_bytes: int  # with its size field
    received_ns: int
    deadline_ns: int  # of a parked request; 0: it was never parked
    progress: list[int]  # for each partition done: base offset, or -1 - error


class AnswerRecord(NamedTuple):
    """A response that the processor had not sent to its end; described from byte 0."""

    kind: int  # ResponseKind
    # Ranges of the arena, (offset, length), and of files, (path, file id, position,
    # length), in order.
    parts: list[list[int | str]]


class ConnectionRecord(NamedTuple):
    """One connection, described without the layout of shared memory."""

    fd: int
    listener: int
    sequence: int
    opened_ns: int
    active_ns: int
    base: int  # how many bytes of the client's stream are consumed
    sent: int  # how many bytes all earlier responses had, without the one under way
    received: tuple[int, int]  # range of the arena: bytes not yet consumed
    request: RequestRecord | None = None  # with the handlers, or answered
    answer: AnswerRecord | None = None  # the kernel knows how much of it is sent

    @classmethod
    def of(cls, values: list) -> "ConnectionRecord":  # type: ignore[type-arg]
        """Return the record that msgpack has unpacked as a list of lists."""
        record = cls(*values)
        request, answer = record.request, record.answer
        return record._replace(
            request=None if request is None else RequestRecord(*request),
            answer=None if answer is None else AnswerRecord(*answer),
        )


def export_connections(
    words: memoryview,
    arena: Segment,
    sockets: Mapping[int, KeptSocket],
    answered: Collection[int],
) -> Iterator[ConnectionRecord]:
    """Yield a record of each connection that can be carried on; leave the others out.

    Args:
        words: the words of the control segment, shared memory with connections'
            entries.
        arena: the shared memory with the bytes of requests and responses.
        sockets: all clients' sockets, by the kernel's cookie (SO_COOKIE).
        answered: the slots (entries of requests) whose responses wait in a queue, a
            response ring.
    """
    in_rows = set()
    for row in live_rows(words):
        cookie = words[connection_row(row) + CONNECTION_COOKIE]
        in_rows.add(cookie)
        kept = sockets.get(cookie)
        counts = None
        # A client that has authenticated must reconnect: numbers of principals belong
        # to the layout.
        may_go_on = security_of(words, row) == ConnectionSecurity.NONE
        if kept is not None and may_go_on and not is_private(words, row):
            counts = _counts(kept.fd)
        if kept is not None and counts is not None:
            record = _export(words, arena, row, kept.fd, counts, answered)
            if record is not None:
                yield record
    for cookie, kept in sockets.items():
        if cookie in in_rows or kept.processor == HAS_ROW:
            continue
        if _counts(kept.fd) is not None:
            # Accepted, and not read from yet.
            yield ConnectionRecord(
                kept.fd, kept.listener, kept.sequence, 0, 0, 0, 0, (0, 0)
            )


def _counts(fd: int) -> StreamCounts | None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        return stream_counts(sock)
    except OSError:  # not a TCP socket
        return None
    finally:
        sock.detach()


def _export(
    words: memoryview,
    arena: Segment,
    row: int,
    fd: int,
    counts: StreamCounts,
    answered: Collection[int],
) -> ConnectionRecord | None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    word = connection_row(row)
    channel = Channel(sock, row, word)
    resumption, _ = restore(channel, words, counts, answered)
    sock.detach()
    if resumption == Resumption.IMPOSSIBLE:
        return None
    if channel.extent:
        received = (channel.extent, channel.extent_have)
    else:
        received = (channel.block + channel.start, channel.end - channel.start)
    record = ConnectionRecord(
        fd,
        words[word + CONNECTION_LISTENER],
        words[word + CONNECTION_ACCEPT_SEQUENCE],
        words[word + CONNECTION_OPENED],
        words[word + CONNECTION_ACTIVE],
        channel.base + channel.start,
        channel.sent,
        received,
    )
    if resumption == Resumption.READ:
        return record
    slot = channel.slot
    is_answered = resumption == Resumption.SEND or slot in answered
    return record._replace(
        request=_request(words, arena, slot),
        answer=_answer(words, arena, slot) if is_answered else None,
    )


def _request(words: memoryview, arena: Segment, slot: int) -> RequestRecord:
    word = slot_row(slot)
    done = words[word + SLOT_PROGRESS]
    where = words[word + SLOT_PROGRESS_OFFSET] >> 3
    return RequestRecord(
        words[word + SLOT_REQUEST_LENGTH] + _SIZE_BYTES,
        words[word + SLOT_RECEIVED],
        words[word + SLOT_DEADLINE],
        arena.words[where : where + done].tolist() if done else [],
    )


def _answer(words: memoryview, arena: Segment, slot: int) -> AnswerRecord:
    word = slot_row(slot)
    kind = words[word + SLOT_RESPONSE_KIND]
    offset = words[word + SLOT_RESPONSE_OFFSET]
    parts: list[list[int | str]] = []
    if kind == _BYTES:
        parts.append([offset, words[word + SLOT_RESPONSE_LENGTH]])
    elif kind == _PARTS:
        for part in read_parts(arena, offset):
            parts.append(
                [part.path, part.file_id, part.position, part.length]
                if isinstance(part, FilePart)
                else [part.offset, part.length]
            )
    return AnswerRecord(kind, parts)
