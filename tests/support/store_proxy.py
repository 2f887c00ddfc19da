"""A proxy between a broker and its object store, which does harm when it is told to.

It takes S3's requests over HTTP, one at a time from each connection, and passes them on
as they are: the signature is of the Host header, which the store does not compare with
its own address.
"""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Self
from urllib.parse import urlsplit

_XML: Final = (
    '<?xml version="1.0" encoding="UTF-8"?>'
    "<Error><Code>{code}</Code><Message>told to</Message></Error>"
)
_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass
class Fault:
    """What happens to a request.

    Attributes:
        name: for counts and messages.
        status: answer with this status, and do not ask the store; 0: ask it.
        code: S3's word for it.
        delay_s: wait so long before the store is asked.
        cut: end the connection in the middle of the answer's body.
        bend: change a byte in the middle of the answer's body.
        drop: let the store do it, and end the connection without an answer.
        refuse: end the connection without asking the store.
        spoil: change a byte in the middle of the request's body.
    """

    name: str
    status: int = 0
    code: str = ""
    delay_s: float = 0.0
    cut: bool = False
    bend: bool = False
    drop: bool = False
    refuse: bool = False
    spoil: bool = False


FAULTS: Final = {
    fault.name: fault
    for fault in (
        Fault("refused", refuse=True),
        Fault("no answer", drop=True),
        Fault("500", 500, "InternalError"),
        Fault("503", 503, "ServiceUnavailable"),
        Fault("SlowDown", 503, "SlowDown"),
        Fault("429", 429, "TooManyRequests"),
        Fault("expired", 400, "ExpiredToken"),
        Fault("full", 507, "XMinioStorageFull"),
        Fault("slow", delay_s=1.0),
        Fault("cut", cut=True),
        Fault("bent", bend=True),
    )
}

# Chooses the fault of a request by its method and path; None: it has none.
Choice = Callable[[str, str], Fault | None]


def none(method: str, path: str) -> Fault | None:
    return None


def always(name: str, part: str = "", method: str = "") -> Choice:
    """Return a choice of one fault for the requests whose path has a part."""

    def choose(found_method: str, path: str) -> Fault | None:
        hit = part in path and method in ("", found_method)
        return FAULTS[name] if hit else None

    return choose


def sometimes(share: float, seed: int) -> Choice:
    """Return a choice of any fault for a share of all requests."""
    draw = random.Random(seed)
    faults = list(FAULTS.values())

    def choose(method: str, path: str) -> Fault | None:
        return draw.choice(faults) if draw.random() < share else None

    return choose


@dataclass
class StoreProxy:
    """The proxy, as a context manager.

    Attributes:
        target: the store's URL, such as `http://127.0.0.1:8333`.
        choose: may be replaced at any time.
        done: how often each fault was done.
        requests: how many requests came.
    """

    target: str
    choose: Choice = none
    done: Counter[str] = field(default_factory=Counter)
    requests: int = 0

    def __enter__(self) -> Self:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """The URL for AWS_ENDPOINT_URL."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"


def _bent(content: bytes) -> bytes:
    """Change a byte in the middle."""
    middle = len(content) // 2
    return b"%b%c%b" % (content[:middle], content[middle] ^ 1, content[middle + 1 :])


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    owner: StoreProxy
    _store: http.client.HTTPConnection | None = None

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _pass_on(self) -> None:
        owner = self.owner
        owner.requests += 1
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        fault = owner.choose(self.command, self.path)
        if fault is not None:
            owner.done[fault.name] += 1
            if fault.refuse:
                self.close_connection = True
                return
            if fault.status:
                self._refuse(fault)
                return
            time.sleep(fault.delay_s)
            if fault.spoil:
                body = _bent(body)
        try:
            status, reason, headers, content = self._ask(body)
        except OSError:  # the store itself was killed
            self.close_connection = True
            return
        if fault is not None and fault.drop:
            self.close_connection = True
            return
        is_head = self.command == "HEAD"
        length = next(
            (value for name, value in headers if name.lower() == "content-length"), "0"
        )
        if fault is not None and fault.bend and content:
            content = _bent(content)
        self.send_response_only(status, reason)
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        if is_head or status != 204:
            self.send_header("Content-Length", length if is_head else f"{len(content)}")
        self.end_headers()
        if fault is not None and fault.cut and not is_head:
            content = content[: len(content) // 2]
            self.close_connection = True
        self.wfile.write(content)

    def _ask(self, body: bytes) -> tuple[int, str, list[tuple[str, str]], bytes]:
        if self._store is None:
            target = urlsplit(self.owner.target)
            assert target.hostname is not None
            self._store = http.client.HTTPConnection(
                target.hostname, target.port, timeout=60
            )
        store = self._store
        try:
            store.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                store.putheader(name, value)
            store.endheaders(body or None)
            answer = store.getresponse()
            found = answer.read()
        except (OSError, http.client.HTTPException) as error:
            store.close()
            self._store = None
            raise ConnectionError(str(error)) from error
        return answer.status, answer.reason, answer.getheaders(), found

    def _refuse(self, fault: Fault) -> None:
        content = _XML.format(code=fault.code).encode()
        self.send_response_only(fault.status, fault.code)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", f"{len(content)}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:
            pass  # the client has gone
        if self._store is not None:
            self._store.close()

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            pass  # the client has gone

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815
