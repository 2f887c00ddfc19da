"""The small HTTP server, and clients that are of no use to it."""

from __future__ import annotations

import contextlib
import select
import socket

import pytest

from mpbroker.exporter.http_server import MAX_CONNECTIONS, HttpServer, Page
from tests.support.children import wait_until


class Serving:
    """A server and the loop it is in, whose clock stands still."""

    def __init__(self, stack: contextlib.ExitStack, page_bytes: int) -> None:
        self._stack = stack
        sock = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=512))
        self._address = sock.getsockname()
        # So little is on its way that a page of a MiB waits for its reader.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self._epoll = stack.enter_context(select.epoll())
        page = Page(200, "text/plain", bytes(page_bytes))
        self.server = HttpServer(sock, self._epoll, lambda path: page)
        stack.callback(self.server.close)

    def dial(self, sends: bytes = b"") -> socket.socket:
        sock = self._stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(self._address)
        sock.sendall(sends)
        sock.setblocking(False)
        return sock

    def turn(self) -> None:
        for fd, _ in self._epoll.poll(0.01):
            self.server.ready(fd)
        self.server.expire(0.0)  # nobody's ten seconds are over
        self.server.resume()

    def answer(self, sock: socket.socket) -> bytes:
        self.turn()
        with contextlib.suppress(BlockingIOError):
            return sock.recv(15)
        return b""


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:
        yield lambda page_bytes=10: Serving(stack, page_bytes)


ASKS = b"GET /health HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize("says", [b"", b"GET /hea"])
def test_whoever_says_nothing_makes_room_for_who_asks(serve, says):
    made = serve()
    silent = [made.dial(says) for _ in range(3 * MAX_CONNECTIONS)]
    asks = made.dial(ASKS)
    assert wait_until(lambda: made.answer(asks)) == b"HTTP/1.1 200 OK"
    assert made.server.connections <= MAX_CONNECTIONS < len(silent)


def test_whoever_does_not_read_makes_room_too(serve):
    made = serve(1 << 20)
    unread = [made.dial(ASKS) for _ in range(2 * MAX_CONNECTIONS)]
    asks = made.dial(ASKS)
    assert wait_until(lambda: made.answer(asks)) == b"HTTP/1.1 200 OK"
    assert unread


def test_whoever_says_nothing_stays_while_there_is_room(serve):
    made = serve()
    silent = [made.dial() for _ in range(MAX_CONNECTIONS - 1)]
    for _ in range(20):
        asks = made.dial(ASKS)
        assert wait_until(lambda sock=asks: made.answer(sock)) == b"HTTP/1.1 200 OK"
    assert made.server.connections == len(silent)
