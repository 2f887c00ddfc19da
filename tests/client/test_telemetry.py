"""When a client asks what to push, pushes it, waits, and stops (KIP-714).

Mirrors Kafka's ClientTelemetryReporterTest and ClientTelemetryUtilsTest.
"""

from __future__ import annotations

import random

import pytest

from mpbroker.client.telemetry import telemetry as module
from mpbroker.client.telemetry.telemetry import (
    DEFAULT_INTERVAL_MS,
    ClientTelemetry,
    TelemetryState,
)
from mpbroker.client.telemetry.telemetry_metrics import MAX_POINTS, MetricsCollector
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.get_telemetry_subscriptions import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
)
from mpbroker.protocol.messages.push_telemetry import (
    PushTelemetryRequest,
    PushTelemetryResponse,
)
from mpbroker.protocol.otlp_metrics import read_metrics
from mpbroker.protocol.records.compression import Codec, decompress

ID = bytes(range(16))
INTERVAL_MS = 1000
S = TelemetryState
NEVER = float("inf")


class Client:
    """A state machine, the broker's answers, and a clock."""

    def __init__(self):
        self.now_ms = 5000.0
        self.wall_ns = 1_000
        self.groups = {
            "producer-metrics": {
                "record-send-total": 3.0,
                "record-send-rate": 0.5,
                "request-latency-avg": float("nan"),
            },
            "producer-node-metrics.node-1": {"response-total": 2.0},
            "producer-topic-metrics.a.b": {"byte-total": 70.0},
        }
        self.collector = MetricsCollector(
            lambda: self.groups, {"transactional_id": "x"}, lambda: self.wall_ns
        )
        self.telemetry = ClientTelemetry(self.collector, random.Random(1))
        self.request = None

    def delay(self):
        return self.telemetry.delay_ms(self.now_ms)

    def next(self):
        assert self.delay() == 0
        self.request = self.telemetry.next_request(self.now_ms)
        return self.request

    def take(self, response, request=None):
        self.telemetry.take(request or self.request, response, self.now_ms)

    def subscribe(self, **changes):
        """Ask, and be told."""
        asked = self.next()
        assert isinstance(asked, GetTelemetrySubscriptionsRequest)
        told = {
            "client_instance_id": ID,
            "subscription_id": 7,
            "accepted_compression_types": [],
            "push_interval_ms": INTERVAL_MS,
            "telemetry_max_bytes": 1 << 20,
            "delta_temporality": True,
            "requested_metrics": ["*"],
        }
        self.take(GetTelemetrySubscriptionsResponse(**(told | changes)))
        return asked

    def push(self, code=0):
        """Wait until it is time to push, and be answered."""
        self.now_ms += self.delay()
        self.wall_ns += 1_000
        pushed = self.next()
        assert isinstance(pushed, PushTelemetryRequest)
        self.take(PushTelemetryResponse(error_code=code))
        return pushed


def metrics_of(pushed, codec=Codec.NONE):
    assert pushed.compression_type == codec
    (resource,) = read_metrics(decompress(codec, pushed.metrics, 1 << 20))
    assert resource["attributes"] == {"transactional_id": "x"}
    prefix = "org.apache.kafka.producer."
    return {m["name"].removeprefix(prefix): m for m in resource["metrics"]}


def value_of(pushed, name):
    return metrics_of(pushed)[name]["points"][0]["value"]


def test_a_client_asks_at_once_and_by_no_name_and_then_by_the_one_it_got():
    client = Client()
    assert client.subscribe().client_instance_id == bytes(16)
    assert client.telemetry.instance_id == ID
    assert client.push(ErrorCode.UNKNOWN_SUBSCRIPTION_ID).client_instance_id == ID
    assert client.subscribe().client_instance_id == ID


def test_the_first_push_comes_after_half_to_one_and_a_half_intervals_then_each():
    delays = set()
    for seed in range(50):
        client = Client()
        client.telemetry = ClientTelemetry(client.collector, random.Random(seed))
        client.subscribe()
        delays.add(client.delay())
        client.push()
        assert client.delay() == INTERVAL_MS
    assert 500 <= min(delays) < 700
    assert 1300 < max(delays) <= 1500


def test_nothing_more_is_due_while_an_answer_is_waited_for():
    client = Client()
    client.next()
    assert client.delay() == NEVER
    assert client.telemetry.next_request(client.now_ms) is None


def test_what_is_pushed_has_kips_names_attributes_and_kinds():
    client = Client()
    client.subscribe()
    pushed = client.push()
    assert pushed.subscription_id == 7
    assert not pushed.terminating
    metrics = metrics_of(pushed)
    assert set(metrics) == {
        "record.send.total",
        "record.send.rate",
        "node.response.total",
        "topic.byte.total",
    }  # a mean of nothing is none
    total = metrics["record.send.total"]
    assert total["type"] == "sum"
    assert total["monotonic"]
    assert total["temporality"] == "delta"
    assert metrics["record.send.rate"]["type"] == "gauge"
    assert metrics["record.send.rate"]["points"][0]["value"] == 0.5
    (node,) = metrics["node.response.total"]["points"]
    assert node["attributes"] == {"node_id": "node-1"}
    (topic,) = metrics["topic.byte.total"]["points"]
    assert topic["attributes"] == {"topic": "a.b"}


@pytest.mark.parametrize(
    ("requested", "names"),
    [
        (["org.apache.kafka.producer.record.send.t"], {"record.send.total"}),
        (["org.apache.kafka.producer.node.", "x"], {"node.response.total"}),
        (["org.apache.kafka.consumer."], set()),
    ],
)
def test_only_what_begins_with_a_prefix_asked_for_is_pushed(requested, names):
    client = Client()
    client.subscribe(requested_metrics=requested, accepted_compression_types=[4])
    pushed = client.push()
    if names:
        assert set(metrics_of(pushed, Codec.ZSTD)) == names
    else:
        assert (pushed.compression_type, bytes(pushed.metrics)) == (0, b"")


def test_who_is_asked_for_nothing_asks_again_after_an_interval():
    client = Client()
    client.subscribe(requested_metrics=[])
    assert client.telemetry.state is S.SUBSCRIPTION_NEEDED
    assert client.delay() == INTERVAL_MS
    client.now_ms += INTERVAL_MS
    client.subscribe()
    assert client.telemetry.state is S.PUSH_NEEDED


def test_an_interval_that_is_none_is_five_minutes():
    client = Client()
    client.subscribe(push_interval_ms=0, requested_metrics=[])
    assert client.delay() == DEFAULT_INTERVAL_MS


def test_deltas_tell_what_came_since_the_push_before_and_totals_all():
    for is_delta, values in ((True, [3, 2, 0]), (False, [3, 5, 5])):
        client = Client()
        client.subscribe(delta_temporality=is_delta)
        got = []
        for _ in range(3):
            got.append(value_of(client.push(), "record.send.total"))
            client.groups["producer-metrics"]["record-send-total"] = 5.0
        assert got == values


def test_what_was_refused_is_told_again_and_what_may_have_arrived_is_not():
    client = Client()
    client.subscribe()
    client.push()
    client.groups["producer-metrics"]["record-send-total"] = 10.0
    assert value_of(client.push(ErrorCode.UNKNOWN_SUBSCRIPTION_ID), "record.send.total")
    client.subscribe()
    assert value_of(client.push(), "record.send.total") == 7
    client.groups["producer-metrics"]["record-send-total"] = 11.0
    client.now_ms += client.delay()
    client.next()
    client.take(None)
    client.now_ms += client.delay()
    client.subscribe()
    assert value_of(client.push(), "record.send.total") == 0


def test_sums_begin_anew_when_their_temporality_changes():
    client = Client()
    client.subscribe(delta_temporality=True)
    client.push()
    client.push(ErrorCode.UNKNOWN_SUBSCRIPTION_ID)
    client.subscribe(delta_temporality=False)
    client.push(ErrorCode.UNKNOWN_SUBSCRIPTION_ID)
    client.subscribe(delta_temporality=True)
    assert value_of(client.push(), "record.send.total") == 3


@pytest.mark.parametrize(
    "code",
    [ErrorCode.UNKNOWN_SUBSCRIPTION_ID, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE],
)
def test_who_pushed_by_another_subscription_asks_again_at_once(code):
    client = Client()
    client.subscribe()
    client.push(code)
    assert client.telemetry.state is S.SUBSCRIPTION_NEEDED
    assert client.delay() == 0


@pytest.mark.parametrize(
    "code", [ErrorCode.TELEMETRY_TOO_LARGE, ErrorCode.THROTTLING_QUOTA_EXCEEDED]
)
def test_who_pushed_too_much_or_too_early_asks_again_after_an_interval(code):
    client = Client()
    client.subscribe()
    client.push(code)
    assert client.telemetry.state is S.SUBSCRIPTION_NEEDED
    assert client.delay() == INTERVAL_MS


def test_who_asked_too_early_asks_again_after_five_minutes_or_its_interval():
    client = Client()
    refusal = GetTelemetrySubscriptionsResponse(
        error_code=ErrorCode.THROTTLING_QUOTA_EXCEEDED
    )
    client.next()
    client.take(refusal)
    assert client.delay() == DEFAULT_INTERVAL_MS
    client.now_ms += client.delay()
    client.subscribe()
    client.push(ErrorCode.UNKNOWN_SUBSCRIPTION_ID)
    client.next()
    client.take(refusal)
    assert client.delay() == INTERVAL_MS


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_RECORD,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.UNKNOWN_SERVER_ERROR,
        12345,
    ],
)
@pytest.mark.parametrize("when", ["asking", "pushing"])
def test_any_other_error_is_the_end(code, when):
    client = Client()
    if when == "pushing":
        client.subscribe()
        client.push(code)
    else:
        client.next()
        client.take(GetTelemetrySubscriptionsResponse(error_code=code))
    assert client.telemetry.has_ended
    assert client.delay() == NEVER


def test_a_broker_that_names_no_instance_is_the_end():
    client = Client()
    client.subscribe(client_instance_id=bytes(16))
    assert client.telemetry.has_ended


def test_a_lost_answer_has_it_ask_again_after_an_interval():
    client = Client()
    client.next()
    client.take(None)
    assert client.delay() == DEFAULT_INTERVAL_MS
    client.now_ms += client.delay()
    client.subscribe()
    client.now_ms += client.delay()
    client.next()
    client.take(None)
    assert client.telemetry.state is S.SUBSCRIPTION_NEEDED
    assert client.delay() == INTERVAL_MS


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_the_first_codec_that_the_broker_takes_is_used(codec):
    client = Client()
    client.subscribe(accepted_compression_types=[99, codec, Codec.GZIP])
    assert "record.send.total" in metrics_of(client.push(), codec)


def test_a_codec_whose_library_is_missing_is_passed_over_for_good(monkeypatch):
    tried = []

    def compress(codec, data):
        tried.append(codec)
        if codec != Codec.GZIP:
            raise ImportError
        return b"%d" % codec

    monkeypatch.setattr(module, "compress", compress)
    client = Client()
    client.subscribe(accepted_compression_types=[Codec.ZSTD, Codec.GZIP])
    assert client.push().compression_type == Codec.GZIP
    assert client.push().compression_type == Codec.GZIP
    assert tried == [Codec.ZSTD, Codec.GZIP, Codec.GZIP]


def test_what_is_too_much_leaves_out_topics_and_nodes_and_then_waits():
    client = Client()
    client.groups |= {
        f"producer-topic-metrics.{n}": {"byte-total": 1.0} for n in range(100)
    }
    client.subscribe(telemetry_max_bytes=400)
    assert set(metrics_of(client.push())) == {"record.send.total", "record.send.rate"}
    client.push(ErrorCode.UNKNOWN_SUBSCRIPTION_ID)
    client.subscribe(telemetry_max_bytes=20)
    client.now_ms += client.delay()
    assert client.next() is None
    assert client.delay() == INTERVAL_MS


def test_no_more_is_told_than_a_receiver_takes():
    client = Client()
    client.groups |= {
        f"producer-topic-metrics.{n}": {"byte-total": 1.0, "byte-rate": 1.0}
        for n in range(MAX_POINTS)
    }
    client.subscribe()
    metrics = metrics_of(client.push())
    assert sum(len(m["points"]) for m in metrics.values()) == MAX_POINTS
    assert "record.send.total" in metrics


@pytest.mark.parametrize("answer", [PushTelemetryResponse(), None])
def test_closing_pushes_once_more_at_once_and_says_that_it_ends(answer):
    client = Client()
    client.subscribe()
    client.telemetry.begin_end(client.now_ms)
    pushed = client.next()
    assert pushed.terminating
    assert value_of(pushed, "record.send.total") == 3
    assert not client.telemetry.has_ended
    assert client.delay() == NEVER
    client.take(answer)
    assert client.telemetry.has_ended


def test_an_answer_to_the_push_before_the_last_is_not_its_own():
    client = Client()
    client.subscribe()
    client.now_ms += client.delay()
    before = client.next()
    client.telemetry.begin_end(client.now_ms)
    last = client.next()
    assert last.terminating
    assert value_of(last, "record.send.total") == 0  # told by the one before
    client.take(
        PushTelemetryResponse(error_code=ErrorCode.UNKNOWN_SUBSCRIPTION_ID), before
    )
    assert client.telemetry.state is S.TERMINATING_PUSH_IN_PROGRESS
    client.take(PushTelemetryResponse(), last)
    assert client.telemetry.has_ended


@pytest.mark.parametrize("asked", [False, True])
def test_who_was_never_told_what_to_push_ends_without(asked):
    client = Client()
    if asked:
        client.next()
    client.telemetry.begin_end(client.now_ms)
    assert client.telemetry.has_ended
    if asked:
        client.take(GetTelemetrySubscriptionsResponse(client_instance_id=ID))
        assert client.telemetry.has_ended
