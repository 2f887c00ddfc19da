"""Metrics pushed to an OpenTelemetry collector."""

from __future__ import annotations

import contextlib
import gzip
import logging
import socket
import socketserver
import struct
import threading
import time

import pytest
from confluent_kafka import Producer
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from mpbroker.config.metrics_settings import parse_headers, shown_endpoint
from mpbroker.exporter import otlp_push
from mpbroker.exporter.exposition import counter, gauge, histogram, summary
from mpbroker.exporter.otlp_push import OtlpPusher, Target, otlp_metrics
from mpbroker.ipc.counters.request_metrics import Histogram, bounds_s
from mpbroker.protocol.otlp_encode import encode_metrics
from mpbroker.protocol.otlp_metrics import read_metrics
from tests.chaos.peek import Peek
from tests.exporter.asking import get, pids_of, samples, told
from tests.exporter.collecting import collector
from tests.support.broker import Broker
from tests.support.children import wait_until

START, NOW = 1_700_000_000_000_000_000, 1_700_000_060_000_000_000
RESOURCE = {"service.name": "mpbroker", "service.instance.id": "abc/1"}


def some_families():
    requests = counter("mpbroker_requests_total", "Requests answered.")
    requests.add(5, api="Fetch")
    requests.add(7, api="Produce")
    memory = gauge("mpbroker_request_memory_bytes", "Memory.")
    memory.add(1.5, state="used")
    times = histogram("mpbroker_request_stage_seconds", "Time.")
    counts = [0] * (len(bounds_s()) + 1)
    counts[0], counts[3], counts[-1] = 2, 1, 4
    times.add_histogram(Histogram(counts, 3_000_000_000), api="Fetch", stage="total")
    times.add_histogram(Histogram(counts, 500_000_000), api="Fetch", stage="send")
    again = summary("mpbroker_reauthentication_seconds", "Again.")
    again.add_summary(2.5, 3)
    theirs = counter("kafka_server_brokertopicmetrics_bytesin_total", "Theirs.")
    theirs.add(1)
    nothing = gauge("mpbroker_idle_ratio", "Nothing yet.")
    return [requests, memory, times, again, theirs, nothing]


def encoded(families=None):
    metrics = otlp_metrics(families or some_families(), START, NOW)
    return encode_metrics(RESOURCE, metrics)


# -- what is sent ----------------------------------------------------------------------


def test_counters_gauges_and_histograms_are_read_back():
    [resource] = read_metrics(encoded())
    assert resource["attributes"] == RESOURCE
    by_name = {metric["name"]: metric for metric in resource["metrics"]}
    assert list(by_name) == [
        "mpbroker_requests_total",
        "mpbroker_request_memory_bytes",
        "mpbroker_request_stage_seconds",
        "mpbroker_reauthentication_seconds",
    ]
    requests = by_name["mpbroker_requests_total"]
    assert requests["type"] == "sum" and requests["monotonic"]
    assert requests["temporality"] == "cumulative"
    assert [(each["value"], each["attributes"]) for each in requests["points"]] == [
        (5.0, {"api": "Fetch"}),
        (7.0, {"api": "Produce"}),
    ]
    memory = by_name["mpbroker_request_memory_bytes"]
    assert (memory["type"], memory["unit"]) == ("gauge", "By")
    assert memory["points"][0]["time_ns"] == NOW
    times = by_name["mpbroker_request_stage_seconds"]
    assert (times["type"], times["unit"]) == ("histogram", "s")
    assert [(each["count"], each["sum"]) for each in times["points"]] == [
        (7, 3.0),
        (7, 0.5),
    ]
    again = by_name["mpbroker_reauthentication_seconds"]["points"]
    assert [(each["count"], each["sum"]) for each in again] == [(3, 2.5)]


def test_a_small_push_is_these_bytes():
    """After the protobuf encoding guide, by hand."""
    family = counter("mpbroker_a_total", "B.")
    family.add(2, c="d")
    point = bytes.fromhex(
        "11"
        "000022e3e3159717"  # start_time_unix_nano
        "19"
        "0088 75db f115 9717"  # time_unix_nano
        "21"
        "0000000000000040"  # as_double: 2.0
        "3a08"
        "0a0163"
        "1203"
        "0a0164"  # attributes: c is d
    )
    start, now = 0x1797_15E3_E322_0000, 0x1797_15F1_DB75_8800
    metric = (
        bytes([0x0A, 16]) + b"mpbroker_a_total" + b"\x12\x02B."
        + bytes([0x3A, len(point) + 2 + 4, 0x0A, len(point)]) + point
        + b"\x10\x02\x18\x01"  # cumulative, monotonic
    )  # fmt: skip
    scope = bytes([0x12, len(metric)]) + metric
    resource = b"\x0a\x0d\x0a\x0b\x0a\x01e\x12\x06\x0a\x04fghi"
    whole = resource + bytes([0x12, len(scope)]) + scope
    sent = encode_metrics({"e": "fghi"}, otlp_metrics([family], start, now))
    assert sent.hex() == (bytes([0x0A, len(whole)]) + whole).hex()


def test_the_official_package_reads_the_same():
    request = ExportMetricsServiceRequest.FromString(encoded())
    [resource] = request.resource_metrics
    said = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert said == RESOURCE
    requests, memory, times, again = resource.scope_metrics[0].metrics
    assert requests.sum.is_monotonic and requests.sum.aggregation_temporality == 2
    assert [point.as_double for point in requests.sum.data_points] == [5.0, 7.0]
    assert requests.sum.data_points[0].start_time_unix_nano == START
    assert requests.description == "Requests answered."
    assert memory.gauge.data_points[0].as_double == 1.5 and memory.unit == "By"
    point = times.histogram.data_points[0]
    assert times.histogram.aggregation_temporality == 2
    assert (point.count, point.sum) == (7, 3.0)
    assert list(point.explicit_bounds) == bounds_s()
    assert len(point.bucket_counts) == len(bounds_s()) + 1
    assert (point.bucket_counts[0], point.bucket_counts[3]) == (2, 1)
    assert point.bucket_counts[-1] == 4 and sum(point.bucket_counts) == 7
    assert {each.key: each.value.string_value for each in point.attributes} == {
        "api": "Fetch",
        "stage": "total",
    }
    assert not again.histogram.data_points[0].bucket_counts
    assert again.histogram.data_points[0].count == 3


# -- how it is sent --------------------------------------------------------------------


@pytest.fixture
def receiver(monkeypatch):
    monkeypatch.setattr(otlp_push, "_LONGEST_PAUSE_S", 0.01)
    with collector() as made:
        yield made


def pusher(url, timeout_s=90.0, **headers):
    return OtlpPusher(Target(url, headers, timeout_s, RESOURCE))


def push_and_wait(made):
    """One push, whatever comes of it."""
    made.push(some_families(), START, NOW)
    assert made._thread is not None
    made._thread.join(90)
    assert not made._thread.is_alive()


def warnings(caplog):
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


def test_a_push_is_a_post_with_the_headers_that_were_set(receiver):
    made = pusher(receiver.url, authorization="Bearer x")
    push_and_wait(made)
    [push] = receiver.pushes
    assert push.path == "/v1/metrics"
    assert push.headers["content-type"] == "application/x-protobuf"
    assert push.headers["authorization"] == "Bearer x"
    assert push.body == encoded()
    assert (made.pushed, made.left) == (1, 0)


def test_a_push_may_be_compressed(receiver):
    made = OtlpPusher(Target(receiver.url, {}, 90.0, RESOURCE, compresses=True))
    push_and_wait(made)
    [push] = receiver.pushes
    assert push.headers["content-encoding"] == "gzip"
    assert gzip.decompress(push.body) == encoded()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_collector_that_cannot_now_is_asked_again(receiver, status, caplog):
    receiver.statuses = (status, status, 200)
    receiver.retry_after = "1"
    made = pusher(receiver.url)
    push_and_wait(made)
    assert len({push.body for push in receiver.pushes}) == 1
    assert len(receiver.pushes) == 3
    assert (made.pushed, made.left) == (1, 0) and not warnings(caplog)


def test_one_that_refuses_is_not_and_the_log_says_so_once(receiver, caplog):
    receiver.statuses = (400, 401, 400, 200, 500)
    made = pusher(receiver.url)
    with caplog.at_level(logging.INFO, "mpbroker"):
        for _ in range(3):
            push_and_wait(made)
        assert len(receiver.pushes) == 3
        [line] = warnings(caplog)
        assert line.startswith(f"otlp.endpoint={receiver.url}: ")
        assert "it answers 400 Bad Request" in line
        push_and_wait(made)
        assert "takes metrics again" in caplog.records[-1].getMessage()
        push_and_wait(made)
    assert len(warnings(caplog)) == 2
    assert (made.pushed, made.left) == (1, 4)


def test_tries_are_bounded(receiver, caplog):
    receiver.statuses = (503,)
    made = pusher(receiver.url)
    push_and_wait(made)
    assert len(receiver.pushes) == 4
    assert (made.pushed, made.left) == (0, 1)
    assert len(warnings(caplog)) == 1


def test_nobody_there_and_nobody_who_speaks_http_are_told_to_the_log(
    monkeypatch, caplog
):
    monkeypatch.setattr(otlp_push, "_LONGEST_PAUSE_S", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    made = pusher(f"http://127.0.0.1:{port}/")
    push_and_wait(made)
    [line] = warnings(caplog)
    assert "refused" in line
    assert made.left == 1


def test_while_a_push_waits_nothing_else_does(receiver):
    receiver.may_answer.clear()
    made = pusher(receiver.url)
    made.push(some_families(), START, NOW)
    wait_until(lambda: receiver.pushes)
    made.push(some_families(), START, NOW)  # returns at once, and is left out
    assert (made.pushed, made.left) == (0, 1)
    receiver.may_answer.set()
    made._thread.join(90)
    assert (made.pushed, len(receiver.pushes)) == (1, 1)


@pytest.mark.parametrize("beginning", [b"HTTP/1.1 200 OK\r\nx: ", b""])
def test_an_answer_a_byte_at_a_time_is_not_waited_for_to_its_end(
    monkeypatch, caplog, beginning
):
    monkeypatch.setattr(otlp_push, "_LONGEST_PAUSE_S", 0.001)

    class Dripping(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1 << 16)
            with contextlib.suppress(OSError):
                self.request.sendall(beginning)
                while True:
                    self.request.sendall(b"a")
                    time.sleep(0.01)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dripping) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            made = pusher(f"http://127.0.0.1:{server.server_address[1]}/", 0.2)
            push_and_wait(made)
        finally:
            server.shutdown()
    [line] = warnings(caplog)
    assert "timed out" in line
    assert (made.pushed, made.left) == (0, 1)


def test_what_became_of_pushes_is_a_metric(receiver):
    receiver.statuses = (200, 200, 400)
    made = pusher(receiver.url)
    for _ in range(3):
        push_and_wait(made)
    family = made.family()
    assert (family.name, family.kind) == ("mpbroker_otlp_pushes_total", "counter")
    assert {dict(labels)["result"]: value for _, labels, value in family.samples} == {
        "taken": 2,
        "failed": 1,
    }


def test_a_broker_pushes_what_its_port_shows(tmp_path):
    with collector() as receiver:
        config = {
            "metrics.listeners": "HTTP://127.0.0.1:0",
            "otlp.endpoint": receiver.url,
            "otlp.interval.ms": "200",
            "otlp.headers": "x-tenant=a%20b",
            "otlp.resource.attributes": "deployment.environment.name=test",
        }
        with Broker(tmp_path / "data", config) as made:
            wait_until(lambda: len(receiver.pushes) > 2)
            status, text = get(made)
            assert status == 200
            ours = {key.partition("{")[0] for key in samples(text)}
            taken = 'mpbroker_otlp_pushes_total{result="taken"}'
            wait_until(lambda: samples(get(made)[1])[taken] > 0)
            told_cluster = told(made)["cluster_id"]
            with contextlib.closing(Peek(made.pid)) as peek:
                counted_since_ns = peek.boot_ns
        push = receiver.pushes[-1]
        assert push.headers["x-tenant"] == "a b"
        [resource] = read_metrics(push.body)
        attributes = resource["attributes"]
        assert attributes["service.name"] == "mpbroker"
        assert attributes["service.instance.id"] == f"{told_cluster}/1"
        assert attributes["service.version"]
        assert attributes["deployment.environment.name"] == "test"
        names = {metric["name"] for metric in resource["metrics"]}
        assert {"mpbroker_connections", "mpbroker_produced_bytes_total"} <= names & ours
        # Of the counters, which outlive the program by an upgrade; not of the program.
        assert struct.pack("<Q", counted_since_ns) in push.body


def test_a_collector_alone_is_reason_enough_for_an_exporter(tmp_path):
    with collector() as receiver:
        config = {"otlp.endpoint": receiver.url, "otlp.interval.ms": "200"}
        with Broker(tmp_path / "data", config) as made:
            wait_until(lambda: receiver.pushes)
            assert pids_of(made, "exporter") and "metrics" not in told(made)


def test_what_was_counted_last_is_pushed_when_a_broker_stops(tmp_path):
    with collector() as receiver:
        config = {
            "otlp.endpoint": receiver.url,
            "otlp.interval.ms": "3600000",
        }
        with Broker(tmp_path / "data", config) as made:
            producer = Producer({"bootstrap.servers": made.bootstrap})
            producer.produce("t", b"x")
            assert not producer.flush(90)
            assert not receiver.pushes
        [push] = receiver.pushes
    [resource] = read_metrics(push.body)
    by_name = {metric["name"]: metric for metric in resource["metrics"]}
    points = by_name["mpbroker_topic_produced_bytes_total"]["points"]
    assert {p["attributes"]["topic"]: p["value"] > 0 for p in points}["t"]


@pytest.mark.parametrize("is_at_one", [True, False])
def test_who_stops_does_not_wait_for_a_collector_that_hangs(
    receiver, monkeypatch, is_at_one
):
    monkeypatch.setattr(otlp_push, "_LAST_PUSH_S", 0.05)
    receiver.may_answer.clear()
    made = pusher(receiver.url)
    if is_at_one:
        made.push(some_families(), START, NOW)
        wait_until(lambda: receiver.pushes)
    made.push_last(some_families(), START, NOW)
    assert made._thread.is_alive()
    assert (made.pushed, made.left) == (0, int(is_at_one))


def test_who_stops_ends_a_pause_and_pushes_what_is_so_now(receiver, monkeypatch):
    monkeypatch.setattr(otlp_push, "_LONGEST_PAUSE_S", 90.0)
    monkeypatch.setattr(otlp_push, "_LAST_PUSH_S", 90.0)
    receiver.statuses = (503, 200)
    receiver.retry_after = "90"
    made = pusher(receiver.url)
    made.push(some_families()[:1], START, NOW)
    wait_until(lambda: receiver.pushes)
    made.push_last(some_families(), START, NOW)
    first, last = (push.body for push in receiver.pushes)
    assert last == encoded() != first
    assert (made.pushed, made.left) == (1, 1)


def test_a_content_type_of_ones_own_is_not_a_second_one(receiver):
    push_and_wait(pusher(receiver.url, **parse_headers("Content-Type=a/b,x=%C3%BC")))
    [push] = receiver.pushes
    assert push.headers["content-type"] == "a/b"


def test_of_an_endpoint_the_log_shows_no_query(monkeypatch, caplog):
    monkeypatch.setattr(otlp_push, "_LONGEST_PAUSE_S", 0.001)
    assert shown_endpoint("HTTPS://[::1]/in?key=secret") == "https://[::1]:443/in"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    push_and_wait(pusher(f"http://127.0.0.1:{port}/in?key=secret"))
    [line] = warnings(caplog)
    assert line.startswith(f"otlp.endpoint=http://127.0.0.1:{port}/in: cannot push")
    assert "secret" not in line
