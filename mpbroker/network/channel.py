"""Channel: one client connection as its processor sees it.

The connection's row, its record in shared memory, has everything that a processor needs
to continue the connection after this one (ipc.layout). This object is the processor's
handle on the row. It has two facts that change independently:

    readable   the kernel has reported bytes (edge-triggered), and not all are read yet
    state      READING -> IN_FLIGHT -> SENDING -> READING: see TRANSITIONS

A connection has one request in flight: it is muted from the moment its frame is
complete until the last byte of the answer is sent, so answers are in order. Bytes that
a client pipelined behind that frame wait in the same block of shared memory, or in the
kernel. Only a producer to shared topics of a cluster may have several requests in
flight (pipelines.py).

Source: kafka-clients KafkaChannel, Selector.
"""

import socket
from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.ipc.layout import ConnectionState as S
from mpbroker.ipc.response_parts import BytesPart, FilePart


class IllegalTransitionError(MpbrokerError):
    """An event came that cannot happen in a connection's state: a broker's bug."""


class ChannelEvent(IntEnum):
    """Names the events that change the state of a connection."""

    REQUEST_PUBLISHED = 0
    RESPONSE_TAKEN = 1
    RESPONSE_SENT = 2


E = ChannelEvent

# All other pairs are illegal, and raise an error.
TRANSITIONS: Final[Mapping[tuple[S, ChannelEvent], S]] = {
    (S.READING, E.REQUEST_PUBLISHED): S.IN_FLIGHT,  # muted before it is published
    (S.IN_FLIGHT, E.RESPONSE_TAKEN): S.SENDING,
    (S.SENDING, E.RESPONSE_SENT): S.READING,  # unmuted
    (S.PIPELINED, E.REQUEST_PUBLISHED): S.PIPELINED,
}


# The same by number: to hash two enum members takes longer than a system call.
_NEXT: Final = [[TRANSITIONS.get((state, event)) for event in E] for state in S]


def next_state(state: S, event: ChannelEvent) -> S:
    """Return the state of a connection after an event.

    Raises:
        IllegalTransitionError: the event cannot happen in ``state``.
    """
    following = _NEXT[state][event]
    if following is None:
        raise IllegalTransitionError(f"{event.name} while {state.name}")
    return following


class Pipeline:
    """Holds the requests of a connection that has several in flight: pipelines.py.

    Attributes:
        ahead: the slots of the requests that were set aside, the oldest first. The
            connection's last request is not among them.
        answered: those slots, and perhaps that of the last request, whose answers are
            there, and not all sent.
        is_reading: whether the connection's next request is being received. If not, its
            last request is in flight.
        has_stopped: whether no further request is read before all others are answered.
        is_noted: whether the row says PIPELINED: a byte of a second request has come.
    """

    __slots__ = ("ahead", "answered", "has_stopped", "is_noted", "is_reading")

    def __init__(self) -> None:
        self.ahead: deque[int] = deque()
        self.answered: set[int] = set()
        self.is_reading = False
        self.has_stopped = False
        self.is_noted = False


class Channel:
    """Holds a processor's view of one connection.

    Offsets are in bytes from the start of the arena, the shared memory that has all
    requests and answers, unless said otherwise.
    """

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
        "extent_ns",
        "fd",
        "frame_end",
        "outgoing",
        "part_sent",
        "pipeline",
        "readable",
        "row",
        "sent",
        "slot",
        "sock",
        "spilled",
        "start",
        "state",
        "waiting",
        "wanted",
    )

    def __init__(self, sock: socket.socket, connection: int, row: int) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.connection = connection  # row index
        self.row = row  # first word of the row
        self.cookie = 0  # SO_COOKIE: identifies the socket through every descriptor
        self.state = S.READING
        self.readable = True  # there may be bytes from before it was registered
        self.closing = False  # the peer has closed; finish the current request only
        self.waiting = False  # in the queue for a slot or an extent
        self.slot = -1  # the slot whose block it reads into
        self.block = 0  # where that block begins
        self.base = 0  # bytes of the client's stream in front of the block
        self.start = 0  # bytes from the block's start: first byte not yet consumed
        self.end = 0  # bytes from the block's start: first free byte
        self.frame_end = 0  # bytes from the block's start: end of the frame in flight
        self.extent = 0  # a frame that outgrew the block; 0: none
        self.extent_length = 0
        self.extent_have = 0
        self.extent_ns = 0  # since when it has the extent
        self.wanted = 0  # length of the frame for which it waits for an extent
        self.spilled = b""  # bytes kept privately, because slots ran short
        self.outgoing: list[BytesPart | FilePart] = []  # parts not yet sent, last first
        self.part_sent = 0  # bytes of outgoing[-1] already sent
        self.sent = 0  # bytes of all answers, the one under way included
        self.active_ns = 0
        self.pipeline: Pipeline | None = None  # with several requests in flight

    @property
    def is_receiving(self) -> bool:
        """Whether a request may be under way from the client to its slot."""
        if self.pipeline is not None:
            return self.pipeline.is_reading and not self.pipeline.has_stopped
        return self.state == S.READING

    @property
    def sending_slot(self) -> int:
        """The slot whose answer has been sent in part; -1: there is none."""
        if self.pipeline is not None:
            return self.pipeline.ahead[0] if self.outgoing else -1
        return self.slot if self.state == S.SENDING else -1
