"""An S3 server that keeps objects in memory, and refuses what it is told to."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# The content of an object -> its ETag.
ETag = Callable[[bytes], str]
# Method and path of a request -> status and S3's code of an error, or None.
Refuse = Callable[[str, str], tuple[int, str] | None]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, refuse: Refuse, etag: ETag) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.etag = etag
        self.refuse = refuse


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        content = self.server.objects.get(self.path.partition("?")[0], b"")
        self.send_header("ETag", f'"{self.server.etag(content)}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
        self._answer(status, text.encode())

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        refused = self.server.refuse(self.command, self.path)
        key = self.path.partition("?")[0]
        if refused is not None and refused[0] != 200:
            self._error(*refused)
        elif self.command == "PUT":
            self._put(key, body)
        elif self.command == "POST":
            self._delete(body.decode(), refused[1] if refused else "")
        else:
            self._get(key)

    do_GET = do_PUT = do_POST = do_HEAD = _do  # noqa: N815

    def _put(self, key: str, body: bytes) -> None:
        if self.headers.get("If-None-Match") and key in self.server.objects:
            self._error(412, "PreconditionFailed")
            return
        self.server.objects[key] = body
        self._answer(200)

    def _delete(self, body: str, code: str) -> None:
        """Delete several objects; with a code, refuse each of them."""
        rows = []
        for key in re.findall("<Key>([^<]*)</Key>", body):
            named = f"<Key>{key}</Key>"
            why = f"<Code>{code}</Code><Message>no</Message>"
            rows.append(
                f"<Error>{named}{why}</Error>"
                if code
                else f"<Deleted>{named}</Deleted>"
            )
        self._answer(200, f"<DeleteResult>{''.join(rows)}</DeleteResult>".encode())

    def _get(self, key: str) -> None:
        whole = self.server.objects.get(key)
        wanted = self.headers.get("Range")
        if whole is None:
            self._error(404, "NoSuchKey")
        elif wanted is None:
            self._answer(200, whole)
        else:
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            place = f"bytes {first}-{last}/{len(whole)}"
            self._answer(206, whole[first : last + 1], Content_Range=place)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextlib.contextmanager
def canned_s3(
    refuse: Refuse, etag: ETag = lambda content: "1"
) -> Iterator[dict[str, str]]:
    """Run a server; yield the variables by which any client finds it.

    Args:
        refuse: called with the method and the path of each request; returns the status
            and S3's code of an error, with status 200 one for each object that is to
            be deleted, or None.
        etag: returns the ETag of an object with this content.
    """
    server = _Server(refuse, etag)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "hidden",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
