"""Push a consumer's metrics to brokers that ask for them (KIP-714).

Pushes use the connections to leaders, during the user's calls of poll(). So a consumer
that is not polled, or that reads nothing, pushes nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from mpbroker.client.cluster import Cluster
from mpbroker.client.consumer.consumer_config import ConsumerSettings
from mpbroker.client.consumer.group_member import GroupMember
from mpbroker.client.selector import monotonic_ms
from mpbroker.client.telemetry.telemetry import ClientTelemetry
from mpbroker.client.telemetry.telemetry_metrics import Groups, MetricsCollector
from mpbroker.client.telemetry.telemetry_sender import TelemetrySender


def make_consumer_telemetry(
    cluster: Cluster,
    settings: ConsumerSettings,
    member: GroupMember | None,
    measure: Callable[[], Groups],
) -> TelemetrySender | None:
    """Return the sender of a consumer's metrics; None if enable.metrics.push is false.

    Args:
        cluster: the consumer's connections.
        settings: the consumer's settings.
        member: the consumer as a member of its group; None without group.id.
        measure: a function that returns the metrics; see `MetricsCollector`.
    """
    if not settings.enable_metrics_push:
        return None
    resource: dict[str, str] = {}
    if settings.group is not None:
        resource["group_id"] = settings.group.group_id
        if settings.group.group_instance_id is not None:
            resource["group_instance_id"] = settings.group.group_instance_id

    def snapshot() -> Groups:
        if member is not None and member.member_id:
            resource["group_member_id"] = member.member_id  # known once it has joined
        return measure()

    collector = MetricsCollector(snapshot, resource, time.time_ns)
    telemetry = ClientTelemetry(collector, random.Random())
    return TelemetrySender(
        cluster.client,
        cluster.addresses,
        telemetry,
        monotonic_ms,
        timeout_ms=float("inf"),  # it may queue behind a Fetch that waits for records
    )
