"""Percentiles of requests' times, computed from histograms."""

from __future__ import annotations

from mpbroker.exporter.requests.request_times import (
    WINDOW_NS,
    RequestTimes,
    percentiles,
)
from mpbroker.ipc.counters.request_metrics import Stage, bounds_s
from mpbroker.ipc.layout import (
    API_HISTOGRAMS,
    API_REQUEST_BYTES,
    API_TABLES,
    HISTOGRAM_BUCKETS,
    HISTOGRAM_WORDS,
)
from tests.support.memory import broker_memory

TOTAL = "kafka_network_requestmetrics_totaltimems"


def counts(**buckets):
    found = [0] * HISTOGRAM_BUCKETS
    for name, count in buckets.items():
        found[int(name[1:])] = count
    return found


def test_percentiles_lie_within_the_bucket_that_has_them():
    upper = [bound * 1e3 for bound in bounds_s()]
    median, p75, p95, p98, p99, p999 = percentiles(counts(b3=900, b7=90, b9=10))
    assert upper[2] < median < p75 < upper[3]
    assert upper[6] < p95 < p98 < p99 <= upper[7]
    assert upper[8] < p999 <= upper[9]


def test_times_without_a_bound_count_as_the_last_bound_and_no_requests_as_zero():
    last = {f"b{HISTOGRAM_BUCKETS - 1}": 5}
    assert set(percentiles(counts(**last))) == {bounds_s()[-1] * 1e3}
    assert set(percentiles(counts())) == {0.0}


def test_percentiles_are_of_the_last_minutes_and_counts_of_all_time():
    def request(bucket, times):
        api = API_TABLES  # Produce, of processor 0
        words[api + API_REQUEST_BYTES] += 100
        at = api + API_HISTOGRAMS + Stage.TOTAL * HISTOGRAM_WORDS
        words[at + bucket] += times

    def shown():
        family = next(each for each in made.families() if each.name == TOTAL)
        return {
            suffix or dict(labels)["quantile"]: value
            for suffix, labels, value in family.samples
            if dict(labels)["request"] == "Produce"
        }

    with broker_memory() as memory:
        words = memory.control.words
        made = RequestTimes(words)
        made.look(WINDOW_NS)
        request(12, 1000)
        slow = shown()["0.99"]
        made.look(WINDOW_NS + 1)  # too early to be noted
        assert shown()["0.99"] == slow
        made.look(2 * WINDOW_NS)
        made.look(3 * WINDOW_NS)
        assert shown()["0.99"] == slow  # no request since: those of all time
        request(2, 10)
        now = shown()
        assert now["0.99"] < slow / 100
        assert now["_count"] == 1010
