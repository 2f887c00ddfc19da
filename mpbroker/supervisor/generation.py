"""A second generation: hand all connections over to a layout that is not ours.

Processes of two layouts cannot share segments, and so not a connection either. So all
children end, in an order in which nothing is half done; what they have left is
described without rows and slots (network/connection_export.py); and the next program
makes segments of its own of it, and forks children that find what they would find after
a death (network/connection_import.py):

    acceptors, handlers   told to retire: answer what they have taken, put back the rest
    processors            killed: their rows and the kernel say where they were
    coordinator, others   killed: their logs say where they were
    keeper                hands all sockets to us, and is killed
    the program           is replaced; memory that nobody maps any more goes with it

Until the last step nothing has been lost, and giving up means to fork the children
again. After it the next program can go back by doing the same.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import msgpack

from mpbroker.errors import MpbrokerError
from mpbroker.ipc.fdpass import recv_fds, send_fds
from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HEADER,
    HEADER_RETIRING,
    handler_row,
)
from mpbroker.network.connection_export import (
    ConnectionRecord,
    KeptSocket,
    export_connections,
)
from mpbroker.network.connection_import import ConnectionImport
from mpbroker.network.hand_over import HAND_OUT, HAS_ROW, KEEP, MAX_SOCKETS
from mpbroker.network.tcp_counters import socket_cookie
from mpbroker.supervisor.child import Child, Role
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.recovery import Repair
from mpbroker.supervisor.takeover import TakeoverError

_LOG = logging.getLogger(__name__)

# So long requests that are being executed may take; nobody is answered meanwhile.
_RETIRE_S: Final = 2.0
_KILL_S: Final = 10.0
_COLLECT_S: Final = 2.0
# A keeper that lives so long has been left all sockets.
_KEEPER_S: Final = 1.0
# So long new children may take to serve, until the program before us is back.
_SERVE_S: Final = 10.0
_LOOK_S: Final = 0.05
_MAX_FAILURES: Final = 3
_RETIRING: Final = (Role.ACCEPTOR, Role.HANDLER)
_KILLED: Final = (Role.PROCESSOR, Role.COORDINATOR, Role.HOUSEKEEPER)


class GenerationError(MpbrokerError):
    """The children could not be stopped in order; they are started again."""


class Export(NamedTuple):
    """Descriptors for the next program, which are all it needs of our memory."""

    records: int  # memfd: msgpack, a list of ConnectionRecords
    arena: int  # memfd: the bytes that the records name
    sockets: list[int]

    @property
    def fds(self) -> list[int]:
        return [self.records, self.arena, *self.sockets]


class Family(Protocol):
    """What is used of the supervisor."""

    children: list[Child]
    only_ours: set[int]
    repair: Repair

    def unwatch(self, fd: int) -> None: ...

    def every(self, interval_s: float, run: Callable[[], None]) -> None: ...


class Generation:
    """The end of one generation of children, and the beginning of the next.

    Args:
        partition_rows: how many rows of the partition table are in use.
    """

    def __init__(
        self, family: Family, memory: BrokerMemory, partition_rows: Callable[[], int]
    ) -> None:
        self._family = family
        self._memory = memory
        self._words = memory.control.words
        self._partition_rows = partition_rows
        self._sockets: dict[int, KeptSocket] = {}  # by cookie
        self._records = -1
        self._begun = 0.0

    # -- the end -------------------------------------------------------------------

    def export(self, *, by_force: bool = False) -> Export:
        """End all children and describe their connections.

        Args:
            by_force: who does not retire in time is killed, since there is no way on.

        Raises:
            GenerationError: it took too long; ``resume`` starts the children again.
        """
        started = time.monotonic()
        for child in self._of(Role.KEEPER):
            if started - child.started_at < _KEEPER_S and not by_force:
                raise GenerationError("the keeper is new, and may lack sockets")
        self._retire(by_force)
        retired = time.monotonic()
        self._kill(_KILLED)
        rows = self._partition_rows()
        for child in self._of(Role.COORDINATOR):
            self._family.repair.after_coordinator(rows, was_killed=True)
        for child in self._of(Role.PROCESSOR):
            self._family.repair.after_processor(child.number)
        self._collect(by_force)
        self._kill((Role.KEEPER,))
        answered = {slot for ring in self._memory.responses for slot in ring.waiting()}
        found = export_connections(
            self._words, self._memory.arena, self._sockets, answered
        )
        records = list(found)
        self._records = os.memfd_create("mpbroker-connections", os.MFD_CLOEXEC)
        with open(self._records, "wb", closefd=False) as file:
            msgpack.pack(records, file)
        _LOG.info(
            "generation: %d connections described, %d of them at a request; %d ms, of"
            " which %d for what was being executed",
            len(records),
            sum(record.request is not None for record in records),
            (time.monotonic() - started) * 1000,
            (retired - started) * 1000,
        )
        return Export(
            self._records, self._memory.arena.fd, [record.fd for record in records]
        )

    def resume(self) -> None:
        """Have the supervisor fork all children again, over the memory as it is."""
        words = self._words
        for child in self._family.children:
            if child.role is Role.HANDLER:
                words[handler_row(child.number) + HANDLER_ACTIVE] = 1
            elif child.role is Role.ACCEPTOR:
                words[HEADER + HEADER_RETIRING + child.listener] = 0
        self.forget_sockets()
        if self._records >= 0:
            os.close(self._records)
            self._records = -1
        self._memory.wake_everybody()

    def _of(self, *roles: Role) -> list[Child]:
        return [child for child in self._family.children if child.role in roles]

    def _retire(self, by_force: bool) -> None:
        words = self._words
        for child in self._of(*_RETIRING):
            if child.role is Role.HANDLER:
                words[handler_row(child.number) + HANDLER_ACTIVE] = 0
                self._memory.handler_bells[child.number].ring()
            elif child.is_alive:
                words[HEADER + HEADER_RETIRING + child.listener] = child.pid
        self._memory.acceptor_bell.ring()
        late = self._wait(self._of(*_RETIRING), _RETIRE_S)
        if late and not by_force:
            names = ", ".join(f"{each.role.value} {each.number}" for each in late)
            raise GenerationError(
                f"{names}: still at a request after {_RETIRE_S:g} s; try again when"
                " fewer answers wait for slow clients or a slow disk"
            )
        self._kill(_RETIRING)

    def _kill(self, roles: Sequence[Role]) -> None:
        children = self._of(*roles)
        for child in children:
            if child.is_alive:
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        late = self._wait(children, _KILL_S)
        if late:
            raise GenerationError(f"{len(late)} processes do not die: a disk hangs")

    def _wait(self, children: Iterable[Child], patience_s: float) -> list[Child]:
        """Bury the children that end in time; return the others."""
        waiting = {child.pidfd: child for child in children if child.is_alive}
        poll = select.poll()
        for pidfd in waiting:
            poll.register(pidfd, select.POLLIN)
        deadline = time.monotonic() + patience_s
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for pidfd, _ in poll.poll(left * 1000):
                poll.unregister(pidfd)
                self._bury(waiting.pop(pidfd))
        return list(waiting.values())

    def _bury(self, child: Child) -> None:
        self._family.unwatch(child.pidfd)
        self._family.only_ours.discard(child.pidfd)
        _, status = os.waitpid(child.pid, 0)
        child.exited(status)
        child.failures, child.restart_at = 0, 0.0
        if child.role is Role.HANDLER and status != 0:
            self._family.repair.after_handler(
                child.number, self._partition_rows(), was_killed=True
            )

    # -- sockets -------------------------------------------------------------------

    def _collect(self, by_force: bool) -> None:
        """Have the keeper give us all sockets, but for those that we still have.

        Raises:
            GenerationError: it does not.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                message = KEEP.pack(HAND_OUT, -1, 0)
                send_fds(self._memory.keeper_pair[0], message, [theirs.fileno()])
            ours.settimeout(_COLLECT_S)
            try:
                while True:
                    message, fds = recv_fds(ours, KEEP.size, MAX_SOCKETS)
                    if not message:
                        return
                    for fd in fds:
                        self._take(fd, *KEEP.unpack(message))
            except OSError as error:
                if not by_force:
                    raise GenerationError(
                        f"the keeper does not give its sockets: {error}"
                    ) from error

    def _take(self, fd: int, processor: int, listener: int, sequence: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd) as sock:
            cookie = socket_cookie(sock)
            if cookie in self._sockets:
                return  # ours is the same; this one is closed
            sock.detach()
        self._sockets[cookie] = KeptSocket(fd, processor, listener, sequence)
        self._family.only_ours.add(fd)

    def forget_sockets(self) -> None:
        """The next generation has them, or this one goes on."""
        for kept in self._sockets.values():
            self._family.only_ours.discard(kept.fd)
            os.close(kept.fd)
        self._sockets = {}

    # -- the beginning -------------------------------------------------------------

    def begin(self, records_fd: int, arena_fd: int) -> None:
        """Make the connections of a generation before us ours, before the first fork.

        The sockets stay ours too, until ``forget_sockets``: there may be a way back.

        Raises:
            TakeoverError: they cannot be read, or be given to the keeper.
        """
        started = time.monotonic()
        data = os.pread(records_fd, os.fstat(records_fd).st_size, 0)
        try:
            records = [ConnectionRecord.of(each) for each in msgpack.unpackb(data)]
        except (TypeError, ValueError) as error:
            raise TakeoverError(f"its connections cannot be read: {error}") from error
        children = self._family.children
        processors: dict[int, list[int]] = {}
        for child in self._of(Role.PROCESSOR):
            processors.setdefault(child.listener, []).append(child.number)
        size = os.fstat(arena_fd).st_size
        with mmap.mmap(arena_fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as before:
            made = ConnectionImport(
                self._memory.control,
                self._memory.arena,
                self._memory.arena_layout,
                processors,
                [child.number for child in children if child.role is Role.HANDLER],
                lambda offset, length: before[offset : offset + length],
            )
            now = time.monotonic_ns()
            lost = [record for record in records if not made.add(record, now)]
        self._memory.ring.put_back(made.in_hand)
        for record in lost:
            os.close(record.fd)
        kept = [record.fd for record in records if record not in lost]
        self._keep(kept)
        os.close(records_fd)
        os.close(arena_fd)
        self._begun = time.monotonic()
        self._family.every(_LOOK_S, self._watch_start)
        _LOG.info(
            "generation: %d connections carried on, %d requests in hand, %d"
            " connections lost; %d ms",
            len(kept),
            len(made.in_hand),
            len(lost),
            (self._begun - started) * 1000,
        )

    def _keep(self, fds: Sequence[int]) -> None:
        """Leave a duplicate of each with the keeper, which is still to be forked."""
        for fd in fds:
            self._take(fd, HAS_ROW, -1, 0)
        sender = self._memory.keeper_pair[0]
        for first in range(0, len(fds), MAX_SOCKETS):
            batch = list(fds[first : first + MAX_SOCKETS])
            try:
                send_fds(sender, KEEP.pack(HAS_ROW, -1, 0), batch)
            except OSError as error:
                raise TakeoverError(
                    f"{len(fds)} connections are more than can be handed over: {error}"
                ) from error

    def _watch_start(self) -> None:
        """Raise TakeoverError if the first children do not work."""
        if not self._begun:
            return
        children = self._family.children
        if all(child.state.name == "READY" for child in children):
            self._begun = 0.0
            return
        for child in children:
            if child.failures >= _MAX_FAILURES:
                raise TakeoverError(
                    f"its {child.role.value} {child.number} died again and again:"
                    f" {child.last_exit}"
                )
        if time.monotonic() - self._begun > _SERVE_S:
            raise TakeoverError("its processes did not all serve in time")

    def close(self) -> None:
        """The broker stops."""
        with contextlib.suppress(OSError):
            self.forget_sockets()
