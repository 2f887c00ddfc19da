"""BrokerMemory: the shared memory of a broker's processes, made before any fork."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Final

from mpbroker.ipc.arena import ArenaLayout
from mpbroker.ipc.black_box import create_boxes
from mpbroker.ipc.lane import CoordinatorLane
from mpbroker.ipc.layout import (
    CELL_COUNT,
    CONTROL_RING,
    CONTROL_WORDS,
    COORDINATOR,
    HANDLER_IDS,
    HEADER,
    HEADER_BOOT_ID,
    HEADER_CONTROL_PLANE,
    HEADER_MAGIC,
    HEADER_PHASE,
    HEADER_SUPERVISOR_PID,
    HEADER_VERSION,
    LAYOUT_VERSION,
    MAGIC,
    MAX_PROCESSORS,
    METADATA_CELL,
    PROCESSOR_SERVES,
    SESSION_CELL,
    SLOTS_PER_PROCESSOR,
    Phase,
    processor_row,
)
from mpbroker.ipc.limits_page import LimitsPage
from mpbroker.ipc.log_levels import LogLevels, levels_left_in
from mpbroker.ipc.parts import Parts
from mpbroker.ipc.ring import NotificationRing, RequestRing, ResponseRing
from mpbroker.ipc.segment import Segment
from mpbroker.ipc.tables.client_instances import ClientInstances
from mpbroker.ipc.tables.member_sessions import MemberSessions
from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.ipc.tables.principals import Principals
from mpbroker.ipc.tables.quota_table import QuotaTable
from mpbroker.ipc.tables.shared_log_cell import SharedLogCell
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.network.connection_ledger import ConnectionLedger
from mpbroker.network.connection_rows import is_open, principals_in_use
from mpbroker.network.moves.hand_over import KeeperLink
from mpbroker.server.fetch.fetch_session import FetchSessions

# Names of parts in a manifest.
_LOG_LEVELS: Final = "log levels"
_TRANSACTIONS: Final = "transactions"
KEEPER_PAIR: Final = "keeper pair"
CONTROL_PLANE_REQUESTS: Final = 20  # as in Kafka


class BrokerMemory:
    """The shared memory of all processes of a broker, with its queues and wake-ups.

    It is made for the largest number of handlers and processors. So a pool can grow
    without giving anything new to the running processes. Rings are queues in this
    memory, doorbells are eventfds that wake a process, and the sockets pass clients'
    connections between processes.
    """

    def __init__(
        self,
        max_request_bytes: int,
        queued_max_requests: int,
        queued_bytes_each: int = 0,
        parts: Parts | None = None,
    ) -> None:
        """Make the memory, or attach the memory that the previous program has made.

        Args:
            max_request_bytes: socket.request.max.bytes.
            queued_max_requests: queued.max.requests.
            queued_bytes_each: a processor's share of queued.max.request.bytes.
            parts: the descriptors inherited from the previous program; None: there is
                none, and new memory is made.
        """
        self.parts = parts = parts or Parts()
        self.queued_bytes_each = queued_bytes_each
        self.arena_layout = ArenaLayout(max_request_bytes, queued_bytes_each)
        self._map_segments(parts)
        self._open_bells_and_pairs(parts)
        if not parts.are_inherited:
            self._initialise()
        self._build_rings(queued_max_requests)

    def _map_segments(self, parts: Parts) -> None:
        """Make all segments of shared memory, or attach those of the old program.

        They have the names that an upgrade's manifest (the list of what is handed over)
        uses.
        """
        self.control = parts.segment(
            "control", lambda: Segment.create("mpbroker-control", CONTROL_WORDS * 8)
        )
        self.arena = parts.segment("arena", self.arena_layout.create)
        self.table = PartitionTable(
            parts.segment("partitions", PartitionTable.create_segment),
            self.control,
            self.arena,
        )
        self.sessions = parts.segment("sessions", FetchSessions.create_segment)
        self.transactions = parts.segment(
            _TRANSACTIONS, TransactionTable.create_segment
        )
        self.quotas = parts.segment("quotas", QuotaTable.create_segment)
        self.boxes = parts.segment("boxes", create_boxes)
        self.limits = parts.segment("limits", LimitsPage.create_segment)
        self.log_levels = LogLevels(
            parts.segment(_LOG_LEVELS, LogLevels.create_segment)
        )
        self.principals = Principals(
            parts.segment("principals", Principals.create_segment),
            partial(principals_in_use, self.control.words),
        )
        self.member_sessions = parts.segment(
            "member sessions", MemberSessions.create_segment
        )
        self.client_instances = ClientInstances(
            parts.segment("client instances", ClientInstances.create_segment),
            partial(is_open, self.control.words),
        )

    def _open_bells_and_pairs(self, parts: Parts) -> None:
        """Make or attach doorbells, and socket pairs that carry clients' sockets.

        Doorbells are eventfds that wake processes.
        """
        self.handler_bells = parts.bells("handler bells", HANDLER_IDS)
        self.processor_bells = parts.bells("processor bells", MAX_PROCESSORS)
        # One for all acceptors: it only says "look at the phase".
        self.acceptor_bell = parts.bell("acceptor bell")
        self.housekeeper_bell = parts.bell("housekeeper bell")
        self.supervisor_bell = parts.bell("supervisor bell")  # a config has changed
        # The acceptors' end and the processor's end.
        self.handovers = parts.pairs("handovers", MAX_PROCESSORS)
        self.keeper_bell = parts.bell("keeper bell")
        self.keeper_pair = parts.pair(KEEPER_PAIR)
        self.keeper_link = KeeperLink(self.keeper_pair[0], self.keeper_bell)

    def _build_rings(self, queued_max_requests: int) -> None:
        """Make the objects that use the queues (rings) in shared memory, and its cells.

        A cell has the committed end of a log that several processes share.
        """
        self.ring = RequestRing(self.control, self.handler_bells, queued_max_requests)
        self.control_ring = RequestRing(
            self.control, self.handler_bells, CONTROL_PLANE_REQUESTS, CONTROL_RING
        )
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

    def _initialise(self) -> None:
        """Store the first values of all queues and words in new shared memory."""
        for number in range(CELL_COUNT):
            SharedLogCell.initialise(self.control, number)
        RequestRing.initialise(self.control)
        RequestRing.initialise(self.control, CONTROL_RING)
        CoordinatorLane.initialise(self.control)
        ConnectionLedger.initialise(self.limits)
        for processor in range(MAX_PROCESSORS):
            ResponseRing.initialise(self.control, processor)
        for handler in range(HANDLER_IDS):
            NotificationRing.initialise(self.control, handler)
        words = self.control.words
        words[HEADER + HEADER_VERSION] = LAYOUT_VERSION
        words[HEADER + HEADER_BOOT_ID] = time.time_ns()
        words[HEADER + HEADER_SUPERVISOR_PID] = os.getpid()
        # Last: `mpbroker ctl` maps the segment from outside at any time, and takes one
        # without the magic number for no broker's (inspect/attach.py).
        words[HEADER + HEADER_MAGIC] = MAGIC

    def inherit_from(self, parts: Mapping[str, Sequence[int]]) -> None:
        """Copy two things from a memory with another layout; nothing else outlives it.

        They are the levels of loggers, and whether all partitions are closed.

        Args:
            parts: the descriptors of the other memory, by name.
        """
        for fd in parts.get(_TRANSACTIONS, ()):
            TransactionTable(self.transactions).inherit(fd)
        for fd in parts.get(_LOG_LEVELS, ()):
            levels = levels_left_in(fd)
            if levels:
                # A damaged page may hold more than there is room for.
                with suppress(ValueError):
                    self.log_levels.change(levels)

    @property
    def control_plane(self) -> int:
        """The index of the control plane's listener; -1: there is no control plane."""
        return self.control.words[HEADER + HEADER_CONTROL_PLANE] - 1

    def ring_of(self, processor: int) -> RequestRing:
        """Return the ring (queue) in which a processor's requests wait for handlers."""
        serves = self.control.words[processor_row(processor) + PROCESSOR_SERVES] - 1
        is_control = serves == self.control_plane >= 0
        return self.control_ring if is_control else self.ring

    def put_back(self, slots: Sequence[int]) -> None:
        """Put requests back on the queues (rings) they came from, for any handler."""
        for processor, of_one in groupby(
            sorted(slots, key=_processor_of), key=_processor_of
        ):
            self.ring_of(processor).put_back(list(of_one))

    @property
    def phase(self) -> int:
        return self.control.words[HEADER + HEADER_PHASE]

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self.control.words[HEADER + HEADER_PHASE] = phase

    def wake_everybody(self) -> None:
        """Wake all processes, after a death or a change of the broker's phase.

        A wake-up may have been lost with the dead process.
        """
        self.ring.forget_sleepers()
        self.control_ring.forget_sleepers()
        for bell in (*self.handler_bells, *self.processor_bells):
            bell.ring()
        self.acceptor_bell.ring()
        self.housekeeper_bell.ring()
        self.keeper_bell.ring()


def _processor_of(slot: int) -> int:
    return slot // SLOTS_PER_PROCESSOR


def set_control_plane(
    memory: BrokerMemory, name: str | None, listeners: Sequence[str]
) -> None:
    """Store which listener (by index) is the control plane's; call it before any fork.

    Args:
        name: the name of that listener; None: there is no control plane.
        listeners: the names of all listeners, by index.
    """
    if name is not None:
        number = listeners.index(name.upper())
        memory.control.words[HEADER + HEADER_CONTROL_PLANE] = number + 1
