"""A small HTTP server with bounds, so that no client can keep it busy.

A connection carries one request, GET or HEAD, with a head of at most 8 KiB. There are
at most 32 connections, and a connection that takes longer than ten seconds is closed.
Nothing blocks; a page is made when its request is complete. While other clients wait, a
connection that has sent nothing is closed at once: health checks arrive here, and a
check without an answer would restart the broker.

Source: RFC 9110, RFC 9112.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple

_LOG = get_logger(__name__)

MAX_CONNECTIONS: Final = 32
MAX_HEAD_BYTES: Final = 8 * 1024
TIME_S: Final = 10.0
# While other clients wait, a connection has these times to send its request and to read
# the response. A request comes right after the last packet of the TCP handshake.
_SILENT_S: Final = 0.05
_READING_S: Final = 1.0
_CHUNK: Final = 64 * 1024


class Page(NamedTuple):
    """An HTTP response."""

    status: int
    content_type: str
    body: bytes


class HttpError(Exception):
    """A request gets an error as its response; the message is for the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def requested_path(head: bytes) -> tuple[str, bool]:
    """Read a request's first line.

    Returns:
        The path without its query, and whether the body is wanted.

    Raises:
        HttpError: the request is not HTTP/1, or is neither GET nor HEAD.
    """
    line = head.split(b"\r\n", 1)[0].split(b"\n", 1)[0]
    parts = line.split(b" ")
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
        raise HttpError(HTTPStatus.BAD_REQUEST, "this is no HTTP/1 request")
    method, target = parts[0], parts[1].partition(b"?")[0]
    if method not in (b"GET", b"HEAD"):
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are served")
    return target.decode("latin-1"), method == b"GET"


class _Connection:
    def __init__(self, sock: socket.socket, came: float) -> None:
        self.sock = sock
        self.came = came
        self.head = bytearray()
        self.left: memoryview | None = None  # the rest of the response, to be sent


class HttpServer:
    """Serves the pages of one listening socket in the caller's epoll loop.

    Args:
        sock: the listening socket.
        epoll: the epoll object of the caller's loop, which calls ``ready`` with each
            descriptor that it reports.
        page: a function that makes the page of a path, or raises HttpError.
    """

    def __init__(
        self, sock: socket.socket, epoll: select.epoll, page: Callable[[str], Page]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._epoll = epoll
        self._page = page
        self._connections: dict[int, _Connection] = {}
        # Whether there is no room, and no connection is accepted until there is.
        self._is_waiting = False
        epoll.register(sock.fileno(), select.EPOLLIN)

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def is_full(self) -> bool:
        """Whether the limit of connections is reached: the next client has to wait."""
        return len(self._connections) >= MAX_CONNECTIONS

    def ready(self, fd: int) -> None:
        """Handle an event of the listening socket or of a connection.

        Ignore descriptors that are neither.
        """
        if fd == self._sock.fileno():
            self._accept()
        elif fd in self._connections:
            connection = self._connections[fd]
            try:
                self._move(connection)
            except OSError:  # the client has disconnected
                self._close(connection)

    def expire(self, now: float) -> None:
        """Close the HTTP connections that have taken longer than ten seconds."""
        for connection in list(self._connections.values()):
            if connection.came + TIME_S <= now:
                self._close(connection)

    def close(self) -> None:
        """Close all connections, but not the listening socket."""
        for connection in list(self._connections.values()):
            self._close(connection)

    def _accept(self) -> None:
        for _ in range(MAX_CONNECTIONS):  # a turn
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                _LOG.warning("metrics: no connection can be accepted: %s", error)
                self._wait_for_room()
                return
            sock.setblocking(False)
            connection = _Connection(sock, time.monotonic())
            self._connections[sock.fileno()] = connection
            self._epoll.register(sock.fileno(), select.EPOLLIN)
            self.ready(sock.fileno())  # its request may have come while it waited
            if self.is_full:
                self._wait_for_room()
                return

    def _wait_for_room(self) -> None:
        # New connections wait in the backlog. If epoll went on reporting them, the loop
        # would spin.
        self._is_waiting = True
        self._epoll.modify(self._sock.fileno(), 0)

    def resume(self) -> None:
        """Accept connections again if there is room for them.

        To be called once in a turn of the caller's loop.
        """
        if not self._is_waiting:
            return
        if self.is_full:
            now = time.monotonic()
            for each in list(self._connections.values()):
                allowed_s = _SILENT_S if each.left is None else _READING_S
                if each.came + allowed_s <= now:
                    self._close(each)
        if not self.is_full:
            self._is_waiting = False
            self._epoll.modify(self._sock.fileno(), select.EPOLLIN)

    def _move(self, connection: _Connection) -> None:
        if connection.left is None:
            try:
                data = connection.sock.recv(_CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._close(connection)
                return
            connection.head += data
            head = connection.head
            if b"\r\n\r\n" not in head and b"\n\n" not in head:
                if len(head) <= MAX_HEAD_BYTES:
                    return
                status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                answer = _error(status, f"more than {MAX_HEAD_BYTES} bytes of headers")
            else:
                answer = self._answer(bytes(head))
            connection.left = memoryview(answer)
            self._epoll.modify(connection.sock.fileno(), select.EPOLLOUT)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        assert connection.left is not None
        try:
            sent = connection.sock.send(connection.left)
        except BlockingIOError:
            return
        connection.left = connection.left[sent:]
        if not connection.left:
            self._close(connection)

    def _answer(self, head: bytes) -> bytes:
        try:
            path, with_body = requested_path(head)
            page = self._page(path)
        except HttpError as error:
            return _error(error.status, str(error))
        except Exception:  # noqa: BLE001 - a bug must not end the server
            _LOG.exception("metrics: a page could not be made; this is a bug")
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, "see the broker's log")
        return _message(page, with_body=with_body)

    def _close(self, connection: _Connection) -> None:
        fd = connection.sock.fileno()
        self._epoll.unregister(fd)
        del self._connections[fd]
        connection.sock.close()


def _message(page: Page, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}\r\n"
        f"Content-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline';"
        " script-src 'unsafe-inline'; connect-src 'self'; img-src data:\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (page.body if with_body else b"")


def _error(status: int, text: str) -> bytes:
    page = Page(status, "text/plain; charset=utf-8", text.encode() + b"\n")
    return _message(page, with_body=True)
