"""Make the JSON document of the status page from the Prometheus metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mpbroker.exporter.exposition import Family
from mpbroker.exporter.remote_storage_metrics import remote_storage_status
from mpbroker.exporter.topic_traffic import TOPIC_FETCHED, TOPIC_PRODUCED

# The page is for people: long lists are cut; the largest entries come first.
_ROWS: Final = 200
_CLUSTER_FAMILY: Final = "mpbroker_cluster_lease_seconds"
_TOLD: Final = ("version", "pid", "started", "cluster_id", "listeners", "log_dirs")


def status_of(
    families: Sequence[Family], told: dict[str, Any], now: float
) -> dict[str, Any]:
    """Return the document of /api/status, which the status page shows.

    Args:
        told: the facts that the supervisor publishes: children, version, start.
        now: the time in seconds since 1970.
    """
    by_name = {family.name: family for family in families}

    def total(name: str) -> float:
        return sum(value for _, _, value in by_name[name].samples)

    def rows(name: str) -> list[dict[str, Any]]:
        return [
            {**dict(labels), "value": value}
            for suffix, labels, value in by_name[name].samples
            if not suffix
        ]

    return {
        "now": now,
        **{key: told.get(key) for key in _TOLD},
        "totals": {
            "requests": total("mpbroker_requests_total"),
            "errors": total("mpbroker_request_errors_total"),
            "received_bytes": total("mpbroker_received_bytes_total"),
            "sent_bytes": total("mpbroker_sent_bytes_total"),
            "connections": total("mpbroker_connections"),
            "purgatory": total("mpbroker_purgatory_size"),
            "unflushed_bytes": total("mpbroker_log_unflushed_bytes"),
            "deaths": total("mpbroker_process_deaths_total"),
        },
        "processes": _processes(told, rows),
        "queues": rows("mpbroker_queue_size"),
        "clients": rows("mpbroker_client_connections"),
        "tls": rows("mpbroker_tls_connections"),
        "apis": _apis(by_name),
        "topics": _topics(rows),
        "groups": _groups(rows),
        "remote": remote_storage_status(by_name),
        "cluster": _cluster(by_name),
    }


def _cluster(by_name: dict[str, Family]) -> dict[str, float] | None:
    """Return the figures of the cluster's node; None: the broker is in no cluster."""
    if _CLUSTER_FAMILY not in by_name:
        return None
    # Imported here: most brokers are in no cluster.
    from mpbroker.exporter.cluster_metrics import cluster_status

    return cluster_status(by_name)


def _processes(told: dict[str, Any], rows: Any) -> list[dict[str, Any]]:
    def by_id(name: str) -> dict[tuple[Any, Any], float]:
        return {(row["role"], row["id"]): row["value"] for row in rows(name)}

    cpu = by_id("mpbroker_process_cpu_seconds")
    memory = by_id("mpbroker_process_resident_memory_bytes")
    idle = by_id("mpbroker_idle_ratio")
    return [
        {
            **child,
            "cpu_s": cpu.get((child["role"], child["id"])),
            "memory_bytes": memory.get((child["role"], child["id"])),
            "idle": idle.get((child["role"], child["id"])),
        }
        for child in told.get("children", ())
    ]


def _apis(by_name: dict[str, Family]) -> list[dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for suffix, labels, value in by_name["mpbroker_request_stage_seconds"].samples:
        if suffix == "_bucket":
            continue
        of = dict(labels)
        row = found.setdefault(of["api"], {"api": of["api"]})
        if suffix == "_sum":
            row[f"{of['stage']}_s"] = value
        elif of["stage"] == "total":
            row["requests"] = value
    return sorted(found.values(), key=lambda row: -row["requests"])


def _topics(rows: Any) -> list[dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for name, column in (
        ("mpbroker_log_end_offset", "records"),
        ("mpbroker_log_start_offset", "deleted"),
        ("mpbroker_log_size_bytes", "bytes"),
        ("mpbroker_log_unflushed_bytes", "unflushed_bytes"),
    ):
        for row in rows(name):
            topic = found.setdefault(
                row["topic"],
                {
                    "topic": row["topic"],
                    "partitions": 0,
                    "records": 0,
                    "deleted": 0,
                    "bytes": 0,
                    "unflushed_bytes": 0,
                },
            )
            topic[column] += row["value"]
            topic["partitions"] += column == "records"
    traffic = {
        column: {row["topic"]: row["value"] for row in rows(name)}
        for name, column in (
            (TOPIC_PRODUCED, "produced_bytes"),
            (TOPIC_FETCHED, "fetched_bytes"),
        )
    }
    for name, topic in found.items():
        topic["records"] -= topic.pop("deleted")
        topic |= {column: by_topic.get(name) for column, by_topic in traffic.items()}
    return sorted(found.values(), key=lambda topic: -topic["bytes"])[:_ROWS]


def _groups(rows: Any) -> list[dict[str, Any]]:
    found: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in rows("mpbroker_group_lag"):
        key = row["group"], row["topic"]
        group = found.setdefault(
            key, {"group": key[0], "topic": key[1], "partitions": 0, "lag": 0}
        )
        group["partitions"] += 1
        group["lag"] += row["value"]
    return sorted(found.values(), key=lambda group: -group["lag"])[:_ROWS]
