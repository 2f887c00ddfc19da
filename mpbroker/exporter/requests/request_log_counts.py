"""Make lines of the request log about errors, and about partitions that have grown.

The line of a request cannot have these facts: its response is built in another process,
and may name many partitions. But shared memory has the counts of all of them. So lines
between those of requests say by how much the counts have risen:

    {"time": ..., "seconds": 5.0, "errors": [{"api": ..., "error": ..., "count": 2}]}
    {"time": ..., "seconds": 5.0, "appended": [{"topic": ..., "partition": 0,
                                                "records": 120, "bytes": 9600}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from mpbroker.inspect.broker_view import api_name
from mpbroker.protocol.error_code import ErrorCode

if TYPE_CHECKING:
    from mpbroker.exporter.partitions import PartitionFigures

INTERVAL_NS: Final = 5_000_000_000
# A line is read as a whole, so it is bounded: the partitions that grew most.
_PARTITIONS_A_LINE: Final = 1_000

ErrorTotals = dict[tuple[int, int], int]


class RequestLogCounts:
    """Compares counts of errors and records with their values five seconds ago.

    Args:
        errors: a function that returns the numbers of responses since the start, by API
            key and error code.
        partitions: yields the loaded partitions.
        topics: a function that returns the names of all topics.
        now_ns: the time of the monotonic clock.
    """

    def __init__(
        self,
        errors: Callable[[], ErrorTotals],
        partitions: Iterable[PartitionFigures],
        topics: Callable[[], Iterable[str]],
        now_ns: int,
    ) -> None:
        self._errors = errors
        self._partitions = partitions
        self._topics = topics
        self._looked_ns = now_ns
        self._error_totals = errors()
        self._known_topics = set(topics())
        self._ends = self._look()

    def lines(
        self, now_ns: int, wall_s: float, *, is_last: bool = False
    ) -> list[dict[str, Any]]:
        """Return lines with the growth of the counts since the lines before.

        The result is empty before the interval of five seconds is over.

        Args:
            now_ns: the time of the monotonic clock.
            wall_s: the same moment in seconds since 1970.
            is_last: do not wait for the interval's end.
        """
        past_ns = now_ns - self._looked_ns
        if past_ns < INTERVAL_NS and not is_last:
            return []
        self._looked_ns = now_ns
        head = {"time": wall_s, "seconds": past_ns / 1e9}
        found = (("errors", self._risen_errors()), ("appended", self._grown()))
        return [{**head, name: counts} for name, counts in found if counts]

    def _risen_errors(self) -> list[dict[str, Any]]:
        before, self._error_totals = self._error_totals, self._errors()
        return [
            {"api": api_name(key), "error": error_name(code), "count": count - last}
            for (key, code), count in sorted(self._error_totals.items())
            if (last := before.get((key, code), 0)) < count
        ]

    def _grown(self) -> list[dict[str, Any]]:
        before, known = self._ends, self._known_topics
        self._known_topics = set(self._topics())
        self._ends = self._look()
        found: list[dict[str, Any]] = []
        for place, (end, size) in self._ends.items():
            last = before.get(place)
            if last is None:
                # All records of a new topic count; an old topic has just been loaded.
                last = (end, size) if place[0] in known else (0, 0)
            if end > last[0]:
                found.append(
                    {
                        "topic": place[0],
                        "partition": place[1],
                        "records": end - last[0],
                        # Retention may have removed more than was added.
                        "bytes": max(0, size - last[1]),
                    }
                )
        found.sort(key=lambda each: each["records"], reverse=True)
        return found[:_PARTITIONS_A_LINE]

    def _look(self) -> dict[tuple[str, int], tuple[int, int]]:
        return {
            (each.topic, each.partition): (each.log_end_offset, each.size_bytes)
            for each in self._partitions
        }


def error_name(code: int) -> str:
    """Return Kafka's name of an error code, or its number."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return str(code)
