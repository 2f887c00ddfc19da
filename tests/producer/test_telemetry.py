"""A producer pushes its metrics where a broker asks for them, in nobody's way.

Mirrors testTelemetryRequest of Kafka's NetworkClientTest.
"""

from __future__ import annotations

import json
import time

import pytest

from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin import config_admin
from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.cluster import Cluster
from mpbroker.client.telemetry import telemetry_sender
from mpbroker.producer import Producer
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
from tests.client import fake_wire
from tests.producer.rig import SenderRig
from tests.support.patience import LONGEST_S

ASK, PUSH = ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY
ID = bytes(range(16))
SENT = "org.apache.kafka.producer.record.send.total"


@pytest.fixture
def served(monkeypatch):
    """Have brokers serve the two APIs."""
    monkeypatch.setitem(fake_wire.SERVED, ASK, GetTelemetrySubscriptionsRequest)
    monkeypatch.setitem(fake_wire.SERVED, PUSH, PushTelemetryRequest)


def told(**changes):
    values = {
        "client_instance_id": ID,
        "subscription_id": 7,
        "push_interval_ms": 1000,
        "telemetry_max_bytes": 1 << 20,
        "requested_metrics": [SENT],
    }
    return GetTelemetrySubscriptionsResponse(**(values | changes))


def subscribed(**settings):
    rig = SenderRig(**settings).ready()
    rig.wire.answer(told(), rig.wire.waiting(ASK)[0])
    rig.turns(2)
    return rig


def asks(rig):
    return [each for each in rig.wire.all_sent if each.key in (ASK, PUSH)]


def sent_in(request):
    (resource,) = read_metrics(bytes(request.metrics))
    (metric,) = resource["metrics"]
    return metric["points"][0]["value"]


def test_a_producer_asks_once_it_is_connected_and_pushes_to_the_same_broker(served):
    rig = subscribed()
    rig.send()
    rig.reply()
    rig.pass_ms(1500)
    rig.turns()
    (pushed,) = rig.wire.waiting(PUSH)
    assert sent_in(pushed.request) == 1
    assert not rig.wire.waiting(ASK)
    rig.wire.answer(PushTelemetryResponse(), pushed)
    rig.turns(2)
    assert rig.wire.waits[-1] == 1000
    rig.pass_ms(1000)
    rig.turns()
    assert len({each.node for each in asks(rig)}) == 1
    assert len(asks(rig)) == 3


def test_another_broker_is_asked_when_the_one_before_is_gone(served):
    rig = subscribed()
    (first,) = asks(rig)
    other = 1 - first.node
    rig.wire.hang_up(first.node)
    rig.turns()
    rig.wire.refuse_connect.add(first.node)
    rig.pass_ms(1500)
    rig.turns(3)  # metadata goes first
    assert [each.node for each in rig.wire.waiting(PUSH)] == [other]


def test_a_push_on_a_connection_that_is_lost_is_followed_by_a_question(served):
    rig = subscribed()
    rig.pass_ms(1500)
    rig.turns()
    (pushed,) = rig.wire.waiting(PUSH)
    rig.wire.hang_up(pushed.node)
    rig.turns()
    rig.pass_ms(1000)
    rig.turns(3)
    (asked,) = rig.wire.waiting(ASK)
    assert asked.request.client_instance_id == ID


def test_a_record_goes_before_a_push_that_is_due_with_it(served):
    rig = subscribed()
    rig.introduce()
    rig.pass_ms(1500)
    before = len(rig.wire.all_sent)
    rig.send()
    keys = [each.key for each in rig.wire.all_sent[before:]]
    assert keys == [ApiKey.PRODUCE, PUSH]


def test_a_connection_that_is_full_takes_no_push(served):
    rig = SenderRig(max_in_flight_requests_per_connection=1)
    del rig.wire.nodes[1]
    rig.ready()
    rig.wire.answer(told(), rig.wire.waiting(ASK)[0])
    rig.turns(2)
    rig.send()
    rig.pass_ms(1500)
    rig.turns(3)
    assert rig.produces
    assert not rig.wire.waiting(PUSH)
    rig.reply()
    rig.turns(4)  # metadata goes first
    assert rig.wire.waiting(PUSH)


def test_a_broker_without_the_two_apis_is_not_asked_and_nobody_wakes_for_it():
    rig = SenderRig().ready()
    rig.send()
    rig.reply()
    rig.turns(3)
    assert not asks(rig)
    without = SenderRig(enable_metrics_push=False).ready()
    without.send()
    without.reply()
    without.turns(3)
    assert rig.wire.waits == without.wire.waits


def test_enable_metrics_push_switches_it_off(served):
    rig = SenderRig(enable_metrics_push=False).ready()
    rig.send()
    rig.reply()
    rig.pass_ms(10_000)
    rig.turns(3)
    rig.sender.close()
    rig.sender.run()
    assert not asks(rig)


def close(rig, answer=None):
    """Run the sender to its end; a broker answers what is pushed, if it does."""
    run_once = rig.sender.run_once

    def turn():
        run_once()
        for pushed in rig.wire.waiting(PUSH):
            if answer is not None:
                rig.wire.answer(answer, pushed)
        if answer is None:
            rig.pass_ms(max(1.0, min(rig.wire.waits[-1], 1000)))

    rig.sender.run_once = turn
    rig.sender.close()
    rig.sender.run()


def test_closing_pushes_what_came_last_when_all_is_acknowledged(served):
    rig = subscribed()
    future = rig.send()
    rig.reply()
    assert future.done()
    close(rig, PushTelemetryResponse())
    (_, pushed) = asks(rig)
    assert pushed.request.terminating
    assert sent_in(pushed.request) == 1
    assert rig.wire.is_shut_down


def test_closing_does_not_wait_for_ever_for_an_answer(served):
    rig = subscribed()
    before_ms = rig.wire.now_ms
    close(rig)
    assert asks(rig)[-1].request.terminating
    passed_ms = rig.wire.now_ms - before_ms
    assert telemetry_sender.LAST_PUSH_MS <= passed_ms < 30_000
    assert rig.wire.is_shut_down


@pytest.mark.parametrize("why", ["forced", "no broker", "nothing asked for"])
def test_closing_pushes_nothing_where_there_is_nothing_to_wait_for(served, why):
    rig = SenderRig().ready()
    wanted = [] if why == "nothing asked for" else [SENT]
    rig.wire.answer(told(requested_metrics=wanted), rig.wire.waiting(ASK)[0])
    rig.turns(2)
    if why == "forced":
        rig.sender.force_close()
    if why == "no broker":
        for node in (0, 1):
            rig.wire.hang_up(node)
        rig.turns()
    rig.sender.close()
    before_ms = rig.wire.now_ms
    rig.sender.run()
    assert len(asks(rig)) == 1
    assert rig.wire.now_ms == before_ms


@pytest.mark.parametrize("why", ["another broker", "too many bytes", "a mistake"])
def test_closing_does_not_wait_for_a_push_that_cannot_be_made(served, why):
    rig = SenderRig().ready()
    limit = 10 if why == "too many bytes" else 1 << 20
    rig.wire.answer(told(telemetry_max_bytes=limit), rig.wire.waiting(ASK)[0])
    rig.turns(2)
    if why == "another broker":
        for key in (ASK, PUSH):
            del fake_wire.SERVED[key]
        for node in (0, 1):
            rig.wire.hang_up(node)
        rig.turns()
        rig.pass_ms(100)
        rig.ready()
    if why == "a mistake":
        rig.metrics.snapshot = None
    before = len(rig.wire.waits)
    before_ms = rig.wire.now_ms
    close(rig)
    assert len(asks(rig)) == 1
    assert rig.wire.waits[before:] == [0]
    assert rig.wire.now_ms == before_ms + 1


def test_metrics_that_cannot_be_told_are_given_up_and_records_still_go(served):
    rig = subscribed()
    rig.metrics.snapshot = None
    rig.pass_ms(1500)
    rig.turns(2)
    future = rig.send()
    rig.reply()
    assert future.result(0)
    assert len(asks(rig)) == 1


def test_records_sent_are_counted_in_the_brokers_telemetry_log(
    make_broker, tmp_path, topic_name, monkeypatch
):
    monkeypatch.setattr(telemetry_sender, "LAST_PUSH_MS", LONGEST_S * 1000.0)
    path = tmp_path / "telemetry.log"
    broker = make_broker({"client.telemetry.log.path": path})
    with Cluster(parse_addresses(broker.bootstrap), LONGEST_S) as cluster:
        resource = ConfigResource(ConfigResourceType.CLIENT_METRICS, "all")
        wanted = {"metrics": SENT, "interval.ms": "100"}
        config_admin.alter_configs(cluster, resource, wanted, ())

    def lines():
        return [json.loads(line) for line in path.read_text().splitlines()]

    with Producer(bootstrap_servers=broker.bootstrap, client_id="me") as producer:
        for _ in range(5):
            producer.send(topic_name, b"x")
        producer.flush(LONGEST_S)
        deadline = time.monotonic() + LONGEST_S
        while not path.exists() or len(lines()) < 2:
            assert time.monotonic() < deadline, "no push in time"
            time.sleep(0.05)
        for _ in range(3):
            producer.send(topic_name, b"x")
    found = lines()
    assert {line["client_id"] for line in found} == {"me"}
    assert {line["client_software_name"] for line in found} == {"mpbroker"}
    assert len({line["client_instance_id"] for line in found}) == 1
    assert [line["terminating"] for line in found].count(True) == 1
    metrics = [line["resources"][0]["metrics"][0] for line in found]
    assert {metric["name"] for metric in metrics} == {SENT}
    assert {metric["temporality"] for metric in metrics} == {"delta"}
    assert sum(metric["points"][0]["value"] for metric in metrics) == 8
