"""Contexts of handlers, made of plain values."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from mpbroker.config import BROKER_CONFIG_DEF
from mpbroker.server.described_partitions import DescribedPartitions
from mpbroker.server.handler_context import Broker, HandlerContext
from mpbroker.server.intent import NO_INTENT, Intent

NODE_ID = 1


def first_epoch(topic: Any, partition: int) -> int:
    """Return the leader epoch where no other broker has ever led."""
    return 0


def fake_logs(**methods: Any) -> Any:
    """Return logs that answer what a test wants: here, online, leader epoch 0."""
    return SimpleNamespace(
        **{
            "leader_epoch": first_epoch,
            "is_offline": lambda topic, partition: False,
            "is_elsewhere": lambda topic: False,
            "offline_version": lambda: None,
            "future_replicas": list,
            **methods,
        }
    )


def broker_of(registry: Any = None, **fields: Any) -> Broker:
    """Return broker 1, which clients find at host:9092 and which creates no topics."""
    logs = fields.pop("logs", None) or fake_logs()
    values: dict[str, Any] = {
        "node_id": NODE_ID,
        "cluster_id": "cluster",
        "rack": None,
        "advertised": [("host", 9092)],
        "auto_create_topics": False,
        "delete_topics": True,
        "num_partitions": 5,
        "internal_topics": {},
        "log_dirs": [],
        "definition": BROKER_CONFIG_DEF,
        "static_configs": {},
        "words": defaultdict(int),
        "registry": registry,
        "logs": logs,
        "described": DescribedPartitions(NODE_ID, logs),
        "delete_logs": lambda topic: None,
    }
    return Broker(**{**values, **fields})


def context(
    registry: Any = None,
    *,
    version: int = 0,
    intent: Intent = NO_INTENT,
    access: Any = None,
    **fields: Any,
) -> HandlerContext:
    """Return the context of a request from connection 0.

    Args:
        fields: of the Broker.
    """
    request: Any = SimpleNamespace(api_version=version, connection=0, slot=0)
    broker = broker_of(registry, intent=lambda request: intent, **fields)
    return HandlerContext(broker, request, access)
