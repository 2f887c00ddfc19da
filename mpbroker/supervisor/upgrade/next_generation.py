"""Begin a new generation of children with the old one's connections and logs.

See generation.py for the whole procedure: an upgrade to another layout of memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgpack

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.fdpass import recv_fds, send_fds
from mpbroker.network.moves.hand_over import HAS_ROW, KEEP, MAX_SOCKETS
from mpbroker.supervisor.child import ChildState, Role
from mpbroker.supervisor.memory import KEEPER_PAIR, BrokerMemory
from mpbroker.supervisor.upgrade.connection_export import ConnectionRecord, KeptSocket
from mpbroker.supervisor.upgrade.connection_import import ConnectionImport
from mpbroker.supervisor.upgrade.keeper_sockets import cookie_of
from mpbroker.supervisor.upgrade.manifest import Manifest, TakeoverError

if TYPE_CHECKING:
    from mpbroker.supervisor.upgrade.parent import Parent

_LOG = get_logger(__name__)

# Longer than the leaver takes before it gives up.
_LEAVE_S: Final = 20.0
# New children may take so long to serve; then this program goes back.
_SERVE_S: Final = 10.0
_LOOK_S: Final = 0.02
_MAX_FAILURES: Final = 3
_HEAD_BYTES: Final = 4096


class Left(NamedTuple):
    """The connections and logs that an old program's children have left at their end.

    Only the keeper, which has duplicates of clients' sockets, is still alive.
    """

    records: list[ConnectionRecord]
    arena_fd: int  # holds the bytes that the records name
    logs: list[tuple[str, int, int, int]]  # topic, partition, log start, log end


def take_over_from(before: Manifest) -> Left:
    """Have the old program's children ended; return what they have left.

    The leaver, a process of the old program (see generation.py), ends them.

    Raises:
        TakeoverError: the children could not be ended; the old program can go on.
    """
    with socket.socket(fileno=before.generation) as link:
        link.settimeout(_LEAVE_S)
        try:
            link.send(b"go")
            head, fds = recv_fds(link, _HEAD_BYTES, MAX_SOCKETS)
            error, count = msgpack.unpackb(head) if head else ("the leaver died", 0)
            if error:
                raise TakeoverError(error)
            records_fd, arena_fd = fds
            sockets: list[int] = []
            while len(sockets) < count:
                message, batch = recv_fds(link, _HEAD_BYTES, MAX_SOCKETS)
                if not message:
                    raise TakeoverError("the leaver died")
                sockets.extend(batch)
        except (OSError, ValueError) as failure:
            raise TakeoverError(f"the leaver does not answer: {failure}") from failure
    with open(records_fd, "rb") as file:
        data = os.pread(records_fd, os.fstat(file.fileno()).st_size, 0)
    try:
        packed, logs = msgpack.unpackb(data)
        records = [
            ConnectionRecord.of(each)._replace(fd=fd)
            for each, fd in zip(packed, sockets, strict=True)
        ]
    except (TypeError, ValueError) as failure:
        raise TakeoverError(
            f"the running version describes connections in a way that is not known"
            f" here: {failure}; restart the service instead"
        ) from failure
    os.waitpid(before.leaver, 0)
    return Left(records, arena_fd, logs)


def give_back(
    before: Manifest, left: Left, command: list[str], going_back: str
) -> Manifest:
    """Return what the old program needs to go on: its manifest, a list of its parts.

    This is the way back before any connection is taken over.

    The clients' sockets are put into the queue of the old keeper (the process with a
    duplicate of each): if the keeper has died by now, its successor finds them there.

    Args:
        before: the old program's manifest.
        left: the connections that the old program's children have left.
        command: the command that starts this program.
        going_back: the reason for which this program goes back.
    """
    fds = [each.fd for each in left.records]
    sender = os.dup(before.parts[KEEPER_PAIR][0])
    with socket.socket(fileno=sender) as link, contextlib.suppress(OSError):
        for first in range(0, len(fds), MAX_SOCKETS):
            batch = fds[first : first + MAX_SOCKETS]
            send_fds(link, KEEP.pack(HAS_ROW, -1, 0), batch)
    return before.untouched(command, going_back)


class NextGeneration:
    """Takes over connections, and watches until the new children serve them.

    Attributes:
        sockets: duplicates of the clients' sockets, by cookie. They are kept until the
            upgrade is proved, since the old program may need them again.
    """

    def __init__(self, supervisor: Parent, memory: BrokerMemory) -> None:
        self._supervisor = supervisor
        self._memory = memory
        self.sockets: dict[int, KeptSocket] = {}
        self._begun = 0.0

    def begin(self, left: Left) -> None:
        """Put the connections into this program's memory, before the first fork.

        Raises:
            TakeoverError: there are more connections than the queue takes by which the
                keeper of sockets gets them.
        """
        started = time.monotonic()
        numbers: dict[int, list[int]] = {}
        handlers = []
        for child in self._supervisor.children:
            if child.role is Role.PROCESSOR:
                numbers.setdefault(child.listener, []).append(child.number)
            elif child.role is Role.HANDLER:
                handlers.append(child.number)
        size = os.fstat(left.arena_fd).st_size
        memory, now = self._memory, time.monotonic_ns()
        with mmap.mmap(left.arena_fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as arena:
            made = ConnectionImport(
                memory.control,
                memory.arena,
                memory.arena_layout,
                numbers,
                handlers,
                lambda offset, length: arena[offset : offset + length],
            )
            lost = {each.fd for each in left.records if not made.add(each, now)}
        # The rows are written, and no process reads them yet: no child of ours is
        # forked, and the old program, if we fail, knows nothing of this memory. Its
        # keeper has every socket until bury().
        memory.put_back(made.in_hand)
        kept = [each.fd for each in left.records if each.fd not in lost]
        self._keep(kept)
        for fd in (*lost, left.arena_fd):
            os.close(fd)
        self._begun = time.monotonic()
        self._supervisor.every(_LOOK_S, self._watch_start)
        _LOG.info(
            "generation: %d connections carried on, %d requests in hand, %d"
            " connections lost; %d ms",
            len(kept),
            len(made.in_hand),
            len(lost),
            (self._begun - started) * 1000,
        )

    def _keep(self, fds: Sequence[int]) -> None:
        """Leave duplicates of clients' sockets in the queue of our keeper.

        The keeper, the process that has a duplicate of each, is not forked yet.
        """
        sender = self._memory.keeper_pair[0]
        for first in range(0, len(fds), MAX_SOCKETS):
            batch = list(fds[first : first + MAX_SOCKETS])
            try:
                send_fds(sender, KEEP.pack(HAS_ROW, -1, 0), batch)
            except OSError as error:
                raise TakeoverError(
                    f"{len(fds)} connections are more than can be handed over: {error}"
                ) from error
        for fd in fds:
            self.sockets[cookie_of(fd)] = KeptSocket(fd, HAS_ROW, -1, 0)
            self._supervisor.only_ours.add(fd)

    def _watch_start(self) -> None:
        """Raise TakeoverError if the new children do not all serve within 10 s."""
        if not self._begun:
            return
        children = self._supervisor.children
        if all(child.state is ChildState.READY for child in children):
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

    def forget_sockets(self) -> None:
        """Close our duplicates of clients' sockets, as the new program works.

        The keeper, the process that holds duplicates, has its own.
        """
        for kept in self.sockets.values():
            self._supervisor.only_ours.discard(kept.fd)
            os.close(kept.fd)
        self.sockets.clear()  # the same dict is the supervisor's sockets_kept


def bury(before: Manifest, ours: Mapping[str, Sequence[int]]) -> None:
    """Kill what is left of the old program's processes, and close its descriptors.

    After this there is no way back to the old program.

    Args:
        before: the manifest of the old program, the list of what it has handed over.
        ours: the descriptors that this program's memory uses, by name. They stay open,
            also if the old program's manifest names them.
    """
    for record in before.records():
        if record.pid:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(record.pid, signal.SIGKILL)
                os.waitpid(record.pid, 0)
    used = {fd for fds in ours.values() for fd in fds}
    for fds in before.parts.values():
        for fd in set(fds) - used:
            os.close(fd)
