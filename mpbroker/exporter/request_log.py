"""The request log: lines of JSON, written by the exporter out of shared memory.

Processors note requests in rings of their own. If the exporter does not keep up with a
ring, a line of the log says how many requests were lost. No process waits for the file.
"""

from __future__ import annotations

import time
from typing import Any

import orjson

from mpbroker.base.line_file import LineFile
from mpbroker.exporter.client_ids import ClientIds
from mpbroker.exporter.request_log_counts import RequestLogCounts
from mpbroker.inspect.broker_view import api_name
from mpbroker.ipc.counters.request_metrics import LoggedRequest, log_above, read_logged
from mpbroker.ipc.layout import (
    LOG_NOTED,
    LOG_WORDS,
    MAX_PROCESSORS,
    REQUEST_LOGS,
)
from mpbroker.ipc.tables.client_software import software_of
from mpbroker.network.connection_rows import connection_name


class RequestLog:
    """Appends the requests that processors have noted to a file.

    Args:
        path, max_bytes: see LineFile.
        above_ns: requests that took less are not noted.
        counts: makes the lines between those of requests.
        client_ids: finds the requests' client.id.
    """

    def __init__(
        self,
        words: memoryview,
        path: str,
        max_bytes: int,
        above_ns: int,
        counts: RequestLogCounts,
        client_ids: ClientIds,
    ) -> None:
        self._words = words
        self._counts = counts
        self._client_ids = client_ids
        self._file = LineFile(path, "request.log.path", max_bytes)
        # What was noted before has been written by our predecessor, or is lost.
        self._next = [
            words[REQUEST_LOGS + number * LOG_WORDS + LOG_NOTED]
            for number in range(MAX_PROCESSORS)
        ]
        log_above(words, above_ns)

    def drain(self, *, is_last: bool = False) -> int:
        """Write what was noted since the last call; return the number of lines."""
        lines: list[bytes] = []
        ahead_ns = time.time_ns() - time.monotonic_ns()
        for number in range(MAX_PROCESSORS):
            found, missed, self._next[number] = read_logged(
                self._words, number, self._next[number]
            )
            self._client_ids.look(number, found)
            lines.extend(orjson.dumps(self._line(each, ahead_ns)) for each in found)
            if missed:
                lines.append(orjson.dumps({"processor": number, "lost": missed}))
        counts = self._counts.lines(time.monotonic_ns(), time.time(), is_last=is_last)
        lines.extend(map(orjson.dumps, counts))
        if lines:
            self._file.append(b"\n".join((*lines, b"")))
        return len(lines)

    def _line(self, each: LoggedRequest, ahead_ns: int) -> dict[str, Any]:
        words = self._words
        name, version = software_of(words, each.connection)
        wall = (each.received_ns + ahead_ns) / 1e9
        return {
            "time": wall,
            "api": api_name(each.api_key),
            "api_version": each.api_version,
            "correlation_id": each.correlation_id,
            "connection": connection_name(words, each.connection),
            "client_id": self._client_ids.of(each),
            "client_software_name": name,
            "client_software_version": version,
            "request_bytes": each.request_bytes,
            "response_bytes": each.response_bytes,
            "received_ns": each.received_ns,
            "dequeued_ns": each.dequeued_ns,
            "parked_ns": each.parked_ns,
            "completed_ns": each.completed_ns,
            "taken_ns": each.taken_ns,
            "sent_ns": each.sent_ns,
            "total_ms": (each.sent_ns - each.received_ns) / 1e6,
        }
