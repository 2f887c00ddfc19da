"""Push a producer's metrics to brokers that ask for them (KIP-714)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from mpbroker.client.metadata import Metadata
from mpbroker.client.network_client import NetworkClient
from mpbroker.client.telemetry.telemetry import ClientTelemetry
from mpbroker.client.telemetry.telemetry_metrics import MetricsCollector
from mpbroker.client.telemetry.telemetry_sender import TelemetrySender
from mpbroker.producer.config import ProducerSettings
from mpbroker.producer.metrics import ProducerMetrics

_TOPICS: Final = "producer-topic-metrics."


def make_telemetry_sender(
    client: NetworkClient,
    metadata: Metadata,
    settings: ProducerSettings,
    metrics: ProducerMetrics,
    clock: Callable[[], float],
) -> TelemetrySender | None:
    """Return the sender of a producer's metrics; None without enable.metrics.push."""
    if not settings.enable_metrics_push:
        return None

    def snapshot() -> dict[str, dict[str, float]]:
        now_ms = clock()
        metrics.follow(client.counts, now_ms, at_once=True)
        groups = metrics.snapshot(now_ms)
        groups["producer-metrics"] |= {
            "requests-in-flight": float(client.in_flight()),
            "connection-count": float(client.connection_count()),
            "metadata-age": (now_ms - metadata.updated_ms) / 1000,
        }
        # Topics come last, because a push may not have room for all of them.
        return dict(sorted(groups.items(), key=lambda g: g[0].startswith(_TOPICS)))

    resource = {}
    if settings.transactional_id is not None:
        resource["transactional_id"] = settings.transactional_id
    collector = MetricsCollector(snapshot, resource, time.time_ns)
    telemetry = ClientTelemetry(collector, random.Random())
    return TelemetrySender(client, metadata, telemetry, clock)
