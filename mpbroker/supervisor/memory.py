"""What all processes of a broker share: made once, before the first fork."""

import os
import socket
import time
from typing import Final

from mpbroker.ipc.arena import ArenaLayout
from mpbroker.ipc.black_box import create_boxes
from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.lane import CoordinatorLane
from mpbroker.ipc.layout import (
    CELL_COUNT,
    CONTROL_WORDS,
    COORDINATOR,
    HANDLER_IDS,
    HEADER,
    HEADER_BOOT_ID,
    HEADER_MAGIC,
    HEADER_PHASE,
    HEADER_SUPERVISOR_PID,
    HEADER_VERSION,
    LAYOUT_VERSION,
    MAGIC,
    MAX_PROCESSORS,
    METADATA_CELL,
    SESSION_CELL,
    Phase,
)
from mpbroker.ipc.partition_table import PartitionTable
from mpbroker.ipc.ring import NotificationRing, RequestRing, ResponseRing
from mpbroker.ipc.segment import Segment
from mpbroker.ipc.shared_log_cell import SharedLogCell
from mpbroker.network.hand_over import KeeperLink
from mpbroker.server.fetch_session import FetchSessions

# More than the acceptor's credit of connections, so that it is no second limit.
_HANDOVER_BUFFER: Final = 256 * 1024


class BrokerMemory:
    """Segments, rings, doorbells and hand-over sockets, for every id there can be.

    All are made for the largest number of processes, so that growing a pool later
    needs nothing that the processes already running do not have.
    """

    def __init__(
        self,
        max_request_bytes: int,
        queued_max_requests: int,
        queued_bytes_each: int = 0,
    ) -> None:
        self.control = Segment.create("mpbroker-control", CONTROL_WORDS * 8)
        self.arena_layout = ArenaLayout(max_request_bytes, queued_bytes_each)
        self.arena = self.arena_layout.create()
        self.table = PartitionTable.create(self.control, self.arena)
        self.sessions = FetchSessions.create_segment()
        self.boxes = create_boxes()
        self.handler_bells = [Doorbell() for _ in range(HANDLER_IDS)]
        self.processor_bells = [Doorbell() for _ in range(MAX_PROCESSORS)]
        self.acceptor_bell = Doorbell()  # one for all: it only says "look at the phase"
        self.housekeeper_bell = Doorbell()
        self.supervisor_bell = Doorbell()  # a dynamic config has changed
        self.handovers = [_handover_pair() for _ in range(MAX_PROCESSORS)]
        self.keeper_bell = Doorbell()
        self.keeper_pair = _handover_pair()
        self.keeper_link = KeeperLink(self.keeper_pair[0], self.keeper_bell)
        for number in range(CELL_COUNT):
            SharedLogCell.initialise(self.control, number)
        RequestRing.initialise(self.control)
        CoordinatorLane.initialise(self.control)
        for processor in range(MAX_PROCESSORS):
            ResponseRing.initialise(self.control, processor)
        for handler in range(HANDLER_IDS):
            NotificationRing.initialise(self.control, handler)
        self.ring = RequestRing(self.control, self.handler_bells, queued_max_requests)
        self.lane = CoordinatorLane(self.control, self.handler_bells[COORDINATOR])
        self.responses = [
            ResponseRing(self.control, processor, bell)
            for processor, bell in enumerate(self.processor_bells)
        ]
        self.notices = [
            NotificationRing(self.control, handler, bell)
            for handler, bell in enumerate(self.handler_bells)
        ]
        self.metadata_cell = SharedLogCell(self.control, METADATA_CELL)
        self.session_cell = SharedLogCell(self.control, SESSION_CELL)
        words = self.control.words
        words[HEADER + HEADER_VERSION] = LAYOUT_VERSION
        words[HEADER + HEADER_BOOT_ID] = time.time_ns()
        words[HEADER + HEADER_SUPERVISOR_PID] = os.getpid()
        words[HEADER + HEADER_MAGIC] = MAGIC

    @property
    def phase(self) -> int:
        return self.control.words[HEADER + HEADER_PHASE]

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self.control.words[HEADER + HEADER_PHASE] = phase

    def wake_everybody(self) -> None:
        """After a death or a change of phase: no wake-up may have been lost."""
        self.ring.forget_sleepers()
        for bell in (*self.handler_bells, *self.processor_bells):
            bell.ring()
        self.acceptor_bell.ring()
        self.housekeeper_bell.ring()
        self.keeper_bell.ring()


def _handover_pair() -> tuple[socket.socket, socket.socket]:
    """The acceptors' end and the processor's end."""
    sender, receiver = socket.socketpair(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
    )
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _HANDOVER_BUFFER)
    return sender, receiver
