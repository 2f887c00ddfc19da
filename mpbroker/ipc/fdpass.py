"""Pass file descriptors over a Unix socket (SCM_RIGHTS).

A message has a few bytes and its descriptors, and is sent over SOCK_SEQPACKET. The
receiver owns the descriptors and closes them; the sender closes its own copies.

Source: unix(7), cmsg(3).
"""

import array
import os
import socket
from typing import Final

MAX_FDS: Final = 253  # SCM_MAX_FD; one more and sendmsg says EINVAL
_FD_BYTES: Final = array.array("i").itemsize


class FdsDroppedError(OSError):
    """Descriptors did not arrive: RLIMIT_NOFILE is reached in the receiver."""


def send_fds(sock: socket.socket, message: bytes, fds: list[int]) -> None:
    """Send one message with file descriptors over a Unix socket.

    Raises:
        BlockingIOError: the receiver's queue is full; nothing was sent.
        OSError: the receiver is gone.
    """
    rights = array.array("i", fds)
    sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def recv_fds(
    sock: socket.socket, max_message_bytes: int, max_fds: int
) -> tuple[bytes, list[int]]:
    """Receive one message and its file descriptors from a Unix socket.

    Returns:
        The message and the descriptors; (b"", []) if the other end was closed.

    Raises:
        BlockingIOError: no message is there.
        FdsDroppedError: the kernel dropped descriptors; those that came are closed.
    """
    message, fds, is_cut = recv_fds_in_part(sock, max_message_bytes, max_fds)
    if is_cut:
        for fd in fds:
            os.close(fd)
        raise FdsDroppedError(
            f"a message for up to {max_fds} descriptors arrived truncated;"
            " raise the limit of open files (ulimit -n, LimitNOFILE)"
        )
    return message, fds


def recv_fds_in_part(
    sock: socket.socket, max_message_bytes: int, max_fds: int
) -> tuple[bytes, list[int], bool]:
    """Receive one message, also if the kernel dropped some of its descriptors.

    Returns:
        The message (b"": the other end was closed); the descriptors that arrived, which
        are the first ones of the message and belong to the caller; and whether other
        descriptors were dropped.

    Raises:
        BlockingIOError: no message is there.
    """
    space = socket.CMSG_SPACE(max_fds * _FD_BYTES)
    message, ancillary, flags, _ = sock.recvmsg(
        max_message_bytes, space, socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return message, list(fds), bool(flags & socket.MSG_CTRUNC)
