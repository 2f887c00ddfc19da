"""The request logs: lines of JSON, written by the exporter out of shared memory.

One log has all requests, another one the slow requests; each can be used without the
other. Processors note requests in rings of their own. If the exporter does not keep up
with a ring, a line of the log says how many requests were lost. No process waits for
the file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from mpbroker.base.line_file import LineFile
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.exporter.client_ids import ClientIds
from mpbroker.exporter.requests.request_log_counts import RequestLogCounts, error_name
from mpbroker.inspect.broker_view import api_name
from mpbroker.ipc.counters.request_metrics import (
    LoggedRequest,
    log_above,
    read_logged,
    topic_hash,
)
from mpbroker.ipc.errors import IpcError
from mpbroker.ipc.layout import (
    LOG_NOTED,
    LOG_WORDS,
    MAX_PROCESSORS,
    REQUEST_LOGS,
)
from mpbroker.ipc.tables.client_software import software_of
from mpbroker.ipc.tables.principals import Principals
from mpbroker.network.connection_rows import connection_name

if TYPE_CHECKING:
    from mpbroker.metadata.topics import TopicRegistry


class LogFiles(NamedTuple):
    """The files of the request log.

    Attributes:
        path: the file for all requests; None: there is none.
        slow_path: the file for slow requests; None: there is none.
        max_bytes: the size limit of each file, see LineFile.
        slow_ns: the time in ns from which a request is slow. Without ``slow_path``, the
            file ``path`` has only slow requests.
    """

    path: str | None
    slow_path: str | None
    max_bytes: int
    slow_ns: int


class RequestNames:
    """Finds the names of principals, listeners and topics by their numbers.

    Args:
        principals: the table of principals.
        listeners: the names of the broker's listeners, by index.
        registry: the topics, as this process has read them from the metadata log.
    """

    def __init__(
        self, principals: Principals, listeners: Sequence[str], registry: TopicRegistry
    ) -> None:
        self._principals = principals
        self._listeners = listeners
        self._registry = registry
        self._topics: dict[int, str] = {}
        self._version = -1

    def principal(self, each: LoggedRequest) -> str | None:
        """Return the principal that sent a request; None: its name is not known."""
        try:
            return self._principals.name(each.principal)
        except IpcError:
            return None

    def listener(self, each: LoggedRequest) -> str | None:
        """Return the name of the listener of a request; None: it is not known."""
        known = each.listener < len(self._listeners)
        return self._listeners[each.listener] if known else None

    def topic(self, each: LoggedRequest) -> str | None:
        """Return the first topic of a Produce or a Fetch; None: none, or not known."""
        if not each.topic:
            return None
        if each.topic not in self._topics and self._version != self._registry.version:
            self._version = self._registry.version
            # Names of deleted topics stay, for requests that came before.
            for topic in self._registry.topics():
                self._topics[topic_hash(topic.name.encode())] = topic.name
                self._topics[topic_hash(topic.topic_id)] = topic.name
        return self._topics.get(each.topic)


class RequestLog:
    """Appends the requests that processors have noted to files.

    Args:
        words: the words of the control segment, the shared memory in which processors
            note requests.
        files: the files to write to.
        counts: makes the lines of counts, between those of requests.
        client_ids: finds the requests' client.id.
        names: finds the names of listeners, principals and topics.
    """

    def __init__(
        self,
        words: memoryview,
        files: LogFiles,
        counts: RequestLogCounts,
        client_ids: ClientIds,
        names: RequestNames,
    ) -> None:
        self._words = words
        self._counts = counts
        self._client_ids = client_ids
        self._names = names
        self._slow_ns = files.slow_ns
        self._file = self._slow_file = None
        above_ns = files.slow_ns
        if files.slow_path is not None:
            key = "slow.request.log.path"
            self._slow_file = LineFile(files.slow_path, key, files.max_bytes)
        if files.path is not None:
            self._file = LineFile(files.path, "request.log.path", files.max_bytes)
            above_ns = 0 if self._slow_file is not None else above_ns
        # The exporter before this one has written the earlier requests, or they are
        # lost.
        self._next = [
            words[REQUEST_LOGS + number * LOG_WORDS + LOG_NOTED]
            for number in range(MAX_PROCESSORS)
        ]
        log_above(words, above_ns)

    def drain(self, *, is_last: bool = False) -> int:
        """Write a line for each request since the last call; return how many lines.

        Lines about lost requests, and lines of counts, are among them.

        Args:
            is_last: write the lines of counts even if they are not due.
        """
        lines: list[bytes] = []
        slow: list[bytes] = []
        ahead_ns = time.time_ns() - time.monotonic_ns()
        for number in range(MAX_PROCESSORS):
            found, missed, self._next[number] = read_logged(
                self._words, number, self._next[number]
            )
            self._client_ids.look(number, found)
            for each in found:
                line = orjson.dumps(self._line(each, ahead_ns))
                lines.append(line)
                if each.sent_ns - each.received_ns >= self._slow_ns:
                    slow.append(line)
            if missed:
                line = orjson.dumps({"processor": number, "lost": missed})
                lines.append(line)
                slow.append(line)
        counts = self._counts.lines(time.monotonic_ns(), time.time(), is_last=is_last)
        lines.extend(map(orjson.dumps, counts))
        for file, content in ((self._file, lines), (self._slow_file, slow)):
            if file is not None and content:
                file.append(b"\n".join((*content, b"")))
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
            "principal": self._names.principal(each),
            "listener": self._names.listener(each),
            "topic": self._names.topic(each),
            "error": None if each.error_code is None else error_name(each.error_code),
            "throttle_time_ms": each.throttle_ms,
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
