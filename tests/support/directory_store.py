"""A directory as an object store: as much of S3's protocol as readers of it speak."""

from __future__ import annotations

import email.utils
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET: Final = "archive"


class DirectoryStore(ThreadingHTTPServer):
    """Serves files below a directory, each an object of one bucket.

    Attributes:
        ranges: of objects, as they were asked for: (key, first byte, last byte).
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.ranges: list[tuple[str, int, int]] = []

    def uri(self, prefix: str = "") -> str:
        """Return what pyarrow and we find it by; keys begin with ``prefix``."""
        where = f"scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{self.port}"
        return f"s3://key:secret@{BUCKET}/{prefix}?{where}"

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def names(self) -> list[str]:
        found = [each for each in self.directory.rglob("*") if each.is_file()]
        return sorted(str(each.relative_to(self.directory)) for each in found)


@contextmanager
def directory_store(directory: Path) -> Iterator[DirectoryStore]:
    """Serve a directory while the block runs."""
    with DirectoryStore(directory) as store:
        thread = threading.Thread(target=store.serve_forever, daemon=True)
        thread.start()
        try:
            yield store
        finally:
            store.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: DirectoryStore
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        if bucket != BUCKET:
            self._send(404, b"", body)
        elif not key:
            self._send(200, self._listing(asked).encode(), body)
        else:
            self._object(key, body)

    def _object(self, key: str, body: bool) -> None:
        path = self.server.directory / key
        if not path.is_file():
            self._send(404, b"", body)
            return
        content = path.read_bytes()
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None:
            self._send(200, content, body, path)
            return
        first, last = int(match[1]), min(int(match[2]), len(content) - 1)
        self.server.ranges.append((key, first, last))
        whole = f"bytes {first}-{last}/{len(content)}"
        self._send(206, content[first : last + 1], body, path, whole)

    def _listing(self, asked: dict[str, str]) -> str:
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        most = int(asked.get("max-keys", "1000"))
        after = asked.get("continuation-token", "")
        entries: dict[str, str] = {}
        for key in self.server.names():
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                common = prefix + rest.partition(delimiter)[0] + delimiter
                entries[common] = (
                    f"<CommonPrefixes><Prefix>{escape(common)}</Prefix></CommonPrefixes>"
                )
                continue
            size = (self.server.directory / key).stat().st_size
            entries[key] = (
                f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        names = [name for name in sorted(entries) if name > after]
        chosen = names[:most]
        token = ""
        if len(names) > most:
            last = escape(chosen[-1])
            token = f"<NextContinuationToken>{last}</NextContinuationToken>"
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(chosen)}</KeyCount><MaxKeys>{most}</MaxKeys>"
            f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>{token}"
            f"{''.join(entries[name] for name in chosen)}</ListBucketResult>"
        )

    def _send(
        self,
        status: int,
        content: bytes,
        body: bool,
        path: Path | None = None,
        whole: str | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if path is not None:
            changed = email.utils.formatdate(path.stat().st_mtime, usegmt=True)
            self.send_header("Last-Modified", changed)
            self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}"')
        if whole is not None:
            self.send_header("Content-Range", whole)
        self.end_headers()
        if body:
            self.wfile.write(content)
