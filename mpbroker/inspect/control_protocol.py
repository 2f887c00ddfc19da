"""The control socket's protocol: its frames, its path, and which peers may use it.

    frame      length of the rest (4 bytes, big-endian), then one msgpack map
    request    {"command": name, "arguments": {...}}
    answer     {"ok": true, "result": ...}
               {"ok": false, "error": one sentence for people}

Each request gets one answer, in order, on a connection that may carry any number of
requests. There is no state between two requests.

Source: unix(7) for the length of paths, SO_PEERCRED and SO_PEERGROUPS.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgpack

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.named_tuple import NamedTuple

SOCKET_NAME: Final = "control.sock"
# A request is a name and some numbers; a longer one does not come from `mpbroker ctl`.
MAX_REQUEST_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024

_LENGTH: Final = struct.Struct(">I")
_MAX_PATH_BYTES: Final = 107  # sun_path without its final zero
# The bytes that _MAX_PATH_BYTES leaves behind "/proc/self/fd/NNNNNNN/".
_MAX_NAME_BYTES: Final = 80
_CREDENTIALS: Final = struct.Struct("=iII")
_SO_PEERGROUPS: Final = 59
_MAX_GROUPS: Final = 65536  # NGROUPS_MAX


class ControlProtocolError(MpbrokerError):
    """Bytes that are not a frame of this protocol: close the connection."""


class ControlSocketError(MpbrokerError):
    """The control socket cannot be made or reached where it should be."""


def encode_frame(value: object, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """Return a value as one frame.

    Raises:
        ControlProtocolError: the frame is longer than its reader would accept.
    """
    data: bytes = msgpack.packb(value)
    if len(data) > max_bytes:
        raise ControlProtocolError(f"{len(data)} bytes in a frame of {max_bytes}")
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Cuts a byte stream into frames, and returns the map in each frame."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether the stream so far ends with a whole frame."""
        return not self._bytes

    @property
    def has_frame(self) -> bool:
        """Whether ``next_map`` would return a map or raise an error."""
        if len(self._bytes) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._bytes)
        whole: bool = len(self._bytes) >= _LENGTH.size + length
        return whole or length > self._max_bytes

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def next_map(self) -> dict[str, Any] | None:
        """Return the next frame's map, or None if more bytes are needed first.

        Raises:
            ControlProtocolError: the length is above the limit, or the bytes after it
                are no msgpack map. The rest of the stream cannot be read.
        """
        if not self.has_frame:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        # Judged before the bytes arrive: a peer cannot make us hold 4 GiB.
        if length > self._max_bytes:
            raise ControlProtocolError(
                f"a frame of {length} bytes; at most {self._max_bytes} are read"
            )
        end = _LENGTH.size + length
        data = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        try:
            value = msgpack.unpackb(data)
        # All errors that msgpack raises for bytes that it cannot read.
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
            raise ControlProtocolError(f"not msgpack: {error}") from None
        if not isinstance(value, dict):
            raise ControlProtocolError(f"{type(value).__name__} instead of a map")
        return value


# -- where ---------------------------------------------------------------------------


def default_socket_path(data_dir: str, runtime_directory: str) -> str:
    """Return the path of a broker's control socket if control.socket.path is not set.

    Args:
        data_dir: the broker's first data directory.
        runtime_directory: $RUNTIME_DIRECTORY as systemd sets it, a colon-separated
            list; or empty.
    """
    return os.path.join(runtime_directory.partition(":")[0] or data_dir, SOCKET_NAME)


@contextmanager
def socket_address(path: str) -> Iterator[str]:
    """Yield the address to bind or connect to, for a path of any length.

    A socket's address holds 107 bytes. A longer path is reached through a descriptor
    of its directory, so that a deep data directory is no error.

    Raises:
        ControlSocketError: the directory cannot be opened, or the last name alone is
            too long.
    """
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield path
        return
    directory, name = os.path.split(path)
    size = len(os.fsencode(name))
    if size > _MAX_NAME_BYTES:
        raise ControlSocketError(
            f"control.socket.path={path}: the file's name has {size} bytes, at most"
            f" {_MAX_NAME_BYTES} can be used in a path of more than {_MAX_PATH_BYTES};"
            " shorten it"
        )
    try:
        fd = os.open(directory or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ControlSocketError(f"{directory}: {error.strerror}") from None
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


# -- which peers ---------------------------------------------------------------------


class Peer(NamedTuple):
    """The process at the other end of a socket, as the kernel knows it."""

    pid: int
    uid: int
    groups: frozenset[int]


def peer_of(sock: socket.socket) -> Peer:
    """Return the process that connected to a socket, as the kernel knows it.

    Raises:
        OSError: the peer has disconnected.
    """
    pid, uid, gid = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    groups = {gid}
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:  # before Linux 4.13: the first group alone
        packed = b""
    groups.update(struct.unpack(f"={len(packed) // 4}I", packed))
    return Peer(pid, uid, frozenset(groups))


def may_control(peer: Peer, owner: int, group: int) -> bool:
    """Whether a peer may use the control socket.

    Root may, the broker's own user, and the members of the socket's group.

    Args:
        owner: the id of the broker's user.
        group: the id of the socket's group.
    """
    return peer.uid in (0, owner) or group in peer.groups
