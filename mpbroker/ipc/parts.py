"""The descriptors that shared memory consists of: made, or inherited over an exec.

A supervisor that replaces its own program keeps its process id, its children, and the
descriptors that it does not close. What they are is told to the new program by name;
it asks for the same names in the same way, and gets what is there instead of new ones.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.errors import IpcError
from mpbroker.ipc.segment import Segment

# More than the acceptor's credit of connections, so that it is no second limit.
_PAIR_BUFFER: Final = 256 * 1024


class Parts:
    """Where segments, doorbells and socket pairs come from.

    Args:
        inherited: what a program before us had, by name; None: nothing.
        listeners: the same where nothing else is inherited, since only memory is laid
            out in another way.

    Attributes:
        fds: what was asked for so far, by name.
    """

    def __init__(
        self,
        inherited: Mapping[str, Sequence[int]] | None = None,
        listeners: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._inherited = inherited
        self._listeners = inherited or listeners or {}
        self.fds: dict[str, list[int]] = {}

    @property
    def are_inherited(self) -> bool:
        return self._inherited is not None

    def segment(self, name: str, make: Callable[[], Segment]) -> Segment:
        found = self._take(name, 1)
        if found is None:
            segment = make()
        else:
            segment = Segment(found[0], os.fstat(found[0]).st_size)
        self.fds[name] = [segment.fd]
        return segment

    def listening(self, name: str, make: Callable[[], socket.socket]) -> socket.socket:
        """A socket, which a program before us may have had, or not."""
        found = self._listeners.get(name, ())
        sock = socket.socket(fileno=found[0]) if found else make()
        self.fds[name] = [sock.fileno()]
        return sock

    def bell(self, name: str) -> Doorbell:
        return self.bells(name, 1)[0]

    def bells(self, name: str, count: int) -> list[Doorbell]:
        found = self._take(name, count)
        bells = [Doorbell(fd) for fd in found] if found else []
        bells = bells or [Doorbell() for _ in range(count)]
        self.fds[name] = [bell.fd for bell in bells]
        return bells

    def pair(self, name: str) -> tuple[socket.socket, socket.socket]:
        return self.pairs(name, 1)[0]

    def pairs(self, name: str, count: int) -> list[tuple[socket.socket, socket.socket]]:
        """Pairs of Unix sockets, each the sender's end and the receiver's."""
        found = self._take(name, 2 * count)
        if found is None:
            pairs = [_make_pair() for _ in range(count)]
        else:
            ends = [socket.socket(fileno=fd) for fd in found]
            pairs = list(zip(ends[::2], ends[1::2], strict=True))
        self.fds[name] = [end.fileno() for pair in pairs for end in pair]
        return pairs

    def _take(self, name: str, count: int) -> Sequence[int] | None:
        if self._inherited is None:
            return None
        found = self._inherited.get(name, ())
        if len(found) != count:
            raise IpcError(f"{len(found)} descriptors of {name} inherited, not {count}")
        return found


def _make_pair() -> tuple[socket.socket, socket.socket]:
    sender, receiver = socket.socketpair(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
    )
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PAIR_BUFFER)
    return sender, receiver
