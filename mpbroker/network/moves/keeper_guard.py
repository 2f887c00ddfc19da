"""The keeper's guard: it has every socket that the keeper has.

When a processor has died, the keeper has the only descriptors of its sockets until the
successor has got them. And for a moment after its own start the keeper has none. If the
keeper is killed, or stopped and therefore killed, its guard (descriptor_guard.py) sends
the next keeper the sockets of all connections that have a row, a record in shared
memory. The next keeper waits for that before it tells processors that it has sent all
it has.

Measured with 50 connections, a processor, and a keeper that was killed or stopped up to
20 ms before or after the processor: without the guard connections were closed in 81 of
96 rounds, with it in none.

A word of shared memory says which guard the next keeper has to wait for. The keeper
stores its guard's process id in this word, and the guard stores 0 when it has sent all
sockets. If the supervisor ends a keeper on purpose, the supervisor has the sockets. It
stores 0 before, so that the guard sends none.

So connections close only if three processes are killed within some ten milliseconds:
their processor, the keeper, and its guard or the next keeper.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final

from mpbroker.ipc.layout import (
    CONNECTION_COOKIE,
    HEADER,
    HEADER_KEEPER_GUARD,
    HEADER_SUPERVISOR_PID,
    connection_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.network.connection_rows import live_rows
from mpbroker.network.descriptor_guard import DescriptorGuard
from mpbroker.network.moves.hand_over import MAX_SOCKETS, KeeperLink
from mpbroker.network.moves.tcp_counters import socket_cookie

_WORD: Final = HEADER + HEADER_KEEPER_GUARD
_RETRY_S: Final = 0.002
# A loaded machine may need this long to start the next keeper, which empties the queue.
_PATIENCE_S: Final = 10.0
# To leave 10,000 sockets takes 50 ms.
_AWAIT_S: Final = 5.0


class KeeperGuard(DescriptorGuard):
    """Keeps the keeper's descriptors open if the keeper dies, and hands them on.

    The guard is a process that shares the keeper's table of descriptors.

    Args:
        control: the control segment, with the records (rows) of all connections.
        link: the way to the next keeper, which gets the sockets.
        entitle: called in the guard; sets the process title, for ``ps``.
    """

    def __init__(
        self, control: Segment, link: KeeperLink, entitle: Callable[[], None]
    ) -> None:
        super().__init__("the keeper", self._leave_sockets, entitle)
        self._words = control.words
        self._link = link

    def post(self) -> int:
        pidfd = super().post()
        self._words[_WORD] = self.pid if pidfd >= 0 else 0
        return pidfd

    def dismiss(self) -> None:
        """End the guard, because the keeper ends without having died.

        The guard then sends no sockets.
        """
        self._words[_WORD] = 0
        self.bury()

    def _leave_sockets(self) -> None:
        """Send the next keeper the sockets of all registered connections.

        This runs in the guard, after the keeper's death. Send none if the keeper was
        ended on purpose, or the supervisor has died.
        """
        if self._words[_WORD] != os.getpid():
            return
        try:
            supervisor = os.pidfd_open(self._words[HEADER + HEADER_SUPERVISOR_PID])
        except ProcessLookupError:
            return  # there will be no next keeper
        try:
            self._leave(list(self._found()), supervisor)
        finally:
            if self._words[_WORD] == os.getpid():  # not the next keeper's guard by now
                self._words[_WORD] = 0

    def _leave(self, socks: list[socket.socket], supervisor: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        for first in range(0, len(socks), MAX_SOCKETS):
            while not self._link.keep(socks[first : first + MAX_SOCKETS]):
                if time.monotonic() > deadline or _has_ended(supervisor):
                    return
                time.sleep(_RETRY_S)

    def _found(self) -> Iterator[socket.socket]:
        """Yield the sockets in the shared descriptor table that have a row.

        A row is the record of a connection in shared memory.
        """
        words = self._words
        in_rows = {
            words[connection_row(row) + CONNECTION_COOKIE] for row in live_rows(words)
        }
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it is no socket
                fd = int(name)
                sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
                try:
                    found = socket_cookie(sock) in in_rows
                except OSError:
                    found = False
                if found:
                    yield sock
                else:
                    sock.detach()


def await_guard(words: memoryview, receive: Callable[[], None]) -> None:
    """Wait until a dead keeper's guard has sent all sockets to the new keeper.

    The guard is a process that had the same sockets as the dead keeper. Return at once
    if there is none, and also when the guard dies or 5 seconds have passed.

    Args:
        words: the words of the control segment.
        receive: receives the sockets that the guard has sent; called again and again.
    """
    guard = words[_WORD]
    if not guard:
        return
    try:
        pidfd = os.pidfd_open(guard)
    except OSError:  # it has ended
        return
    deadline = time.monotonic() + _AWAIT_S
    while words[_WORD] == guard and time.monotonic() < deadline:
        if _has_ended(pidfd, _RETRY_S):
            break
        receive()
    os.close(pidfd)


def _has_ended(pidfd: int, patience_s: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(patience_s * 1000))
