"""An OpenTelemetry collector, as far as a sender of metrics can tell."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Push(NamedTuple):
    """One request."""

    path: str
    headers: dict[str, str]  # names in small letters
    body: bytes


class Collector:
    """Keeps what comes; answers with ``statuses``, then always with the last one."""

    def __init__(self) -> None:
        self.pushes: list[Push] = []
        self.statuses: Sequence[int] = (200,)
        self.retry_after: str | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.url = ""


@contextmanager
def collector() -> Iterator[Collector]:
    """Serve until the end."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            number = len(made.pushes)
            made.pushes.append(Push(self.path, headers, body))
            made.may_answer.wait(90)
            self.send_response(made.statuses[min(number, len(made.statuses) - 1)])
            if made.retry_after is not None:
                self.send_header("Retry-After", made.retry_after)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not to the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}/v1/metrics"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()
