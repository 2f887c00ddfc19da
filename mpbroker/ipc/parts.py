"""Parts: the descriptors of shared memory, newly made or inherited over an exec.

A supervisor that replaces its own program (exec) keeps its process id, its children,
and the descriptors that it does not close. The new program is told the name of each
descriptor. It asks for the same names in the same way, and gets the existing
descriptors instead of new ones.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.errors import IpcError
from mpbroker.ipc.segment import Segment

# Has room for more connections than the acceptor's credit, so it never is the limit.
_PAIR_BUFFER: Final = 256 * 1024


class Parts:
    """Make segments, doorbells and socket pairs, or return the inherited ones.

    Args:
        inherited: the descriptors that the program before the exec left open, by name;
            None: there are none.
        listeners: the listening sockets of that program, by name, if they are all that
            is inherited, because the layout of memory is another one.

    Attributes:
        fds: the descriptors of everything asked for so far, by name.
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
        """Return the listening socket with a name: the inherited one, or a new one."""
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
        """Return pairs of Unix sockets, inherited or new ones.

        Returns:
            ``count`` pairs: the sender's end, and the receiver's end.
        """
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
