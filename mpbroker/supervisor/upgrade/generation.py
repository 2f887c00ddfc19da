"""A second generation: hand all connections over to another layout of memory.

Processes of two layouts cannot share segments, and so they cannot share a connection.
So all children end, in an order that leaves nothing half done. A process that knows the
old layout describes the connections without rows and slots, their entries in shared
memory (connection_export.py). From that the new program makes segments of its own, and
forks children that find what they would find after a death (connection_import.py).
Clients must not wait for the start of the new program: the children serve until it is
ready, and then a copy of the old program, the leaver, ends them:

    supervisor   forks the leaver, and executes the new program
    program      makes its segments, and reports that it is ready
    leaver       tells acceptors and handlers to retire: they answer what they have
                 taken and put back the rest
    leaver       asks the keeper for all sockets
    leaver       kills processors, coordinator and housekeeper: their rows, their logs
                 and the kernel say how far they were
    leaver       describes the connections, and sends all to the program
    program      makes rows and slots; kills the keeper; forks

Until the keeper is killed nothing is lost: the new program can become the old one,
which finds dead children and forks others over the same memory. After that, the way
back is the same procedure in the other direction.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgpack

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.ipc.fdpass import send_fds
from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HANDLER_ACTIVE_CONTROL,
    HANDLER_ACTIVE_DATA,
    HEADER,
    HEADER_RETIRING,
    RowStatus,
    handler_row,
)
from mpbroker.metadata.topics import TopicRegistry
from mpbroker.network.moves.hand_over import MAX_SOCKETS
from mpbroker.supervisor.become_child import become_child
from mpbroker.supervisor.child import KEEPER_FILLS_S, Child, Role
from mpbroker.supervisor.loop import fork
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.repair.recovery import Death
from mpbroker.supervisor.upgrade.connection_export import (
    ConnectionRecord,
    KeptSocket,
    export_connections,
)
from mpbroker.supervisor.upgrade.keeper_sockets import sockets_of_keeper

if TYPE_CHECKING:
    from mpbroker.supervisor.upgrade.parent import Parent

_LOG = get_logger(__name__)

# Requests that are being executed may take this long; no other request is answered
# meanwhile. It is generous: on a busy machine a second passes easily, and a failed
# upgrade is a pause for clients as well.
_RETIRE_S: Final = 10.0
_KILL_S: Final = 10.0
_COLLECT_S: Final = 2.0
_RETIRING: Final = (Role.ACCEPTOR, Role.HANDLER)
_KILLED: Final = tuple(role for role in Role if role not in (*_RETIRING, Role.KEEPER))


class GenerationError(MpbrokerError):
    """The children could not be ended in order; they are started again."""


class Leaver:
    """The process that ends the old program's children in an upgrade.

    Args:
        supervisor: the parent of the children.
        memory: the shared memory of the children.
        registry: the supervisor's view of the metadata log.
        by_force: whether a child that does not retire in time is killed; otherwise the
            upgrade fails.
    """

    def __init__(
        self,
        supervisor: Parent,
        memory: BrokerMemory,
        registry: TopicRegistry,
        *,
        by_force: bool,
    ) -> None:
        self._supervisor = supervisor
        self._memory = memory
        self._words = memory.control.words
        self._registry = registry
        self._sockets: dict[int, KeptSocket] = dict(supervisor.sockets_kept)
        self._by_force = by_force

    def fork(self) -> tuple[socket.socket, int]:
        """Fork the process that ends the children; return a socket to it, and its id.

        Raises:
            GenerationError: this process (the leaver) cannot be forked, or the keeper
                of sockets is so new that it may not have all sockets.
        """
        for child in self._of(Role.KEEPER):
            if child.age_s < KEEPER_FILLS_S and not self._by_force:
                raise GenerationError("the keeper is new, and may lack sockets")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def begin() -> None:
            ours.close()
            self._run(theirs)

        try:
            pid = fork(begin)
        except OSError as error:
            ours.close()
            raise GenerationError(f"fork: {error.strerror}") from error
        finally:
            theirs.close()
        return ours, pid

    def _run(self, link: socket.socket) -> None:
        # The control socket, for example, must be closed in every process before the
        # new program makes another at its path.
        wanted = {child.pidfd for child in self._supervisor.children}
        wanted.update(kept.fd for kept in self._sockets.values())
        for fd in self._supervisor.only_ours - wanted:
            os.close(fd)
        become_child("leaver", self._memory)
        if not link.recv(16):
            return  # the new program has failed: there is nothing to do
        try:
            records = self._export()
        except (GenerationError, OSError) as error:
            self._take_orders_back()
            link.send(msgpack.packb([str(error), 0]))
            return
        self._take_orders_back()
        self._send(link, records)

    def _send(self, link: socket.socket, records: list[ConnectionRecord]) -> None:
        file = os.memfd_create("mpbroker-connections", os.MFD_CLOEXEC)
        with open(file, "wb") as writer:
            msgpack.pack([records, self._logs()], writer)
            writer.flush()
            fds = [file, self._memory.arena.fd]
            send_fds(link, msgpack.packb(["", len(records)]), fds)
            for first in range(0, len(records), MAX_SOCKETS):
                batch = records[first : first + MAX_SOCKETS]
                send_fds(link, b"sockets", [record.fd for record in batch])

    def _export(self) -> list[ConnectionRecord]:
        """End all children but the keeper of sockets; describe their connections.

        The keeper is the process that has a duplicate of each client's socket.

        Raises:
            GenerationError: the children did not end in time.
        """
        started = time.monotonic()
        # Whatever fails from here on, the old program comes back to memory that is
        # whole and to children of which some are dead: it repairs after them and forks
        # others. Therefore _run() takes back the orders to retire in the end.
        self._retire()
        retired = time.monotonic()
        # Before the processors are killed: the keeper may die at any time, and until it
        # has given us its duplicates only they have the sockets as well.
        self._collect()
        # No process of this memory runs from here on. The deaths have left it in a
        # state that can be described only after the usual repairs.
        self._kill(_KILLED)
        rows, repair = self._rows(), self._supervisor.repair
        for child in self._of(Role.HANDLER):
            repair.after_handler(child.number, rows, Death.KILLED)
        repair.after_coordinator(rows, Death.KILLED)
        for child in self._of(Role.PROCESSOR):
            repair.after_processor(child.number)
        repair.hold_no_more()
        answered = {slot for ring in self._memory.responses for slot in ring.waiting()}
        found = export_connections(
            self._words, self._memory.arena, self._sockets, answered
        )
        records = list(found)
        _LOG.info(
            "generation: %d connections described, %d of them at a request; %d ms, of"
            " which %d for what was being executed",
            len(records),
            sum(record.request is not None for record in records),
            (time.monotonic() - started) * 1000,
            (retired - started) * 1000,
        )
        return records

    def _rows(self) -> int:
        self._registry.catch_up()
        return self._registry.row_count

    def _logs(self) -> list[tuple[str, int, int, int]]:
        """Return topic, partition, log start and log end of all loaded partitions.

        The log end is 0 if a process was killed during a sync of the log: the kernel
        may have told it alone of a failed write, so the new program must check what the
        disk has of this log.
        """
        found = []
        for index in range(self._rows()):
            row = self._memory.table.row(index)
            partition = self._registry.partition_by_row(index)
            if partition is not None and row.status == RowStatus.ONLINE:
                found.append(
                    (
                        partition.topic.name,
                        partition[1],
                        row.log_start_offset,
                        0 if row.is_sync_in_doubt else row.log_end_offset,
                    )
                )
        return found

    def _take_orders_back(self) -> None:
        """Withdraw the orders to retire from shared memory, as the upgrade has failed.

        Children forked later would obey them.
        """
        for child in self._of(*_RETIRING):
            if child.role is Role.HANDLER:
                active = (
                    HANDLER_ACTIVE_DATA
                    if child.listener < 0
                    else HANDLER_ACTIVE_CONTROL
                )
                self._words[handler_row(child.number) + HANDLER_ACTIVE] = active
            else:
                self._words[HEADER + HEADER_RETIRING + child.listener] = 0

    def _of(self, *roles: Role) -> list[Child]:
        return [child for child in self._supervisor.children if child.role in roles]

    def _retire(self) -> None:
        words = self._words
        for child in self._of(*_RETIRING):
            if child.role is Role.HANDLER:
                words[handler_row(child.number) + HANDLER_ACTIVE] = 0
                self._memory.handler_bells[child.number].ring()
            elif child.is_alive:
                words[HEADER + HEADER_RETIRING + child.listener] = child.pid
        self._memory.acceptor_bell.ring()
        late = self._wait(self._of(*_RETIRING), _RETIRE_S)
        if late and not self._by_force:
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
            raise GenerationError(f"{len(late)} processes do not end: a disk hangs")

    def _wait(self, children: Iterable[Child], patience_s: float) -> list[Child]:
        """Wait for children to end; return those that have not ended in time.

        Their parent, the supervisor, reaps them.
        """
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
                del waiting[pidfd]
        return list(waiting.values())

    def _collect(self) -> None:
        """Get all clients' sockets from the keeper, which has duplicates of them.

        Keep those that this process has not received before.

        Raises:
            GenerationError: the keeper does not send them.
        """
        memory, (keeper,) = self._memory, self._of(Role.KEEPER)
        try:
            for cookie, kept in sockets_of_keeper(memory, keeper.pidfd, _COLLECT_S):
                self._sockets.setdefault(cookie, kept)
        except OSError as error:
            if not self._by_force:
                raise GenerationError(
                    f"the keeper does not send its sockets: {error}"
                ) from error
