"""The only place of the client that connects, polls, receives and sends.

What it reports is for whoever decides (`NetworkClient`): lists that one `poll` fills
and the next one clears. A connection is a `Channel`; one that encrypts or authenticates
is another class with the same methods, made by `make_channel`.
"""

from __future__ import annotations

import os
import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, Protocol

from mpbroker.client.addresses import Address
from mpbroker.client.client_request import CLOSED_BY_BROKER
from mpbroker.client.errors import AuthenticationError
from mpbroker.client.metadata import Metadata
from mpbroker.client.network_client import NetworkClient
from mpbroker.client.settings import ClientSettings
from mpbroker.protocol.primitives import Buffer

# What one system call may receive: a page for answers to a producer, since to allocate
# more and give it back costs as much as all the rest, up to what lets a fetch of
# megabytes take few of them.
_LEAST_RECEIVE_BYTES: Final = 4096
_RECEIVE_BYTES: Final = 256 * 1024
_PARTS_AT_ONCE: Final = 64  # what one system call may send; below any IOV_MAX


class Channel(Protocol):
    """One connection's bytes, whatever lies between them and the socket."""

    wants_write: bool
    """Whether connecting goes on when the socket has room; else when it has bytes."""
    gathers: bool
    """Whether to send parts costs less than to join them."""

    def fileno(self) -> int: ...

    def finish_connect(self) -> bool:
        """Go on with connecting; return whether it is done.

        Raises:
            OSError: it failed.
            SslAuthenticationError: it must not be tried again.
        """

    def receive(self) -> bytes | None:
        """Return bytes, none at the peer's end, or None if there are none yet."""

    def send(self, data: memoryview) -> int:
        """Return how many bytes were taken, 0 if none can be now. Raises: OSError."""

    def send_parts(self, parts: Sequence[memoryview]) -> int:
        """Do so with parts, one after the other; no more than `_PARTS_AT_ONCE`."""

    def close(self) -> None: ...


class PlaintextChannel:
    """A channel that is its socket."""

    wants_write = True
    gathers = True

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._room = _LEAST_RECEIVE_BYTES

    def fileno(self) -> int:
        return self._socket.fileno()

    def finish_connect(self) -> bool:
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        return True

    def receive(self) -> bytes | None:
        room = self._room
        try:
            data = self._socket.recv(room)
        except BlockingIOError:
            return None
        if len(data) == room:
            self._room = min(room * 8, _RECEIVE_BYTES)
        elif len(data) * 8 < room:
            self._room = max(room // 8, _LEAST_RECEIVE_BYTES)
        return data

    def send(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def send_parts(self, parts: Sequence[memoryview]) -> int:
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        self._socket.close()


class _Connection:
    __slots__ = ("channel", "connected", "outgoing", "watched")

    def __init__(self, channel: Channel, watched: int) -> None:
        self.channel = channel
        self.connected = False
        self.watched = watched  # events that epoll reports
        self.outgoing: deque[memoryview] = deque()


class _WakeUp:
    """An eventfd that is closed when nobody can write to it any more.

    Whoever wakes holds a reference while it writes. With its number alone it might
    write, a moment after the descriptor is closed, into a file that has got the number.
    """

    __slots__ = ("descriptor",)

    def __init__(self) -> None:
        self.descriptor = -1  # if there is none to be had
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class Selector:
    """Non-blocking connections by node id.

    Attributes:
        connected: nodes whose connection was made in the last poll.
        disconnected: nodes whose connection ended in it, with the reason.
        refused: nodes that we do not trust, or that do not trust us, likewise.
        received: bytes that came in it, in order.
        wait_ns: how long polls have waited for something to happen, in all.
        io_ns: how long they have connected, received and sent.
    """

    def __init__(
        self,
        send_buffer_bytes: int = -1,
        receive_buffer_bytes: int = -1,
        make_channel: Callable[[socket.socket, str], Channel] | None = None,
    ) -> None:
        """Open what waking needs; connections come later.

        Args:
            send_buffer_bytes: of every socket; -1 leaves it to the system.
            receive_buffer_bytes: likewise.
            make_channel: from a socket and the host's name; plain text if None.
        """
        self.connected: list[int] = []
        self.disconnected: dict[int, str] = {}
        self.refused: dict[int, AuthenticationError] = {}
        self.received: list[tuple[int, bytes]] = []
        self.wait_ns = self.io_ns = 0
        self._buffers = (
            (socket.SO_SNDBUF, send_buffer_bytes),
            (socket.SO_RCVBUF, receive_buffer_bytes),
        )
        self._make_channel = make_channel or (lambda sock, host: PlaintextChannel(sock))
        self._connections: dict[int, _Connection] = {}
        self._nodes: dict[int, int] = {}  # by descriptor
        self._epoll = select.epoll()
        # Waking costs a system call only while the loop really waits. The loop says
        # so before it looks whether it was woken; who wakes it, the other way round.
        self._is_waiting = self._is_woken = False
        self._wakeup: _WakeUp | None = _WakeUp()
        self._wakeup_descriptor = self._wakeup.descriptor
        self._epoll.register(self._wakeup_descriptor, select.EPOLLIN)

    @classmethod
    def of(cls, settings: ClientSettings) -> Selector:
        """Return a selector whose connections are as the settings say.

        Raises:
            ConfigError: a certificate or key cannot be read.
        """
        return cls(
            settings.send_buffer_bytes,
            settings.receive_buffer_bytes,
            settings.security.make_channels(),
        )

    def connect(self, node: int, address: Address, host: str) -> None:
        """Begin to connect to a numeric address.

        Args:
            node: not connected now.
            address: resolved.
            host: the name it was resolved from.

        Raises:
            OSError: it cannot even be begun; nothing is left of it.
        """
        assert node not in self._connections, f"node {node} is connected already"
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, size in self._buffers:
                if size >= 0:
                    sock.setsockopt(socket.SOL_SOCKET, option, size)
            try:
                sock.connect(address)
            except BlockingIOError:
                pass
            channel = self._make_channel(sock, host)
            watched = select.EPOLLIN | select.EPOLLOUT
            self._epoll.register(channel.fileno(), watched)
        except BaseException:
            sock.close()
            raise
        self._connections[node] = _Connection(channel, watched)
        self._nodes[channel.fileno()] = node

    def is_sending(self, node: int) -> bool:
        """Whether bytes given to `send` wait for room in the socket."""
        connection = self._connections.get(node)
        return connection is not None and bool(connection.outgoing)

    def send(self, node: int, data: bytes) -> None:
        """Send what the socket takes now, and the rest in the polls to come.

        A connection that breaks here is reported by the next poll.
        """
        self.send_parts(node, (data,))

    def send_parts(self, node: int, parts: Sequence[Buffer]) -> None:
        """Send what the socket takes now of these, one after the other; see `send`.

        They are not copied, so they must not change until they are sent.
        """
        connection = self._connections[node]
        if not connection.channel.gathers:
            parts = (b"".join(parts),)
        was_idle = not connection.outgoing
        connection.outgoing += map(memoryview, parts)
        if connection.connected and was_idle:
            self._send(node, connection)

    def close(self, node: int) -> None:
        """Close a connection, if it is there; it is not reported as disconnected."""
        connection = self._connections.pop(node, None)
        if connection is None:
            return
        descriptor = connection.channel.fileno()
        del self._nodes[descriptor]
        try:
            self._epoll.unregister(descriptor)
        finally:
            connection.channel.close()

    def poll(self, timeout_ms: float) -> None:
        """Wait for something to happen, no longer than ``timeout_ms``, and do it."""
        self.connected = []
        self.received = []
        self.disconnected = {}
        self.refused = {}
        wait_s = -1 if timeout_ms == float("inf") else max(0.0, timeout_ms / 1000)
        began_ns = time.perf_counter_ns()
        self._is_waiting = True
        found = self._epoll.poll(0 if self._is_woken else wait_s)
        self._is_waiting = self._is_woken = False
        waited_ns = time.perf_counter_ns()
        self.wait_ns += waited_ns - began_ns
        for descriptor, events in found:
            if descriptor == self._wakeup_descriptor:
                self._drain_wakeup()
                continue
            node = self._nodes.get(descriptor)
            if node is not None:
                self._turn(node, self._connections[node], events)
        if found:
            self.io_ns += time.perf_counter_ns() - waited_ns

    def _turn(self, node: int, connection: _Connection, events: int) -> None:
        try:
            if not connection.connected:
                if not connection.channel.finish_connect():
                    self._watch(connection)
                    return
                connection.connected = True
                self.connected.append(node)
                self._watch(connection)
            if events & ~select.EPOLLOUT:
                data = connection.channel.receive()
                if data:
                    self.received.append((node, data))
                elif data is not None:
                    self._lost(node, CLOSED_BY_BROKER)
                    return
        except AuthenticationError as error:
            self._end(node)
            self.refused[node] = error
            return
        except OSError as error:
            reason = error.strerror or str(error)
            # The system's words begin a sentence; ours do not.
            self._lost(node, reason.lower() if error.errno else reason)
            return
        if connection.outgoing:
            self._send(node, connection)

    def _send(self, node: int, connection: _Connection) -> None:
        outgoing = connection.outgoing
        try:
            while outgoing:
                if len(outgoing) == 1:
                    taken = connection.channel.send(outgoing[0])
                else:
                    parts = list(islice(outgoing, _PARTS_AT_ONCE))
                    taken = connection.channel.send_parts(parts)
                if not taken:
                    break
                while outgoing and taken >= len(outgoing[0]):
                    taken -= len(outgoing.popleft())
                if taken:
                    outgoing[0] = outgoing[0][taken:]
        except OSError:
            # Answers may still lie in the socket, and say what was done: the end is
            # reported when they are read.
            outgoing.clear()
        self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        events = select.EPOLLIN
        wants_write = bool(connection.outgoing)
        if not connection.connected:
            wants_write = connection.channel.wants_write
        if wants_write:
            events |= select.EPOLLOUT
        if events != connection.watched:
            self._epoll.modify(connection.channel.fileno(), events)
            connection.watched = events

    def _lost(self, node: int, reason: str) -> None:
        self._end(node)
        self.disconnected[node] = reason

    def _end(self, node: int) -> None:
        self.close(node)
        if node in self.connected:
            self.connected.remove(node)  # made and lost in one poll: never of use

    def wakeup(self) -> None:
        """End the poll that runs now, or the next one; any thread may call this."""
        self._is_woken = True
        if not self._is_waiting:
            return
        wakeup = self._wakeup
        if wakeup is None:
            return  # closed
        try:
            os.eventfd_write(wakeup.descriptor, 1)
        except BlockingIOError:
            pass  # so often woken that it will wake

    def _drain_wakeup(self) -> None:
        try:
            os.eventfd_read(self._wakeup_descriptor)
        except BlockingIOError:
            pass

    def shutdown(self) -> None:
        """Close everything, even if closing one thing fails."""
        for node in list(self._connections):
            try:
                self.close(node)
            except OSError:
                pass
        self._epoll.close()
        self._wakeup = None


def resolve(host: str, port: int) -> list[Address]:
    """Return the numeric addresses of a host name.

    Raises:
        OSError: it has none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # "a..b", say
        raise socket.gaierror(socket.EAI_NONAME, "no host can be called so") from None
    addresses = [Address(str(entry[4][0]), port) for entry in found]
    return list(dict.fromkeys(addresses))


def monotonic_ms() -> float:
    """Return the time of the clock that all of a client's times are from, in ms."""
    return time.monotonic() * 1000


def make_network_client(
    settings: ClientSettings, metadata: Metadata, rng: random.Random
) -> NetworkClient:
    """Return a client with this machine's sockets, resolver and clock.

    Raises:
        ConfigError: a certificate or key cannot be read.
    """
    wire = Selector.of(settings)
    return NetworkClient(wire, metadata, settings, resolve, monotonic_ms, rng)
