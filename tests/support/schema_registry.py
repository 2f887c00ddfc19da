"""A stand-in for a schema registry: what Confluent's REST interface has for clients.

It keeps schemas in memory and judges no compatibility. A real registry takes its place
where MPBROKER_SCHEMA_REGISTRY names one (tests/spark/test_registry.py).
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class SchemaRegistry:
    """Serves until `close`.

    Attributes:
        url: its address.
        asked: the paths of all requests.
        password: "Basic ..." that clients must send, if any.
        broken: whether each request is answered with an error of the server.
        has_descriptors: whether it has Protobuf's; if not, who asks gets such an error.
    """

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []  # id - 1
        self.subjects: dict[str, list[int]] = {}  # ids by version - 1
        self.asked: list[str] = []
        self.password = ""
        self.broken = False
        self.has_descriptors = True
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def register(self, subject: str, schema: dict[str, Any]) -> int:
        """Return the id of a schema, which becomes the newest version of a subject."""
        kept = {
            "schemaType": schema.get("schemaType", "AVRO"),
            "schema": schema["schema"],
            "references": schema.get("references") or [],
        }
        with self._lock:
            if kept not in self.schemas:
                self.schemas.append(kept)
            schema_id = self.schemas.index(kept) + 1
            versions = self.subjects.setdefault(subject, [])
            if schema_id not in versions:
                versions.append(schema_id)
        return schema_id

    def answer(self, method: str, path: str, body: Any) -> Any:
        parts = [unquote(each) for each in path.strip("/").split("/")]
        match parts:
            case ["schemas", "ids", number]:
                if 0 < int(number) <= len(self.schemas):
                    return self.schemas[int(number) - 1]
            case ["subjects", subject, "versions"] if method == "POST":
                return self._version(subject, self.register(subject, body))
            case ["subjects", subject] if method == "POST":
                return self._version(subject, self.register(subject, body))
            case ["subjects", subject, "versions"]:
                if subject in self.subjects:
                    return list(range(1, len(self.subjects[subject]) + 1))
            case ["subjects", subject, "versions", number]:
                ids = self.subjects.get(subject, [])
                place = len(ids) if number == "latest" else int(number)
                if 0 < place <= len(ids):
                    return self._version(subject, ids[place - 1])
        return None

    def _version(self, subject: str, schema_id: int) -> dict[str, Any]:
        version = self.subjects[subject].index(schema_id) + 1
        about = {"subject": subject, "id": schema_id, "version": version}
        return self.schemas[schema_id - 1] | about

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._serve()

            do_POST = do_GET  # noqa: N815

            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                registry.asked.append(self.path)
                status, found = 200, None
                path, query = urlsplit(self.path)[2:4]
                if registry.broken:
                    status = 503
                elif query == "format=serialized" and not registry.has_descriptors:
                    status = 500
                elif registry.password not in self.headers.get("Authorization", ""):
                    status = 401
                else:
                    found = registry.answer(self.command, path, body)
                    status = 200 if found is not None else 404
                content = json.dumps(
                    found if status == 200 else {"error_code": status, "message": "no"}
                ).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        return Handler
