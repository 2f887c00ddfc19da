"""Read the kernel's TCP counters: how many bytes a connection received and sent.

A process may be killed between a system call and the store that notes its result. The
kernel's counters are right even then. Both sums are exact whenever no process reads
from the socket or writes to it:

    received = tcpi_bytes_received - bytes in the receive queue - 1 for a FIN
    sent     = tcpi_bytes_acked + bytes in the send queue

``counters_are_exact`` tests them on a connection of our own before they are used.

Source: tcp(7), SIOCINQ, SIOCOUTQ; linux/tcp.h, struct tcp_info; RFC 4898.
"""

import array
import fcntl
import os
import socket
import struct
import termios
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import HEADER, HEADER_COUNTERS

SO_COOKIE: Final = 57  # asm-generic/socket.h; a cookie is used once until a reboot
_ESTABLISHED: Final = 1
_CLOSE_WAIT: Final = 8
_INFO_BYTES: Final = 136
_COUNTERS: Final = struct.Struct("=QQ")
_COUNTERS_AT: Final = 120  # tcpi_bytes_acked, tcpi_bytes_received
_COOKIE: Final = struct.Struct("=q")


class StreamCounts(NamedTuple):
    """Holds the numbers of bytes that a connection has received and sent so far."""

    received: int  # bytes that we have taken from the kernel, ever
    sent: int  # bytes that we have given to the kernel, ever
    peer_has_ended: bool  # its FIN has come: no bytes follow those in the queue


def socket_cookie(sock: socket.socket) -> int:
    """Return the kernel's number of a socket, the same through every duplicate."""
    (cookie,) = _COOKIE.unpack(sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))
    return int(cookie)


def stream_counts(sock: socket.socket) -> StreamCounts | None:
    """Count a TCP connection's bytes; return None if the connection has ended.

    No process may read from the socket or write to it meanwhile.

    Raises:
        OSError: the socket is no TCP socket.
    """
    while True:
        acked, received, state = _tcp_info(sock)
        waiting_in = _queued(sock, termios.FIONREAD)
        waiting_out = _queued(sock, termios.TIOCOUTQ)
        # The peer may send and acknowledge in between: repeat until nothing changed.
        if (acked, received, state) == _tcp_info(sock):
            break
    if state not in (_ESTABLISHED, _CLOSE_WAIT):
        return None
    ended = state == _CLOSE_WAIT
    return StreamCounts(received - waiting_in - ended, acked + waiting_out, ended)


def _tcp_info(sock: socket.socket) -> tuple[int, int, int]:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return 0, 0, 0  # a kernel before 4.1 does not count
    acked, received = _COUNTERS.unpack_from(info, _COUNTERS_AT)
    return acked, received, info[0]


def _queued(sock: socket.socket, request: int) -> int:
    value = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), request, value)
    return value[0]


def are_relied_on(words: memoryview) -> bool:
    """Return whether this kernel's counters are exact; test them if that is unknown.

    Args:
        words: the words of the control segment, shared memory that keeps the result: 1
            (exact), -1 (not exact), or 0 before any test. The result of a test is
            stored.
    """
    if not words[HEADER + HEADER_COUNTERS]:
        words[HEADER + HEADER_COUNTERS] = 1 if counters_are_exact() else -1
    relied_on: bool = words[HEADER + HEADER_COUNTERS] == 1
    return relied_on


def counters_are_exact() -> bool:
    """Test the counters on a loopback connection: receive, send, sendfile, a FIN.

    Return False also if no such connection can be made.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname(), timeout=1.0)
            accepted, _ = server.accept()
        with client, accepted:
            return _count(client, accepted)
    except OSError:
        return False


def _count(client: socket.socket, sock: socket.socket) -> bool:
    sock.settimeout(1.0)
    if stream_counts(sock) != (0, 0, False):
        return False
    client.sendall(bytes(1000))
    received = len(sock.recv(300))
    sock.sendall(bytes(200))
    if stream_counts(sock) != (received, 200, False):
        return False
    file = os.memfd_create("mpbroker-counters", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, 5000)
        sent = 200 + os.sendfile(sock.fileno(), file, 0, 5000)
    finally:
        os.close(file)
    if stream_counts(sock) != (received, sent, False):
        return False
    client.shutdown(socket.SHUT_WR)
    while received < 1000:
        received += len(sock.recv(1000))
    return sock.recv(1) == b"" and stream_counts(sock) == (1000, sent, True)
