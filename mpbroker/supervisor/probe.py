"""A client inside the supervisor that proves that requests pass every stage.

It connects to each listener that this host can reach, and sends two requests at once:
ApiVersions, and Metadata of no topic. The answers have been through an acceptor, a
processor, the request ring, a handler and the processor again. Nothing here blocks: the
supervisor's loop reports what happens to the sockets.

A listener that this host cannot reach (a firewall may admit other hosts alone) says
nothing about the broker. It is told apart from a listener that does not answer.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable, Container, Sequence
from enum import Enum, auto
from typing import Final, Protocol

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.framing import FrameDecoder, encode_frame
from mpbroker.protocol.headers import encode_request_header
from mpbroker.supervisor.listen_sockets import Listener

_CLIENT_ID: Final = "mpbroker-probe"
# Old versions: their answers are short, and begin with the correlation id alone.
_EMPTY_ARRAY: Final = b"\0\0\0\0"
_REQUESTS: Final = (
    (ApiKey.API_VERSIONS, 0, b""),
    (ApiKey.METADATA, 1, _EMPTY_ARRAY),
)
_ASKED: Final = b"".join(
    encode_frame((encode_request_header(key, version, number, _CLIENT_ID), body))
    for number, (key, version, body) in enumerate(_REQUESTS)
)
_MAX_ANSWER_BYTES: Final = 1 << 20
_UNREACHABLE: Final = {
    errno.EADDRNOTAVAIL,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EACCES,
    errno.EPERM,
    errno.EAFNOSUPPORT,
    # We have no descriptor left; the processes that serve may have some.
    errno.EMFILE,
    errno.ENFILE,
}


class Loop(Protocol):
    """An event loop that reports what happens to file descriptors."""

    only_ours: set[int]

    def watch(self, fd: int, events: int, ready: Callable[[int], None]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class Outcome(Enum):
    """The result of a test request to a listener."""

    ANSWERED = auto()
    UNREACHABLE = auto()  # no connection, as this host has no way to the address
    FAILED = auto()  # no connection, or no correct answer to our requests


class Target(NamedTuple):
    """A listener, and the address at which this host can connect to it."""

    name: str
    family: int
    address: tuple[str | int, ...]


def targets_of(listeners: Sequence[Listener]) -> list[Target]:
    """Return where to send test requests: the listeners without TLS or SASL."""
    return [
        _target(listener)
        for listener in listeners
        if listener.endpoint.security_protocol == "PLAINTEXT"
    ]


def _target(listener: Listener) -> Target:
    sock, name = listener.sock, listener.endpoint.listener_name
    family, address = sock.family, sock.getsockname()
    if address[0] == "0.0.0.0":
        address = ("127.0.0.1", address[1])
    elif address[0] == "::":
        if sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
            address = ("::1", address[1])
        else:
            # Many containers have IPv6 sockets and no IPv6 address, not even ::1.
            family, address = socket.AF_INET, ("127.0.0.1", address[1])
    return Target(name, family, address)


class Probe:
    """One connection to one listener, from the attempt to connect to both responses.

    Attributes:
        outcome: None until the probe has ended.
        reason: why the probe did not succeed, as text for people.
    """

    def __init__(self, target: Target, loop: Loop, ended: Callable[[], None]) -> None:
        self.target = target
        self.outcome: Outcome | None = None
        self.reason = ""
        self._loop = loop
        self._ended = ended
        self._decoder = FrameDecoder(_MAX_ANSWER_BYTES)
        self._answered = 0
        self._connected = False
        self._sock: socket.socket | None = None

    def start(self) -> None:
        """Connect; ``ended()`` is called when the probe ends, perhaps in this call."""
        try:
            self._dial()
        except OSError as error:
            self._failed(error)
            self._ended()

    def _dial(self) -> None:
        sock = socket.socket(
            self.target.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        )
        try:
            if self.target.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._loop.watch(sock.fileno(), select.EPOLLOUT, self._ready)
        except OSError:
            sock.close()
            raise
        self._sock = sock
        # A child forked meanwhile must not keep the connection open.
        self._loop.only_ours.add(sock.fileno())
        error = sock.connect_ex(self.target.address)
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))

    def _ready(self, events: int) -> None:
        self._proceed()
        # Outside of _proceed(): an error in the callback is not the server's fault.
        if self.outcome is not None:
            self._ended()

    def _proceed(self) -> None:
        sock = self._sock
        assert sock is not None
        try:
            if not self._connected:
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                self._connected = True
                sock.send(_ASKED)  # some 90 bytes: any socket buffer takes them whole
                self._loop.watch(sock.fileno(), select.EPOLLIN, self._ready)
                return
            chunk = sock.recv(_MAX_ANSWER_BYTES)
            if not chunk:
                self._end(Outcome.FAILED, "the connection was closed unanswered")
                return
            self._decoder.feed(chunk)
            while (answer := self._decoder.next_frame()) is not None:
                self._take(answer)
        except BlockingIOError:
            return  # a spurious event
        except ProtocolError as error:
            self._end(Outcome.FAILED, str(error))
        except OSError as error:
            self._failed(error)

    def _take(self, answer: bytes) -> None:
        if answer[:4] != self._answered.to_bytes(4, "big"):
            raise ProtocolError(
                f"answer {self._answered} begins {answer[:4].hex() or 'with nothing'}"
            )
        if self._answered == 0 and answer[4:6] != b"\0\0":
            raise ProtocolError(f"ApiVersions answered with error {answer[4:6].hex()}")
        self._answered += 1
        if self._answered == len(_REQUESTS):
            self._end(Outcome.ANSWERED)

    def _failed(self, error: OSError) -> None:
        unreachable = not self._connected and error.errno in _UNREACHABLE
        outcome = Outcome.UNREACHABLE if unreachable else Outcome.FAILED
        self._end(outcome, error.strerror or str(error))

    def give_up(self, was_reached: bool) -> None:
        """End the probe, because it has taken too long.

        Args:
            was_reached: whether an earlier probe has reached this listener. Then an
                unfinished connection means that the backlog is full; otherwise, that
                something in between drops the packets.
        """
        if self._connected:
            self._end(Outcome.FAILED, "waited in vain for an answer")
        elif was_reached:
            self._end(Outcome.FAILED, "waited in vain for a connection")
        else:
            self._end(Outcome.UNREACHABLE, "nothing answers the attempt to connect")
        self._ended()

    def _end(self, outcome: Outcome, reason: str = "") -> None:
        if self.outcome is not None:
            return
        self.outcome, self.reason = outcome, reason
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.unwatch(sock.fileno())
            self._loop.only_ours.discard(sock.fileno())
            sock.close()


class Round:
    """A probe (a test request) of each listener, all at the same time.

    Args:
        targets: the targets to probe; without any, the round ends as soon as it begins.
        loop: reports what happens to the sockets.
        ended: called once, with the round, when the last probe has ended.
    """

    def __init__(
        self, targets: Sequence[Target], loop: Loop, ended: Callable[[Round], None]
    ) -> None:
        self.probes = [Probe(target, loop, self._one_ended) for target in targets]
        self._ended = ended
        self._running = 1 + len(self.probes)  # one is start() itself

    def start(self) -> None:
        """Begin the test requests to all listeners."""
        for probe in self.probes:
            probe.start()
        self._one_ended()

    def _one_ended(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._ended(self)

    def give_up(self, reached: Container[str]) -> None:
        """End the test requests that still have no answer; see `Probe.give_up`.

        Args:
            reached: names of the listeners that an earlier probe has reached.
        """
        for probe in self.probes:
            if probe.outcome is None:
                probe.give_up(probe.target.name in reached)

    def names(self, outcome: Outcome) -> list[str]:
        """Return the listeners whose test requests had this outcome, by name."""
        return [each.target.name for each in self.probes if each.outcome is outcome]

    def explain(self, outcome: Outcome) -> str:
        """Return why test requests had this outcome, as one text for people."""
        return "; ".join(
            f"{each.target.name}: {each.reason}"
            for each in self.probes
            if each.outcome is outcome
        )
