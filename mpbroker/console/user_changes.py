"""Make a user's changes in the console: to topics, configs and groups; new messages.

Each change is made with requests of a Kafka client; the broker decides whether the user
may make it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from secrets import randbelow
from typing import Any, Final

from mpbroker.client.admin import config_admin, group_admin, topic_admin
from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.admin.topic_admin import EARLIEST, LATEST
from mpbroker.client.cluster import Cluster, only
from mpbroker.client.errors import check_error
from mpbroker.client.partitioner import partition_for_key
from mpbroker.console import group_pages
from mpbroker.console.message_pages import partition_of
from mpbroker.console.page_server import HttpError
from mpbroker.console.request_fields import number_of, text_of
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder

_Document = Mapping[str, Any]
_MAX_ENTRIES: Final = 1000  # configs, headers
_MAX_OFFSETS: Final = 100_000
_NAMED_TOPICS: Final = 12  # the last version of Produce that names topics
_PLACES: Final = {"earliest": EARLIEST, "latest": LATEST}


def create_topic(cluster: Cluster, given: _Document) -> Any:
    created = topic_admin.create_topic(
        cluster,
        text_of(given, "name"),
        partitions=_int32(given, "partitions", -1),
        replication_factor=-1,
        configs=_texts(given, "configs"),
    )
    return {"partitions": created.num_partitions}


def delete_topic(cluster: Cluster, given: _Document) -> Any:
    topic_admin.delete_topic(cluster, text_of(given, "name"))
    return {}


def set_config(cluster: Cluster, given: _Document) -> Any:
    """Set a config of a topic; if the request has no value, remove it."""
    resource = ConfigResource(ConfigResourceType.TOPIC, text_of(given, "topic"))
    key = text_of(given, "key")
    if given.get("value") is None:
        config_admin.alter_configs(cluster, resource, {}, [key])
    else:
        config_admin.alter_configs(cluster, resource, {key: _long_text(given, "value")})
    return {}


def produce(cluster: Cluster, given: _Document) -> Any:
    """Append one record to a topic; return its partition and offset.

    If the request names no partition, the record goes where Kafka's clients put its
    key; without a key, to any partition.
    """
    topic = text_of(given, "topic")
    key, value = _bytes(given, "key"), _bytes(given, "value")
    number = given.get("partition")
    if number is None:
        count = len(cluster.topic(topic, wait=False).partitions)
        number = partition_for_key(key, count) if key is not None else randbelow(count)
    where, leader = partition_of(
        cluster, topic, _int32({"partition": number}, "partition")
    )
    headers = _texts(given, "headers")
    batch = RecordBatchBuilder()
    batch.append(
        time.time_ns() // 1_000_000,
        key,
        value,
        [(name, text.encode()) for name, text in headers.items()],
    )
    data = PartitionProduceData(index=where.partition, records=batch.build())
    request = ProduceRequest(
        acks=-1,
        timeout_ms=int(cluster.timeout_s * 1000),
        topic_data=[TopicProduceData(name=topic, partition_data=[data])],
    )
    broker = cluster.broker(leader)
    answer = broker.request(request, ProduceResponse, max_version=_NAMED_TOPICS)
    found = only(
        only(answer.responses, broker.address).partition_responses, broker.address
    )
    check_error(found.error_code, str(where), found.error_message)
    return {"partition": where.partition, "offset": found.base_offset}


def plan_reset(cluster: Cluster, given: _Document) -> Any:
    """Return the offsets that a reset would give a group; change nothing.

    The request's field "to" is earliest, latest or a time in ms.
    """
    to = given.get("to")
    at = _PLACES[to] if to in ("earliest", "latest") else max(0, number_of(given, "to"))
    return group_pages.plan_reset(
        cluster, text_of(given, "group"), text_of(given, "topic"), at
    )


def reset_group(cluster: Cluster, given: _Document) -> Any:
    offsets = given.get("offsets")
    if not isinstance(offsets, dict) or not 0 < len(offsets) <= _MAX_OFFSETS:
        raise HttpError(HTTPStatus.BAD_REQUEST, "offsets are not those of a plan")
    wanted = {
        _int32({"partition": number}, "partition"): number_of(offsets, number)
        for number in offsets
    }
    group_pages.reset(cluster, text_of(given, "group"), text_of(given, "topic"), wanted)
    return {}


def delete_group(cluster: Cluster, given: _Document) -> Any:
    group_admin.delete_group(cluster, text_of(given, "group"))
    return {}


def _int32(given: _Document, name: str, default: int = 0) -> int:
    number = number_of(given, name, default)
    if not -(2**31) <= number < 2**31:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} is not a number of 32 bits")
    return number


def _long_text(given: _Document, name: str) -> str:
    """Return a field of a request as text of any length (its body has a limit)."""
    found = given.get(name)
    if not isinstance(found, str):
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} is not a text")
    return found


def _texts(given: _Document, name: str) -> dict[str, str]:
    found = given.get(name) or {}
    if not isinstance(found, dict) or len(found) > _MAX_ENTRIES:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} is not an object of texts")
    return {text_of({"name": each}, "name"): _long_text(found, each) for each in found}


def _bytes(given: _Document, name: str) -> bytes | None:
    if given.get(name) is None:
        return None
    text = _long_text(given, name)
    if given.get("encoding", "text") != "hex":
        return text.encode()
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name}: {error}") from error


CHANGES: Final[Mapping[str, Callable[[Cluster, _Document], Any]]] = {
    "/api/topics/create": create_topic,
    "/api/topics/delete": delete_topic,
    "/api/configs/set": set_config,
    "/api/produce": produce,
    "/api/groups/plan": plan_reset,
    "/api/groups/reset": reset_group,
    "/api/groups/delete": delete_group,
}
