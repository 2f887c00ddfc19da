"""Overview: a broker's figures for the console, made every two seconds.

All figures are rates and gauges of the last two seconds, so a viewer has rates at once.
A figure that is not known is None, never 0. The cost does not depend on the number of
viewers: the document is made once, and put on the `OverviewBoard`, memory that the
console shares.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from mpbroker.exporter.process_events import ProcessEvents
from mpbroker.inspect.broker_view import BrokerView, api_name
from mpbroker.inspect.load import Look, Page, compare, cpu_seconds, idle_seconds
from mpbroker.inspect.overview_board import STEP_S, OverviewBoard
from mpbroker.inspect.percentiles import counted_since, percentile
from mpbroker.ipc.counters.error_counts import count_errors
from mpbroker.ipc.counters.request_metrics import Stage, read_apis
from mpbroker.ipc.layout import (
    ACCEPTOR_COUNTERS,
    HISTOGRAM_BUCKETS,
    MAX_PROCESSORS,
    METRICS,
    METRICS_CONNECTIONS,
    METRICS_DEATHS,
    PROCESSOR_INCARNATION,
    processor_row,
)
from mpbroker.network.connection_quotas import AcceptorCounter
from mpbroker.protocol.api_key import ApiKey
from mpbroker.supervisor.child import Role

if TYPE_CHECKING:
    from mpbroker.supervisor.memory import BrokerMemory

EVERY_S: Final = 2.0
_TOLD: Final = ("version", "pid", "started", "cluster_id", "listeners")
# Percentiles are of the last minute; of less after the exporter's start.
_WINDOW_S: Final = 60.0
_PROCESSES_SHOWN: Final = 128
# The place of a bottleneck in the console's picture, by the beginning of the verdict.
_PLACES: Final = (
    ("the handlers", "handlers"),
    ("the processors", "processors"),
    ("processor ", "processors"),
    ("memory for requests", "processors"),
    ("the machine's CPU", "machine"),
)


class _Counts:
    """The values at one moment of counters from which the overview computes rates.

    These are only the counters that BrokerView does not have.
    """

    def __init__(self, words: memoryview, listeners: int, handlers: list[int]) -> None:
        self.at = time.monotonic()
        first = METRICS + METRICS_CONNECTIONS + AcceptorCounter.ACCEPTED
        self.accepted = sum(
            words[first + index * ACCEPTOR_COUNTERS] for index in range(listeners)
        )
        self.errors = count_errors(words, handlers)
        self.apis = read_apis(words, _processors_ever(words))
        self.deaths = sum(
            words[METRICS + METRICS_DEATHS + index] for index in range(len(Role))
        )


class Overview:
    """Reads a broker's figures every two seconds, and publishes them for the console.

    Args:
        describe: a function that returns the facts that the supervisor publishes:
            children, version, start.
        rows: a function that returns how many rows of the partition table, one for each
            partition, are in use.
        handlers: a function that returns the ids of all handlers since the start.
        queue_limit: queued.max.requests.
        board: the shared memory in which the overview is published.
    """

    def __init__(
        self,
        memory: BrokerMemory,
        describe: Callable[[], dict[str, Any]],
        rows: Callable[[], int],
        handlers: Callable[[], list[int]],
        listeners: Sequence[str],
        queue_limit: int,
        board: OverviewBoard,
    ) -> None:
        self._words = memory.control.words
        self._view = BrokerView(
            memory.control.words, memory.table.segment.words, memory.boxes.words
        )
        self._describe = describe
        self._rows = rows
        self._handlers = handlers
        self._listeners = listeners
        self._queue_limit = queue_limit
        self._board = board
        self._events = ProcessEvents(memory.boxes.words)
        self._next = 0.0
        self._next_row = 0.0
        self._before: tuple[Look, _Counts] | None = None
        self._at_row: _Counts | None = None
        # Only one look in ten seconds is kept, so that the window holds few of them.
        self._past: deque[_Counts] = deque()

    def look(self, now: float) -> None:
        """Read the broker's figures and publish the overview, every two seconds.

        Args:
            now: the time of the monotonic clock, in seconds.
        """
        if now < self._next:
            return
        self._next = now + EVERY_S
        told = self._describe()
        look = self._look(told)
        counts = _Counts(self._words, len(self._listeners), self._handlers())
        document = self._document(told, look, counts)
        self._before = look, counts
        while self._past and counts.at - self._past[0].at > _WINDOW_S:
            self._past.popleft()
        if not self._past or counts.at - self._past[-1].at >= _WINDOW_S / 6:
            self._past.append(counts)
        self._board.publish(orjson.dumps(document), time.monotonic_ns())
        if now >= self._next_row:
            self._next_row = now + STEP_S
            self._add_row(document, counts)

    def _look(self, told: Mapping[str, Any]) -> Look:
        children = list(told.get("children", ()))
        if "pid" in told:
            children.append(
                {
                    "role": "supervisor",
                    "id": 0,
                    "pid": told["pid"],
                    "state": "READY",
                    "restarts": 0,
                    "last_exit": "",
                }
            )
        figures = self._view.figures() | {
            "processes": children,
            "limits": {"queued_max_requests": self._queue_limit},
        }
        cpu_s = {each["pid"]: cpu_seconds(each["pid"]) for each in children}
        return Look(figures, cpu_s, idle_seconds(), {})

    # -- the document ------------------------------------------------------------------

    def _document(
        self, told: Mapping[str, Any], look: Look, counts: _Counts
    ) -> dict[str, Any]:
        figures = look.figures
        page = past = None
        if self._before is not None:
            before, past = self._before
            page = compare(before, look)
        on_their_way = sum(each["on_their_way"] for each in figures["processors"])
        answers = sum(each["response_queue"] for each in figures["processors"])
        unsynced = self._view.unsynced_rows(self._rows())
        records = sum(end - durable for durable, end in unsynced.values())
        rates = _rates(past, counts)
        return {
            "at": time.time(),
            "every_s": EVERY_S,
            **{key: told.get(key) for key in _TOLD},
            "phase": figures["phase"],
            "verdict": page.verdict if page else None,
            "advice": page.advice if page else None,
            "bottleneck": _place(page.verdict) if page else None,
            "requests": page.requests if page else None,
            "in_bytes": page.in_rate if page else None,
            "out_bytes": page.out_rate if page else None,
            "idle_cores": page.spare_cores if page else None,
            "errors": rates["errors"],
            "connections": sum(each["connections"] for each in figures["processors"]),
            "queue": figures["ring_waiting"],
            "queue_limit": self._queue_limit,
            "parked": sum(each["parked"] for each in figures["handlers"]),
            "deaths": counts.deaths,
            # The flows between processes: the rate of each, and the number that wait.
            "flows": {
                "accept": {"rate": rates["accepted"], "waiting": on_their_way},
                "request": {
                    "rate": _handled(page),
                    "waiting": figures["ring_waiting"],
                },
                "answer": {"rate": rates["answers"], "waiting": answers},
                "coordinate": {
                    "rate": _of_role(page, "coordinator"),
                    "waiting": figures["coordinator_waiting"],
                },
                "append": {"bytes": rates["produced_bytes"], "waiting": records},
                "read": {"bytes": rates["fetched_bytes"]},
            },
            "processes": _processes(page, figures),
            "apis": self._apis(counts),
            "events": self._events.look()[::-1],
        }

    def _apis(self, counts: _Counts) -> list[dict[str, Any]]:
        """Return the APIs that were asked for in the last minute, the busiest first."""
        if not self._past:
            return []
        past = self._past[0]
        seconds = counts.at - past.at
        found = []
        for key in counts.apis:
            stages = counted_since(past.apis, counts.apis, key)
            requests = sum(stages[Stage.TOTAL])
            if requests:
                found.append(
                    {
                        "api": api_name(key),
                        "rate": requests / seconds,
                        "p50_ms": _ms(stages[Stage.TOTAL], 0.5),
                        "p99_ms": _ms(stages[Stage.TOTAL], 0.99),
                        "queue_p99_ms": _ms(stages[Stage.QUEUE], 0.99),
                        "work_p99_ms": _ms(stages[Stage.LOCAL], 0.99),
                        "parked_p99_ms": _ms(stages[Stage.REMOTE], 0.99),
                        "answer_p99_ms": _ms(stages[Stage.RESPONSE_QUEUE], 0.99),
                        "send_p99_ms": _ms(stages[Stage.SEND], 0.99),
                    }
                )
        return sorted(found, key=lambda each: -each["rate"])

    # -- the history -------------------------------------------------------------------

    def _add_row(self, document: Mapping[str, Any], counts: _Counts) -> None:
        row = {
            name: document[name]
            for name in (
                "at",
                "requests",
                "in_bytes",
                "out_bytes",
                "errors",
                "connections",
                "queue",
                "parked",
                "idle_cores",
                "deaths",
            )
        }
        for role in ("handler", "processor"):
            busy = [
                each["busy"]
                for each in document["processes"]
                if each["role"] == role and each["busy"] is not None
            ]
            row[f"{role}s_busy"] = sum(busy) / len(busy) if busy else None
        past, self._at_row = self._at_row, counts
        if past is not None:
            produce = [0] * HISTOGRAM_BUCKETS
            queue = [0] * HISTOGRAM_BUCKETS
            for key in counts.apis:
                stages = counted_since(past.apis, counts.apis, key)
                queue = list(map(int.__add__, queue, stages[Stage.QUEUE]))
                if key == ApiKey.PRODUCE:
                    produce = stages[Stage.TOTAL]
            row["produce_p99_ms"] = _ms(produce, 0.99)
            row["queue_p99_ms"] = _ms(queue, 0.99)
        self._board.add_row(row)


def _processors_ever(words: memoryview) -> list[int]:
    return [
        number
        for number in range(MAX_PROCESSORS)
        if words[processor_row(number) + PROCESSOR_INCARNATION]
    ]


def _rates(past: _Counts | None, now: _Counts) -> dict[str, float | None]:
    """Return the growth per second of each counter since the last overview.

    A rate is None if there was no overview before.
    """

    def of(read: Callable[[_Counts], int]) -> float | None:
        if past is None or now.at <= past.at:
            return None
        return max(0, read(now) - read(past)) / (now.at - past.at)

    def api_bytes(key: int, field: str) -> Callable[[_Counts], int]:
        return lambda counts: (
            getattr(counts.apis[key], field) if key in counts.apis else 0
        )

    return {
        "accepted": of(lambda counts: counts.accepted),
        "errors": of(lambda counts: counts.errors),
        "answers": of(lambda counts: sum(a.requests for a in counts.apis.values())),
        "produced_bytes": of(api_bytes(ApiKey.PRODUCE, "request_bytes")),
        "fetched_bytes": of(api_bytes(ApiKey.FETCH, "response_bytes")),
    }


def _place(verdict: str) -> str:
    """Return where the console's picture of the broker shows a bottleneck, or ""."""
    return next((place for text, place in _PLACES if verdict.startswith(text)), "")


def _handled(page: Page | None) -> float | None:
    return None if page is None else _of_role(page, "handler")


def _of_role(page: Page | None, role: str) -> float | None:
    """Return the requests a second of all processes of a role; None: not known."""
    if page is None:
        return None
    rates = [each.rate for each in page.processes if each.role == role]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _processes(page: Page | None, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    loads = {(each.role, each.id): each for each in page.processes} if page else {}
    parked = {
        (each["role"], each["id"] if each["role"] == "handler" else 0): each["parked"]
        for each in figures["handlers"]
    }
    connections = {
        ("processor", each["id"]): each["connections"] for each in figures["processors"]
    }
    found = []
    for child in figures["processes"][:_PROCESSES_SHOWN]:
        key = child["role"], child["id"]
        load = loads.get(key)
        found.append(
            {
                "role": child["role"],
                "id": child["id"],
                "pid": child["pid"],
                "state": child["state"],
                "restarts": child["restarts"],
                "last_exit": child["last_exit"],
                "cpu": load.cpu if load else None,
                "busy": load.busy if load else None,
                "rate": load.rate if load else None,
                "parked": parked.get(key),
                "connections": connections.get(key),
            }
        )
    return found


def _ms(counts: Sequence[int], share: float) -> float | None:
    found = percentile(counts, share)
    return None if found is None else found * 1e3
