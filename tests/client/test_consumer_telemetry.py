"""A consumer pushes its metrics where a broker asks for them (KIP-714)."""

from __future__ import annotations

import json
import time

import pytest

from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin import config_admin
from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.consumer import Consumer
from mpbroker.client.network_client import NetworkClient
from mpbroker.client.telemetry import telemetry_sender
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.get_telemetry_subscriptions import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
)
from mpbroker.protocol.messages.push_telemetry import (
    PushTelemetryRequest,
    PushTelemetryResponse,
)
from mpbroker.protocol.otlp_metrics import read_metrics
from tests.client import fake_broker as fake
from tests.client.test_consumer import fill, values
from tests.client.test_fetcher import batch_of
from tests.support.patience import LONGEST_S

ASK, PUSH = ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY
ID = bytes(range(16))
PREFIX = "org.apache.kafka.consumer."
# What KIP-714 has every consumer tell, as long as there is something to be told.
STANDARD = {
    "connection.creation.rate",
    "connection.creation.total",
    "node.request.latency.avg",
    "node.request.latency.max",
    "poll.idle.ratio.avg",
    "coordinator.commit.latency.avg",
    "coordinator.commit.latency.max",
    "coordinator.assigned.partitions",
    "coordinator.rebalance.latency.avg",
    "coordinator.rebalance.latency.max",
    "coordinator.rebalance.latency.total",
    "fetch.manager.fetch.latency.avg",
    "fetch.manager.fetch.latency.max",
}


@pytest.fixture
def asking(fake_broker, monkeypatch):
    """A broker that wants all, every 10 ms."""
    monkeypatch.setitem(fake.SERVED, ASK, GetTelemetrySubscriptionsRequest)
    monkeypatch.setitem(fake.SERVED, PUSH, PushTelemetryRequest)
    told = GetTelemetrySubscriptionsResponse(
        client_instance_id=ID,
        subscription_id=7,
        push_interval_ms=10,
        telemetry_max_bytes=1 << 20,
        requested_metrics=["*"],
    )
    fake_broker.answer_with(ASK, *[lambda request: told] * 3)
    fake_broker.is_silent = False
    monkeypatch.setattr(
        fake_broker,
        "_push_telemetry",
        lambda request: None if fake_broker.is_silent else PushTelemetryResponse(),
        raising=False,
    )
    fake_broker.append("t", 0, batch_of(b"0", b"1"))
    monkeypatch.setattr(telemetry_sender, "SHORT_LAST_PUSH_MS", LONGEST_S * 1000.0)
    return fake_broker


def read(broker, **settings):
    """Read the two records, and go on until something was pushed, if ever."""
    settings = {"auto_offset_reset": "earliest", "fetch_max_wait_ms": 1} | settings
    with Consumer(bootstrap_servers=str(broker.address), **settings) as consumer:
        consumer.assign([("t", 0)])
        assert values(consumer, 2) == [0, 1]
        pushes = settings.get("enable_metrics_push", True)
        deadline = time.monotonic() + LONGEST_S
        while pushes and not broker.seen(PUSH):
            assert time.monotonic() < deadline, "no push in time"
            consumer.poll(10)
        consumer.poll(10)


def test_a_consumer_asks_once_and_pushes_while_it_is_polled_and_when_it_is_closed(
    asking,
):
    read(asking)
    assert len(asking.seen(ASK)) == 1
    *others, last = asking.seen(PUSH)
    assert others
    assert last.terminating
    assert not any(each.terminating for each in others)
    (resource,) = read_metrics(bytes(last.metrics))
    points = {
        metric["name"].removeprefix(PREFIX): metric["points"]
        for metric in resource["metrics"]
    }
    (consumed,) = [
        point["value"]
        for point in points["fetch.manager.records.consumed.total"]
        if point.get("attributes") == {"topic": "t"}
    ]
    assert consumed == 2
    (lag,) = points["fetch.manager.records.lag"]
    assert lag["attributes"] == {"topic": "t", "partition": "0"}
    (node,) = points["node.response.total"]
    assert node["attributes"] == {"node_id": "node-7"}


def test_enable_metrics_push_switches_it_off(asking):
    read(asking, enable_metrics_push=False)
    assert not asking.seen(ASK)


def test_a_consumer_that_is_not_asked_pushes_nothing_and_closes_at_once(fake_broker):
    fake_broker.append("t", 0, batch_of(b"0", b"1"))
    read(fake_broker, enable_metrics_push=False)
    with Consumer(bootstrap_servers=str(fake_broker.address)) as consumer:
        consumer.assign([("t", 0)])
        consumer.poll(10)
    assert {ASK, PUSH}.isdisjoint(key for key, _, _ in fake_broker.requests)


def test_a_broker_that_keeps_silent_about_the_last_push_is_not_waited_for_for_ever(
    asking, monkeypatch
):
    monkeypatch.setattr(telemetry_sender, "SHORT_LAST_PUSH_MS", 50.0)
    consumer = Consumer(
        bootstrap_servers=str(asking.address), auto_offset_reset="earliest"
    )
    consumer.assign([("t", 0)])
    assert values(consumer, 2) == [0, 1]
    deadline = time.monotonic() + LONGEST_S
    while not asking.seen(PUSH):
        assert time.monotonic() < deadline, "no push in time"
        consumer.poll(10)
    asking.is_silent = True
    consumer.close()


def test_a_push_that_stands_behind_a_fetch_ends_no_connection(asking, monkeypatch):
    limits = []
    send = NetworkClient.send

    def note(client, node, request, *arguments, **options):
        if isinstance(request, PushTelemetryRequest):
            limits.append(options.get("timeout_ms"))
        send(client, node, request, *arguments, **options)

    monkeypatch.setattr(NetworkClient, "send", note)
    read(asking)
    assert set(limits) == {float("inf")}


def test_a_members_metrics_are_in_the_brokers_telemetry_log_by_kips_names(
    make_broker, tmp_path, topic_name, monkeypatch
):
    monkeypatch.setattr(telemetry_sender, "SHORT_LAST_PUSH_MS", LONGEST_S * 1000.0)
    path = tmp_path / "telemetry.log"
    broker = make_broker({"client.telemetry.log.path": path})
    with Cluster(parse_addresses(broker.bootstrap), LONGEST_S) as cluster:
        resource = ConfigResource(ConfigResourceType.CLIENT_METRICS, "all")
        wanted = {"metrics": PREFIX, "interval.ms": "100"}
        config_admin.alter_configs(cluster, resource, wanted, ())
    fill(broker.bootstrap, topic_name, range(5))
    with Consumer(
        bootstrap_servers=broker.bootstrap,
        client_id="me",
        group_id="g",
        auto_offset_reset="earliest",
        auto_commit_interval_ms=0,
    ) as consumer:
        consumer.subscribe([topic_name])
        assert values(consumer, 5) == [0, 1, 2, 3, 4]
        deadline = time.monotonic() + LONGEST_S
        while not path.exists() or STANDARD - told(path)[0]:
            assert time.monotonic() < deadline, f"{STANDARD - told(path)[0]} is missing"
            consumer.poll(50)
        assert consumer.assignment()[0] == TopicPartition(topic_name, 0)
    _, attributes, last = told(path)
    assert attributes["group_id"] == "g"
    assert attributes["group_member_id"]
    assert last is True


def told(path):
    """What names were pushed in all, and as whose; and whether the end has come."""
    if not path.exists():
        return set(), {}, False
    whole, _, _ = path.read_text().rpartition("\n")  # the last may be on its way
    lines = [json.loads(line) for line in whole.splitlines()]
    if not lines:
        return set(), {}, False
    resources = [line["resources"][0] for line in lines]
    names = {m["name"].removeprefix(PREFIX) for r in resources for m in r["metrics"]}
    return names, resources[-1]["attributes"], lines[-1]["terminating"]
