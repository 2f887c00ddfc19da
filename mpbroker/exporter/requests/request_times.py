"""RequestTimes: percentiles of requests' times, under Kafka's names (RequestMetrics).

They are computed from the histograms: those of now, less those of one to two minutes
ago. An API without requests in that time has the percentiles since the start. A bucket
ends at twice its beginning; within a bucket times are taken for evenly distributed.

Source: Kafka's RequestChannelMetrics; the JMX exporter's example kafka-2_0_0.yml, whose
rules give a histogram one sample for each of these percentiles, and a count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mpbroker.exporter.exposition import Family, summary
from mpbroker.inspect.broker_view import api_name
from mpbroker.ipc.counters.request_metrics import (
    ApiMetrics,
    Stage,
    bounds_s,
    read_apis,
)
from mpbroker.ipc.layout import MAX_PROCESSORS

WINDOW_NS: Final = 60_000_000_000
_PREFIX: Final = "kafka_network_requestmetrics_"
NAMES: Final = {
    Stage.QUEUE: _PREFIX + "requestqueuetimems",
    Stage.LOCAL: _PREFIX + "localtimems",
    Stage.REMOTE: _PREFIX + "remotetimems",
    Stage.RESPONSE_QUEUE: _PREFIX + "responsequeuetimems",
    Stage.SEND: _PREFIX + "responsesendtimems",
    Stage.TOTAL: _PREFIX + "totaltimems",
}
# As the rules write them: a dashboard may ask for "0.50" and not for "0.5".
QUANTILES: Final = ("0.50", "0.75", "0.95", "0.98", "0.99", "0.999")
_BOUNDS_MS: Final = [bound * 1e3 for bound in bounds_s()]
_Counts = Mapping[int, ApiMetrics]


class RequestTimes:
    """Makes metrics with percentiles of request times.

    The owner calls ``look`` every few seconds.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._older: _Counts = {}
        self._newer: _Counts = {}
        self._looked_ns = 0

    def look(self, now_ns: int) -> None:
        """Remember the present histograms of request times, at most once a minute.

        Percentiles are computed from the growth since then: see the module.
        """
        if now_ns - self._looked_ns >= WINDOW_NS:
            self._looked_ns = now_ns
            self._older, self._newer = self._newer, self._counts()

    def _counts(self) -> _Counts:
        return read_apis(self._words, range(MAX_PROCESSORS))

    def families(self) -> list[Family]:
        """Return a metric for each stage of a request, with samples for each API."""
        made = {stage: summary(name, "Times in ms.") for stage, name in NAMES.items()}
        for key, api in self._counts().items():
            before = self._older.get(key)
            names = [api_name(key)]
            if names == ["Fetch"]:
                names.append("FetchConsumer")  # no broker follows us
            for stage, family in made.items():
                histogram = api.stages[stage]
                recent = histogram.counts
                if before is not None:
                    earlier = before.stages[stage].counts
                    grown = [a - b for a, b in zip(recent, earlier, strict=True)]
                    recent = grown if any(grown) else recent
                values = percentiles(recent)
                for name in names:
                    for quantile, value in zip(QUANTILES, values, strict=True):
                        family.add(value, request=name, quantile=quantile)
                    family.add_summary(
                        histogram.sum_ns / 1e6, sum(histogram.counts), request=name
                    )
        return list(made.values())


def percentiles(counts: Sequence[int]) -> list[float]:
    """Return the percentiles of a histogram, in ms, for each of QUANTILES."""
    total = sum(counts)
    found: list[float] = []
    bucket = below = 0
    for quantile in QUANTILES:
        wanted = float(quantile) * total
        while below + counts[bucket] < wanted:
            below += counts[bucket]
            bucket += 1
        low = _BOUNDS_MS[bucket - 1] if bucket else 0.0
        # The last bucket has no upper bound.
        high = _BOUNDS_MS[bucket] if bucket < len(_BOUNDS_MS) else low
        share = (wanted - below) / counts[bucket] if counts[bucket] else 0.0
        found.append(low + (high - low) * share)
    return found
