"""Selector: the only place of the client that connects, polls, receives and sends.

It decides nothing: `poll` fills lists for the `NetworkClient`, and the next `poll`
clears them. A connection is a `Channel`: the socket itself, or TLS over it.
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

# Bytes that one system call may receive. A page is enough for the answers to a
# producer; to allocate more and give it back would cost as much as all the rest. It
# grows, so that a fetch of megabytes takes few calls.
_LEAST_RECEIVE_BYTES: Final = 4096
_RECEIVE_BYTES: Final = 256 * 1024
_PARTS_AT_ONCE: Final = 64  # parts that one system call sends; below any IOV_MAX


class Channel(Protocol):
    """The bytes of one connection, in plain text or encrypted."""

    wants_write: bool
    """Whether `finish_connect` waits for room in the socket; else for bytes."""
    gathers: bool
    """Whether sending parts is cheaper than joining them first."""

    def fileno(self) -> int: ...

    def finish_connect(self) -> bool:
        """Go on with connecting; return whether the channel is connected.

        Raises:
            OSError: the connection failed.
            SslAuthenticationError: a certificate was refused; do not try again.
        """

    def receive(self) -> bytes | None:
        """Return received bytes, b"" if the peer has closed, None if none have come."""

    def send(self, data: memoryview) -> int:
        """Send bytes; return how many were sent, 0 if the socket has no room.

        Raises:
            OSError: the connection broke.
        """

    def send_parts(self, parts: Sequence[memoryview]) -> int:
        """Send at most `_PARTS_AT_ONCE` parts, one after the other, as `send` does."""

    def close(self) -> None: ...


class PlaintextChannel:
    """A channel in plain text."""

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
        self.watched = watched  # the events that epoll reports
        self.outgoing: deque[memoryview] = deque()


class _WakeUp:
    """An eventfd that is closed when no thread can write to it any more.

    A thread that writes to the eventfd holds a reference to this object. With the
    descriptor's number alone, it could write into a file that has got this number since
    the eventfd was closed.
    """

    __slots__ = ("descriptor",)

    def __init__(self) -> None:
        self.descriptor = -1  # for __del__, if eventfd() raises
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class Selector:
    """The non-blocking connections of a client, by node id.

    Attributes:
        connected: the nodes that the last poll has connected.
        disconnected: the nodes whose connection the last poll has lost, with the
            reason.
        refused: the nodes where the last poll found that a certificate is refused, with
            the error.
        received: the bytes that the last poll has received, in order, each with its
            node.
        wait_ns: the time, in ns, that all polls have waited.
        io_ns: the time, in ns, that all polls have spent to connect, receive and send.
    """

    def __init__(
        self,
        send_buffer_bytes: int = -1,
        receive_buffer_bytes: int = -1,
        make_channel: Callable[[socket.socket, str], Channel] | None = None,
    ) -> None:
        """Open the epoll and the eventfd; there are no connections yet.

        Args:
            send_buffer_bytes: SO_SNDBUF of every socket; -1 leaves it to the system.
            receive_buffer_bytes: SO_RCVBUF of every socket; -1 leaves it to the system.
            make_channel: returns the channel for a socket and the host's name; None:
                plain text.
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
        # `wakeup` makes a system call only while `poll` really waits. `poll` sets
        # _is_waiting before it reads _is_woken; `wakeup` sets _is_woken before it reads
        # _is_waiting. So one of them always sees the other.
        self._is_waiting = self._is_woken = False
        self._wakeup: _WakeUp | None = _WakeUp()
        self._wakeup_descriptor = self._wakeup.descriptor
        self._epoll.register(self._wakeup_descriptor, select.EPOLLIN)

    @classmethod
    def of(cls, settings: ClientSettings) -> Selector:
        """Return a selector for a client's settings.

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
            node: the node's id; it must not be connected.
            address: a numeric address.
            host: the name that the address was resolved from.

        Raises:
            OSError: connecting cannot even begin; nothing is left open.
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
        """Return whether bytes given to `send` wait for room in the socket."""
        connection = self._connections.get(node)
        return connection is not None and bool(connection.outgoing)

    def send(self, node: int, data: bytes) -> None:
        """Send as much as the socket takes now, and the rest in later polls.

        If the connection breaks here, the next poll reports it.
        """
        self.send_parts(node, (data,))

    def send_parts(self, node: int, parts: Sequence[Buffer]) -> None:
        """Send parts, one after the other, as `send` does.

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
        """Close a connection, if there is one; no poll reports it as disconnected."""
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
        """Wait for events, for up to ``timeout_ms``; connect, receive and send."""
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
            # The system's texts begin with a capital letter; ours do not.
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
            # The socket may still have answers that say what was done. The loss is
            # reported when they have been read.
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
            self.connected.remove(node)  # connected and lost in one poll

    def wakeup(self) -> None:
        """End the poll that runs now, or the next one; any thread may call."""
        # Store _is_woken before _is_waiting is read: see `__init__`.
        self._is_woken = True
        if not self._is_waiting:
            return
        wakeup = self._wakeup
        if wakeup is None:
            return  # closed
        try:
            os.eventfd_write(wakeup.descriptor, 1)
        except BlockingIOError:
            pass  # the eventfd's counter is full: it wakes the poll anyway

    def _drain_wakeup(self) -> None:
        try:
            os.eventfd_read(self._wakeup_descriptor)
        except BlockingIOError:
            pass

    def shutdown(self) -> None:
        """Close all connections and the epoll, even if closing one of them fails."""
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
        OSError: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # "a..b", say
        raise socket.gaierror(socket.EAI_NONAME, "it is no host name") from None
    addresses = [Address(str(entry[4][0]), port) for entry in found]
    return list(dict.fromkeys(addresses))


def monotonic_ms() -> float:
    """Return the time of the monotonic clock that clients use, in ms."""
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
