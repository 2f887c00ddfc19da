"""Metrics of clients with quotas: their rates, and for how long they were throttled."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from mpbroker.exporter.exposition import Family, counter, gauge
from mpbroker.ipc.quota_layout import QUOTA_REFUSED
from mpbroker.ipc.segment import Segment
from mpbroker.ipc.tables.quota_table import QuotaKind, read_quotas

# Kafka keeps such metrics of an idle client equally long.
_IDLE_NS: Final = 3600 * 1_000_000_000
_NAMES: Final = {
    QuotaKind.PRODUCE: "producer_byte_rate",
    QuotaKind.FETCH: "consumer_byte_rate",
    QuotaKind.REQUEST: "request_percentage",
    QuotaKind.CONTROLLER_MUTATION: "controller_mutation_rate",
}


def quota_families(segment: Segment, samples: int, window_ns: int) -> Iterable[Family]:
    """Return the metrics of clients with quotas that were seen in the last hour.

    Args:
        samples: the number of samples that count for a quota.
        window_ns: the length of a sample.
    """
    bytes_rate = gauge(
        "mpbroker_quota_bytes_per_second", "Bytes a second, as a quota counts them."
    )
    time_ratio = gauge(
        "mpbroker_quota_time_ratio", "Processes' time in use, of one process's."
    )
    throttles = counter("mpbroker_throttles_total", "Answers with a throttle time.")
    throttled = counter(
        "mpbroker_throttle_seconds_total", "The sum of these throttle times."
    )
    for each in read_quotas(segment, samples, window_ns, time.monotonic_ns(), _IDLE_NS):
        kind = QuotaKind(each.kind)
        labels = {
            "quota": _NAMES[kind],
            "user": each.user,
            "client_id": each.client_id,
        }
        if kind in (QuotaKind.PRODUCE, QuotaKind.FETCH):
            bytes_rate.add(each.rate, **labels)
        elif kind == QuotaKind.REQUEST:
            time_ratio.add(each.rate / 1e9, **labels)
        throttles.add(each.throttles, **labels)
        throttled.add(each.throttle_ms / 1e3, **labels)
    refused = counter(
        "mpbroker_quota_clients_refused_total",
        "Clients whose quota was not enforced, since too many have one of their own.",
    )
    refused.add(segment.words[QUOTA_REFUSED])
    return bytes_rate, time_ratio, throttles, throttled, refused
