"""Sum up a broker's request log for the HTML page of job ``report``.

The log has a line of JSON for each request. Every five seconds it has further lines: of
errors by API and kind, and of records and bytes appended by partition.

One process parses the lines with orjson and keeps some 90 bytes of each request in
numpy's arrays. Spark took 41 CPU seconds for a log of 70 MB, this takes two, and no JVM
is started.
"""

from __future__ import annotations

import gzip
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from mpbroker.spark.pipeline.errors import PipelineError

Row = dict[str, Any]
_Numbers = npt.NDArray[Any]

# The stages of a request, named as in the metrics, by their first and last stamp.
STAGES: Final = {
    "queue": ("received_ns", "dequeued_ns"),
    "local": ("dequeued_ns", "parked_ns"),
    "remote": ("parked_ns", "completed_ns"),
    "response_queue": ("completed_ns", "taken_ns"),
    "send": ("taken_ns", "sent_ns"),
}
PERCENTILES: Final = (0.5, 0.95, 0.99, 0.999)
# The number of points in a plot to aim at: more are not seen on a screen.
_POINTS: Final = 120
_STEPS_S: Final = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
_TOP: Final = 20
_SLOWEST: Final = 10
# Seconds between two lines of errors in the log.
LOOK_S: Final = 5
# The longest pause inside a burst of errors.
_BURST_GAP_S: Final = 2 * LOOK_S
_PEER: Final = re.compile(r"-(.*):\d+-\d+$")


@dataclass(frozen=True)
class Findings:
    """The figures of a request log that the report shows; a row is a dict by columns.

    Attributes:
        span: one row with the totals of the log and its first and last second.
        step_s: the seconds from one point of the timelines to the next.
        apis: a row for each API, those with the most requests first.
        clients: a row for each pair of API and client software.
        timeline: a row for each point of time and API; the API None stands for all.
        partitions: the 20 partitions with the most records, most first.
        bursts: the 20 bursts of errors with the most errors, most first.
        error_timeline: numbers of errors by point of time, API and kind.
        peers: the 20 pairs of address and client software with the most requests, most
            first.
        slowest: the ten slowest requests, the slowest first.
    """

    span: Row
    step_s: int
    apis: list[Row]
    clients: list[Row]
    timeline: list[Row]
    partitions: list[Row]
    bursts: list[Row]
    error_timeline: list[Row]
    peers: list[Row]
    slowest: list[Row]


def examine(files: Sequence[str]) -> Findings:
    """Read request logs, and return the figures that the report shows.

    Raises:
        PipelineError: there is no request in these files, or a file cannot be read.
    """
    log = _Log()
    for path in files:
        try:
            with _open(path) as lines:
                log.read(lines)
        except (OSError, EOFError) as error:
            raise PipelineError(f"report.log: {path} cannot be read: {error}") from None
    if not log.count:
        raise PipelineError(
            f"there is no request in {', '.join(files[:3])}: is it a broker's"
            f" request.log.path? ({log.unreadable} lines are not JSON)"
        )
    requests = log.requests()
    step_s = _step_s(log.last_s - log.first_s)
    point = np.floor(requests.time_s / step_s).astype(np.int64) * step_s
    points = np.unique(point)
    at = np.searchsorted(points, point)
    api, client = requests.api, requests.client
    summed = [
        {"at_s": None, "api": log.apis[a], "client": None, **row}
        for (a,), row in _summed(requests, api)
    ]
    return Findings(
        span={
            "requests": log.count,
            "unreadable": log.unreadable,
            "lost": log.lost,
            "first_s": log.first_s,
            "last_s": log.last_s,
            "bytes_in": int(requests.bytes_in.sum()),
            "bytes_out": int(requests.bytes_out.sum()),
        },
        step_s=step_s,
        apis=sorted(summed, key=_by_requests),
        clients=sorted(
            (
                {"at_s": None, "api": log.apis[a], "client": log.clients[c], **row}
                for (a, c), row in _summed(requests, api, client)
            ),
            key=_by_requests,
        ),
        timeline=[
            {"at_s": int(points[t]), "api": None, "client": None, **row}
            for (t,), row in _summed(requests, at)
        ]
        + [
            {"at_s": int(points[t]), "api": log.apis[a], "client": None, **row}
            for (t, a), row in _summed(requests, at, api)
        ],
        partitions=_hot_partitions(log.appended),
        bursts=_bursts(log.errors),
        # The log's lines of errors are not closer than LOOK_S.
        error_timeline=_error_timeline(log.errors, max(step_s, LOOK_S)),
        peers=_peers(log, requests),
        slowest=_slowest(log, requests),
    )


def _open(path: str) -> IO[bytes]:
    """Open a log file, which may be compressed with gzip, as rotated logs often are."""
    if Path(path).suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return open(path, "rb")


def _by_requests(row: Row) -> tuple[int, str, str]:
    return -row["requests"], row["api"], row["client"] or ""


# -- the lines -------------------------------------------------------------------------


class _Names(dict[str, int]):
    """Gives each name a number: 0 to the first that is looked up, 1 to the next."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number


@dataclass(frozen=True)
class _Requests:
    """The requests of a request log, as columns of numbers.

    APIs, clients and connections are numbers; `_Log` has their names.
    """

    time_s: _Numbers
    total_ms: _Numbers
    served_ms: _Numbers
    stages_ms: dict[str, _Numbers]
    bytes_in: _Numbers
    bytes_out: _Numbers
    api: _Numbers
    client: _Numbers
    connection: _Numbers


@dataclass
class _Log:
    """Reads the lines of a request log, and collects their figures.

    Attributes:
        appended: (topic, partition, records, bytes, seconds) of each entry; the records
            were appended in these seconds.
        errors: (api, error, count, time, seconds) of each entry; the errors happened in
            these seconds up to the time, which is in seconds since 1970.
    """

    unreadable: int = 0
    lost: int = 0
    first_s: float = float("inf")
    last_s: float = float("-inf")
    appended: list[tuple[str, int, int, int, float]] = field(default_factory=list)
    errors: list[tuple[str, str, int, float, float]] = field(default_factory=list)
    _numbers: array[float] = field(default_factory=lambda: array("d"))
    _codes: array[int] = field(default_factory=lambda: array("i"))
    _apis: _Names = field(default_factory=_Names)
    _clients: _Names = field(default_factory=_Names)
    _connections: _Names = field(default_factory=_Names)

    @property
    def count(self) -> int:
        """The number of requests that were read."""
        return len(self._codes) // 3

    @property
    def apis(self) -> list[str]:
        """The names of APIs; the columns of requests have their indexes."""
        return list(self._apis)

    @property
    def clients(self) -> list[str]:
        """The names of client software; the columns of requests have their indexes."""
        return list(self._clients)

    @property
    def connections(self) -> list[str]:
        """The names of connections; the columns of requests have their indexes."""
        return list(self._connections)

    def read(self, lines: Iterable[bytes]) -> None:
        """Parse the JSON lines of a log file, and add their figures to those before."""
        for line in lines:
            try:
                row = orjson.loads(line)
                if "api" in row:
                    self._request(row)
                else:
                    self._other(row)
            except (ValueError, KeyError, TypeError, AttributeError):
                self.unreadable += bool(line.strip())

    def _request(self, row: Row) -> None:
        time_s = row["time"]
        numbers = array(
            "d",
            (
                *(time_s, row["total_ms"]),
                *(row["request_bytes"], row["response_bytes"]),
                # Differences of integers: a stamp has more digits than a float.
                *((row[end] - row[begin]) / 1e6 for begin, end in STAGES.values()),
            ),
        )
        name = row.get("client_software_name") or ""
        client = f"{name} {row.get('client_software_version') or ''}".strip()
        codes = (
            self._apis[row["api"]],
            self._clients[client or "unknown"],
            self._connections[row.get("connection") or ""],
        )
        self._numbers += numbers  # both at the end: an error above leaves neither
        self._codes.extend(codes)
        self._seen(time_s)

    def _other(self, row: Row) -> None:
        self.lost += row.get("lost", 0)
        if "time" in row:
            self._seen(row["time"] + 0.0)
        self.errors += [
            (each["api"], each["error"], each["count"], row["time"], row["seconds"])
            for each in row.get("errors", ())
        ]
        self.appended += [
            (
                *(each["topic"], each["partition"]),
                *(each["records"], each["bytes"], row["seconds"]),
            )
            for each in row.get("appended", ())
        ]

    def _seen(self, time_s: float) -> None:
        self.first_s = min(self.first_s, time_s)
        self.last_s = max(self.last_s, time_s)

    def requests(self) -> _Requests:
        """Return the requests that were read from the log, as columns of numbers."""
        codes = np.frombuffer(self._codes, np.int32).reshape(-1, 3)
        numbers = np.frombuffer(self._numbers).reshape(-1, 4 + len(STAGES))
        stages = {name: numbers[:, 4 + at] for at, name in enumerate(STAGES)}
        return _Requests(
            time_s=numbers[:, 0],
            total_ms=numbers[:, 1],
            served_ms=numbers[:, 1] - stages["remote"],
            stages_ms=stages,
            bytes_in=numbers[:, 2],
            bytes_out=numbers[:, 3],
            api=codes[:, 0],
            client=codes[:, 1],
            connection=codes[:, 2],
        )


# -- the figures -----------------------------------------------------------------------


def _groups(*keys: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Group a request log's requests by several columns of numbers.

    Returns:
        The number of each request's group, and each group's values of the columns.
    """
    every = np.stack([key.astype(np.int64) for key in keys])
    sizes = every.max(axis=1) + 1
    found, group = np.unique(np.ravel_multi_index(every, sizes), return_inverse=True)
    return group, np.stack(np.unravel_index(found, sizes), axis=1)


def _summed(
    requests: _Requests, *keys: _Numbers
) -> Iterator[tuple[tuple[int, ...], Row]]:
    """Group requests by ``keys``; yield each group's key and its row of figures."""
    group, of = _groups(*keys)
    counts = np.bincount(group)
    ends = np.cumsum(counts)
    begins = ends - counts
    ranks = [begins + np.ceil(rank * counts).astype(int) - 1 for rank in PERCENTILES]

    def in_order(values: _Numbers) -> _Numbers:
        return values[np.lexsort((values, group))]

    total, served = in_order(requests.total_ms), in_order(requests.served_ms)
    totals = np.stack([total[rank] for rank in ranks], axis=1).tolist()
    serveds = np.stack([served[rank] for rank in ranks], axis=1).tolist()
    largest = total[ends - 1].tolist()
    means = {
        name: (np.bincount(group, values) / counts).tolist()
        for name, values in requests.stages_ms.items()
    }
    bytes_in = np.bincount(group, requests.bytes_in).astype(np.int64).tolist()
    bytes_out = np.bincount(group, requests.bytes_out).astype(np.int64).tolist()
    for index, key in enumerate(of.tolist()):
        yield (
            tuple(key),
            {
                "requests": int(counts[index]),
                "total": totals[index],
                "served": serveds[index],
                "max_ms": largest[index],
                **{name: mean[index] for name, mean in means.items()},
                "bytes_in": bytes_in[index],
                "bytes_out": bytes_out[index],
            },
        )


def _hot_partitions(
    appended: Iterable[tuple[str, int, int, int, float]],
) -> list[Row]:
    """Return the partitions with the most records appended, and their share of all."""
    found: dict[tuple[str, int], Row] = {}
    for topic, partition, records, size, seconds in appended:
        row = found.setdefault(
            (topic, partition),
            {
                "topic": topic,
                "partition": partition,
                "records": 0,
                "bytes": 0,
                "peak_per_s": 0.0,
            },
        )
        row["records"] += records
        row["bytes"] += size
        row["peak_per_s"] = max(row["peak_per_s"], records / seconds)
    whole = sum(row["records"] for row in found.values())
    for row in found.values():
        row["share"] = row["records"] / whole if whole else 0.0
    order = sorted(
        found.values(),
        key=lambda row: (-row["records"], row["topic"], row["partition"]),
    )
    return order[:_TOP]


def _bursts(errors: Iterable[tuple[str, str, int, float, float]]) -> list[Row]:
    """Return bursts of errors, those with the most errors first.

    A burst is a run of errors of one API and kind without a pause of `_BURST_GAP_S`.
    """
    found: list[Row] = []
    open_: dict[tuple[str, str], Row] = {}
    for api, error, count, time_s, seconds in sorted(errors, key=lambda each: each[3]):
        begun_s = time_s - seconds
        burst = open_.get((api, error))
        if burst is None or begun_s - burst["last_s"] > _BURST_GAP_S:
            burst = open_[api, error] = {
                "api": api,
                "error": error,
                "first_s": begun_s,
                "last_s": time_s,
                "count": 0,
                "peak_per_s": 0.0,
            }
            found.append(burst)
        burst["first_s"] = min(burst["first_s"], begun_s)
        burst["last_s"] = time_s
        burst["count"] += count
        burst["peak_per_s"] = max(burst["peak_per_s"], count / seconds)
    return sorted(found, key=lambda row: (-row["count"], row["first_s"]))[:_TOP]


def _error_timeline(
    errors: Iterable[tuple[str, str, int, float, float]], step_s: int
) -> list[Row]:
    """Count errors by point of time, API and kind."""
    found: dict[tuple[int, str, str], int] = {}
    for api, error, count, time_s, _ in errors:
        at = (int(time_s // step_s * step_s), api, error)
        found[at] = found.get(at, 0) + count
    return [
        {"at_s": at_s, "api": api, "error": error, "count": count}
        for (at_s, api, error), count in sorted(found.items())
    ]


def _peer(connection: str) -> str:
    """Return the client's address in a connection's name; empty if there is none."""
    match = _PEER.search(connection)
    return match[1] if match else ""


def _peers(log: _Log, requests: _Requests) -> list[Row]:
    """Return the addresses and client software with the most requests."""
    names, clients = [_peer(each) for each in log.connections], log.clients
    numbers = _Names()
    peer = np.array([numbers[name] for name in names])[requests.connection]
    group, of = _groups(peer, requests.client)
    counts = np.bincount(group)
    _, pairs = _groups(group, requests.connection)
    connections = np.bincount(pairs[:, 0])
    bytes_in = np.bincount(group, requests.bytes_in)
    bytes_out = np.bincount(group, requests.bytes_out)
    addresses = list(numbers)
    found = [
        {
            "peer": addresses[peer],
            "client": clients[client],
            "requests": int(counts[index]),
            "connections": int(connections[index]),
            "bytes_in": int(bytes_in[index]),
            "bytes_out": int(bytes_out[index]),
        }
        for index, (peer, client) in enumerate(of.tolist())
    ]
    found.sort(key=lambda row: (-row["requests"], row["peer"], row["client"]))
    return found[:_TOP]


def _slowest(log: _Log, requests: _Requests) -> list[Row]:
    order = np.argsort(-requests.served_ms, kind="stable")[:_SLOWEST].tolist()
    apis, clients, connections = log.apis, log.clients, log.connections
    return [
        {
            "time": float(requests.time_s[at]),
            "api": apis[requests.api[at]],
            "client": clients[requests.client[at]],
            "peer": _peer(connections[requests.connection[at]]),
            "total_ms": float(requests.total_ms[at]),
            "served_ms": float(requests.served_ms[at]),
            **{name: float(ms[at]) for name, ms in requests.stages_ms.items()},
        }
        for at in order
    ]


def _step_s(span_s: float) -> int:
    """Return the seconds between points that give a plot about _POINTS points."""
    about = span_s / _POINTS
    return next((step for step in _STEPS_S if step >= about), _STEPS_S[-1])
