"""Take the sockets that a keeper holds, before it is ended on purpose.

The keeper is the process that has a duplicate of each client's socket. If it is killed,
its duplicates are closed. Until the processors have left other duplicates with its
successor, the death of a processor would close its connections. So before a keeper, or
the processors beside it, are ended, the sockets are taken from it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.fdpass import recv_fds, send_fds
from mpbroker.ipc.layout import (
    CONNECTION_COOKIE,
    HEADER,
    HEADER_KEEPER_GUARD,
    connection_row,
)
from mpbroker.network.connection_rows import live_rows
from mpbroker.network.moves.hand_over import HAND_OUT, HAS_ROW, KEEP, MAX_SOCKETS
from mpbroker.network.moves.tcp_counters import socket_cookie
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.upgrade.connection_export import KeptSocket

_LOG = get_logger(__name__)

# A keeper answers within milliseconds. The supervisor handles no death meanwhile.
_PATIENCE_S: Final = 1.0
# A process that dies closes its descriptors first, and has ended a moment later.
_LAST_BREATH_S: Final = 0.1


def sockets_of_keeper(
    memory: BrokerMemory, pidfd: int, patience_s: float
) -> Iterator[tuple[int, KeptSocket]]:
    """Ask the keeper for duplicates of all its sockets; yield them with their cookies.

    The keeper is the process that has a duplicate of each client's socket. A cookie is
    the kernel's number of a socket (SO_COOKIE).

    Args:
        memory: the broker's shared memory.
        pidfd: the pidfd of the keeper; -1: there is no keeper now.
        patience_s: the seconds to wait for each message, which has up to MAX_SOCKETS
            sockets.

    Raises:
        OSError: the keeper has not sent all; the caller closes those that it got.
    """
    if pidfd < 0:
        raise OSError("there is none just now")
    cookies = set()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            message = KEEP.pack(HAND_OUT, -1, 0)
            send_fds(memory.keeper_pair[0], message, [theirs.fileno()])
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        while True:
            ready = dict(poll.poll(patience_s * 1000))
            if ours.fileno() not in ready:
                raise OSError("it has died" if ready else "it does not answer")
            message, fds = recv_fds(ours, KEEP.size, MAX_SOCKETS)
            if not message:
                break
            for fd in fds:
                cookie = cookie_of(fd)
                cookies.add(cookie)
                yield cookie, KeptSocket(fd, *KEEP.unpack(message))
    # The keeper's death looks like the end of its answer. A connection without a socket
    # is no proof of it: one that is being closed has a row, and its socket is gone.
    if _lacks(memory, cookies) and _has_ended(pidfd, _LAST_BREATH_S):
        raise OSError("it has died")


def cookie_of(fd: int) -> int:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        return socket_cookie(sock)
    finally:
        sock.detach()


def _lacks(memory: BrokerMemory, cookies: set[int]) -> bool:
    words = memory.control.words
    return any(
        words[connection_row(row) + CONNECTION_COOKIE] not in cookies
        for row in live_rows(words)
    )


def _has_ended(pidfd: int, patience_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(patience_s * 1000))


def leave_with_successor(memory: BrokerMemory, pidfd: int) -> None:
    """Kill the keeper, and leave its sockets in the queue that its successor reads.

    The keeper is the process that has a duplicate of each client's socket.

    Args:
        memory: the broker's shared memory.
        pidfd: the pidfd of the keeper, which is reaped as after any death.
    """
    kept: list[KeptSocket] = []
    # Before the kill. While we hold them too, a processor that dies takes none along.
    try:
        for _, each in sockets_of_keeper(memory, pidfd, _PATIENCE_S):
            kept.append(each)
    except OSError as error:  # the processors have them, too, unless one dies now
        _LOG.warning("the keeper does not send its sockets: %s", error)
    # Its guard would do what we do, at the same time.
    memory.control.words[HEADER + HEADER_KEEPER_GUARD] = 0
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    # The successor reads the same queue: a keeper that is not dead yet would take from
    # it what is left there, and die with it.
    if _has_ended(pidfd, _PATIENCE_S):
        _leave(memory, kept)
    # Our descriptors last: until the queue has duplicates, they may be the only ones.
    for each in kept:
        os.close(each.fd)


def _leave(memory: BrokerMemory, kept: list[KeptSocket]) -> None:
    sender = memory.keeper_pair[0]
    with_rows = [each.fd for each in kept if each.processor == HAS_ROW]
    try:
        # First those without a row: the processors have no duplicates of them.
        for each in kept:
            if each.processor != HAS_ROW:
                send_fds(sender, KEEP.pack(*each[1:]), [each.fd])
        for first in range(0, len(with_rows), MAX_SOCKETS):
            batch = with_rows[first : first + MAX_SOCKETS]
            send_fds(sender, KEEP.pack(HAS_ROW, -1, 0), batch)
    except OSError as error:  # the queue is full: the processors leave the others
        _LOG.warning("not all sockets are left with the next keeper: %s", error)
