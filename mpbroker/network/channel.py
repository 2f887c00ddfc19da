"""Channel: one client connection as its processor sees it.

What a successor would need is in the connection's row (ipc.layout); this object is
the processor's handle on it. Reading and sending are two independent facts:

    readable   the kernel said so (edge-triggered) and we have not yet drained it
    state      READING -> IN_FLIGHT -> SENDING -> READING, below

A connection has one request in flight: it is muted from the moment its frame is
whole until the last byte of the answer has left, so answers are in order. Bytes that
a client pipelined behind that frame wait in the same block, or in the kernel.

Source: kafka-clients KafkaChannel, Selector.
"""

import socket
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.ipc.layout import ConnectionState as S
from mpbroker.ipc.response_parts import BytesPart, FilePart


class IllegalTransitionError(MpbrokerError):
    """An event that cannot happen in a connection's state: our bug."""


class ChannelEvent(IntEnum):
    """What happens to a connection."""

    REQUEST_PUBLISHED = 0
    RESPONSE_TAKEN = 1
    RESPONSE_SENT = 2


E = ChannelEvent

# A pair that is absent is illegal; nothing is ignored silently.
TRANSITIONS: Final[Mapping[tuple[S, ChannelEvent], S]] = {
    (S.READING, E.REQUEST_PUBLISHED): S.IN_FLIGHT,  # muted before it is published
    (S.IN_FLIGHT, E.RESPONSE_TAKEN): S.SENDING,
    (S.SENDING, E.RESPONSE_SENT): S.READING,  # unmuted
}


# The same by number, since hashing two enum members costs more than a system call.
_NEXT: Final = [[TRANSITIONS.get((state, event)) for event in E] for state in S]


def next_state(state: S, event: ChannelEvent) -> S:
    """Look the transition up.

    Raises:
        IllegalTransitionError: it is not in the table.
    """
    following = _NEXT[state][event]
    if following is None:
        raise IllegalTransitionError(f"{event.name} while {state.name}")
    return following


class Channel:
    """One connection. Offsets are bytes in the arena unless said otherwise."""

    __slots__ = (
        "active_ns",
        "base",
        "block",
        "closing",
        "connection",
        "cookie",
        "end",
        "extent",
        "extent_have",
        "extent_length",
        "fd",
        "frame_end",
        "outgoing",
        "part_sent",
        "readable",
        "row",
        "sent",
        "slot",
        "sock",
        "spilled",
        "start",
        "state",
        "waiting",
    )

    def __init__(self, sock: socket.socket, connection: int, row: int) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.connection = connection  # row index
        self.row = row  # first word of the row
        self.cookie = 0  # SO_COOKIE: which socket it is, whatever its descriptor
        self.state = S.READING
        self.readable = True  # there may be bytes from before it was registered
        self.closing = False  # the peer has closed; finish what is under way, no more
        self.waiting = False  # in the queue for a slot or an extent
        self.slot = -1  # the slot whose block it reads into
        self.block = 0  # where that block begins
        self.base = 0  # bytes of the client's stream in front of the block
        self.start = 0  # bytes from the block's start: first not yet consumed
        self.end = 0  # likewise: first free one
        self.frame_end = 0  # likewise: end of the frame in flight
        self.extent = 0  # a frame that outgrew the block; 0: none
        self.extent_length = 0
        self.extent_have = 0
        self.spilled = b""  # a partial frame kept privately, because slots ran short
        self.outgoing: list[BytesPart | FilePart] = []  # parts not yet sent, last first
        self.part_sent = 0  # bytes of outgoing[-1] already sent
        self.sent = 0  # bytes of all answers, the one under way included
        self.active_ns = 0
