"""A small HTTP server with bounds: some threads, each with one connection at a time.

Each thread accepts a connection, reads one request, answers it and closes. So a peer
can hold at most ``WORKERS`` connections, each for ``REQUEST_S`` while it sends and
``ANSWER_S`` while it reads; all others wait in the backlog. Heads and bodies have
limits.

Source: RFC 9110, RFC 9112.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple

if TYPE_CHECKING:
    import ssl

_LOG = get_logger(__name__)

# A browser opens up to six connections to a server, some of them for later.
WORKERS: Final = 24
REQUEST_S: Final = 5.0
ANSWER_S: Final = 20.0
MAX_HEAD_BYTES: Final = 16 * 1024
# Room for a record of the largest size that a topic takes by default (1 MiB), as JSON.
MAX_BODY_BYTES: Final = 2 * 1024 * 1024
_MAX_FIELDS: Final = 32  # the most fields of a query
_CHUNK: Final = 64 * 1024
_ACCEPT_AGAIN_S: Final = 0.1

_REQUEST_LINE: Final = re.compile(rb"(GET|HEAD|POST) (/[\x21-\x7e]*) HTTP/1\.[01]")
_HEADER: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\0]*)")
# Nothing but the console's own files is loaded, and no other page may frame it.
_SECURITY_HEADERS: Final = (
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "X-Frame-Options: DENY\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cross-Origin-Opener-Policy: same-origin\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
    "Cache-Control: no-store\r\n"
)


class Request(NamedTuple):
    """An HTTP request.

    Attributes:
        method: GET or POST; a HEAD becomes a GET.
        path: the path, without the query.
        query: the fields behind "?", by name; if a name is repeated, the last field.
        headers: the headers by name in lower case; if a name is repeated, the first.
        body: the body; empty if there is none.
        is_secure: whether the request came over TLS.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    is_secure: bool = False


class Response(NamedTuple):
    """An HTTP response; ``headers`` are added to those that every response has."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class HttpError(Exception):
    """An error that becomes the response to a request; the user sees its text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class PageServer:
    """Answers the requests of a listening socket in threads.

    Args:
        sock: the listening socket.
        answer: returns the response to a request, or raises HttpError. Any thread calls
            it.
        context: returns the TLS context for a new connection; None: plain HTTP.
    """

    def __init__(
        self,
        sock: socket.socket,
        answer: Callable[[Request], Response],
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._answer = answer
        self._context = context

    def start(self) -> None:
        """Start the threads that answer requests; they end with the process."""
        for number in range(WORKERS):
            threading.Thread(
                target=self._work, name=f"console-{number}", daemon=True
            ).start()

    def _work(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                _LOG.warning("console: no connection can be accepted: %s", error)
                time.sleep(_ACCEPT_AGAIN_S)
                continue
            try:
                with self._secured(sock) as peer:
                    self._serve(peer)
            except OSError:
                pass  # the client has disconnected, took too long, or speaks no TLS

    def _secured(self, sock: socket.socket) -> socket.socket:
        """Wrap a connection's socket in TLS, unless the server speaks plain HTTP."""
        if self._context is None:
            return sock
        try:
            sock.settimeout(REQUEST_S)  # for the whole handshake
            return self._context().wrap_socket(sock, server_side=True)
        except BaseException:
            sock.close()
            raise

    def _serve(self, sock: socket.socket) -> None:
        with_body = True
        try:
            request, with_body = _read(sock, time.monotonic() + REQUEST_S)
            request = request._replace(is_secure=self._context is not None)
            response = self._answer(request)
        except HttpError as error:
            response = text_response(error.status, str(error))
        except OSError:
            raise
        except Exception:  # noqa: BLE001 - a bug must not end the thread
            _LOG.exception("console: a request could not be answered; this is a bug")
            response = text_response(500, "this is a bug; see the broker's log")
        _send(sock, encode_response(response, with_body=with_body))


def text_response(status: int, text: str) -> Response:
    return Response(status, "text/plain; charset=utf-8", text.encode() + b"\n")


def encode_response(response: Response, *, with_body: bool) -> bytes:
    own = "".join(f"{name}: {value}\r\n" for name, value in response.headers)
    head = (
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        f"{_SECURITY_HEADERS}{own}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (response.body if with_body else b"")


def _read(sock: socket.socket, deadline: float) -> tuple[Request, bool]:
    """Read a request; return it, and whether its response has a body.

    Args:
        sock: the connection.
        deadline: when to give up, on the clock of time.monotonic.

    Raises:
        HttpError: the request is malformed or too long.
        OSError: the client has disconnected, or the deadline has passed.
    """
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > MAX_HEAD_BYTES:
            raise HttpError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"more than {MAX_HEAD_BYTES} bytes of headers",
            )
        data += _receive(sock, deadline)
    method, target, headers = parse_head(bytes(data[:end]))
    length = body_length(headers)
    body = data[end + 4 :]
    while len(body) < length:
        body += _receive(sock, deadline)
    path, _, query = target.partition("?")
    try:
        fields = dict(
            parse_qsl(
                query,
                keep_blank_values=True,
                max_num_fields=_MAX_FIELDS,
                strict_parsing=False,
            )
        )
    except ValueError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"query: {error}") from error
    request = Request(
        "POST" if method == "POST" else "GET",
        path,
        fields,
        headers,
        bytes(body[:length]),
    )
    return request, method != "HEAD"


def parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Parse the head of a request; return its method, its target and its headers.

    Raises:
        HttpError: the head is not HTTP/1, or has a method that is not served.
    """
    first, *lines = head.split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        raise HttpError(HTTPStatus.BAD_REQUEST, "only GET, HEAD and POST are served")
    headers: dict[str, str] = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise HttpError(HTTPStatus.BAD_REQUEST, "a header line is malformed")
        value = found[2].decode("latin-1").rstrip()
        headers.setdefault(found[1].decode().lower(), value)
    return match[1].decode(), match[2].decode(), headers


def body_length(headers: Mapping[str, str]) -> int:
    """Return the length of a request's body.

    Raises:
        HttpError: the request has a Transfer-Encoding, or its Content-Length is not a
            number or is above MAX_BODY_BYTES.
    """
    if "transfer-encoding" in headers:
        raise HttpError(HTTPStatus.LENGTH_REQUIRED, "Content-Length is needed")
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise HttpError(HTTPStatus.BAD_REQUEST, "Content-Length is not a number")
    length = int(text)
    if length > MAX_BODY_BYTES:
        raise HttpError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MAX_BODY_BYTES} bytes"
        )
    return length


def _receive(sock: socket.socket, deadline: float) -> bytes:
    sock.settimeout(_left(deadline))
    data = sock.recv(_CHUNK)
    if not data:
        raise ConnectionError("the client has disconnected")
    return data


def _send(sock: socket.socket, data: bytes) -> None:
    deadline = time.monotonic() + ANSWER_S
    view = memoryview(data)
    while view:
        sock.settimeout(_left(deadline))
        view = view[sock.send(view) :]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
