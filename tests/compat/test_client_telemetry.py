"""Clients push their metrics by themselves, where somebody takes them."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin import config_admin
from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.cluster import Cluster
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.api_versions import ApiVersionsResponse
from tests.compat.test_java_tools import TOOLS, run_java
from tests.support.apache_kafka import java_command
from tests.support.broker import Broker, BrokerFailedError
from tests.support.children import TIMEOUT_S, wait_until
from tests.support.fetch_clients import have_java_tools

PLUG_IN = """
import json, os
from mpbroker.extensions import ClientTelemetryReceiver

class Sizes(ClientTelemetryReceiver):
    def configure(self, settings):
        if settings.get("num.partitions") == "7":
            raise ValueError("seven is bad luck")

    def export_metrics(self, context, payload):
        with open(os.environ["SIZES"], "a") as file:
            file.write(f"{context.client_id} {len(payload.data)}\\n")
        raise RuntimeError("secret-detail")

class NotOne:
    pass
"""
RECEIVER = "client.telemetry.receiver.class.name"
TELEMETRY = {ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY}
Lines = Callable[[str], list[dict[str, Any]]]


def subscribe(broker: Broker, name: str, **texts: str) -> None:
    configs = {key.replace("_", "."): text for key, text in texts.items()}
    with Cluster(parse_addresses(broker.bootstrap), TIMEOUT_S) as cluster:
        resource = ConfigResource(ConfigResourceType.CLIENT_METRICS, name)
        config_admin.alter_configs(cluster, resource, configs, ())


def lines_of(path: Path) -> Lines:
    """What a client has pushed so far, by its id."""

    def read(client_id: str) -> list[dict[str, Any]]:
        text = path.read_text() if path.exists() else ""
        # The last line may not be written to its end.
        lines = text[: text.rfind("\n") + 1].splitlines()
        found = [json.loads(line) for line in lines]
        return [each for each in found if each["client_id"] == client_id]

    return read


@pytest.fixture(scope="module")
def listening(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Broker, Lines]]:
    """A broker that writes down what is pushed, and a look at what it wrote."""
    directory = tmp_path_factory.mktemp("telemetry")
    path = directory / "telemetry.log"
    broker = Broker(directory / "data", {"client.telemetry.log.path": path})
    broker.start()
    yield broker, lines_of(path)
    broker.close()


@contextmanager
def producing(broker: Broker, **config: str) -> Iterator[Producer]:
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            **{key.replace("_", "."): value for key, value in config.items()},
        }
    )
    yield producer
    producer.flush(60)


def names_in(line: Mapping[str, Any]) -> set[str]:
    return {
        metric["name"]
        for resource in line["resources"]
        for metric in resource["metrics"]
    }


def test_librdkafka_pushes_what_is_subscribed_to_while_it_works(
    listening: tuple[Broker, Lines], topic_name: str
) -> None:
    broker, lines = listening
    subscribe(
        broker,
        "librdkafka",
        metrics="org.apache.kafka.producer.connection.",
        interval_ms="100",
        match=f"client_id={topic_name},client_software_name=confluent-kafka-python",
    )
    with producing(broker, client_id=topic_name, compression_codec="lz4") as producer:
        producer.produce(topic_name, b"x")
        wait_until(lambda: len(lines(topic_name)) > 2, 120)
        first, second = lines(topic_name)[:2]
        assert first["client_instance_id"] == second["client_instance_id"]
        assert first["principal"] == "User:ANONYMOUS"
        assert first["host"] == "127.0.0.1"
        assert first["connection_id"].startswith(broker.bootstrap)
        assert names_in(first) == {
            "org.apache.kafka.producer.connection.creation.rate",
            "org.apache.kafka.producer.connection.creation.total",
        }


def test_whoever_matches_no_subscription_pushes_nothing(
    listening: tuple[Broker, Lines], topic_name: str
) -> None:
    broker, lines = listening
    subscribe(broker, "mine", metrics="*", interval_ms="100", match="client_id=mine")
    with (
        producing(broker, client_id="mine") as mine,
        producing(broker, client_id=topic_name) as other,
    ):
        for producer in (mine, other):
            producer.produce(topic_name, b"x")
            assert producer.flush(60) == 0
        wait_until(lambda: len(lines("mine")) >= 3, 120)
        assert lines(topic_name) == []


@pytest.mark.skipif(
    not have_java_tools(),
    reason="no Apache Kafka in .downloads/java: scripts/test fetches it with Maven",
)
@pytest.mark.timeout(900)  # six times a JVM, where cores are busy
def test_java_clients_push_as_kafka_client_metrics_says(
    listening: tuple[Broker, Lines], topic_name: str
) -> None:
    broker, lines = listening
    where = ("--bootstrap-server", broker.bootstrap)
    tool, name = f"{TOOLS}.ClientMetricsCommand", ("--name", topic_name)
    metrics = "org.apache.kafka.producer.request.total"
    wanted = ("--metrics", metrics, "--interval", "100", "--match", "client_id=java-.*")
    run_java(tool, *where, "--alter", *name, *wanted)
    assert topic_name in run_java(tool, *where, "--list").split()
    described = run_java(tool, *where, "--describe", *name)
    assert "interval.ms=100" in described
    assert "match=client_id=java-.*" in described
    console = subprocess.Popen(
        java_command(
            f"{TOOLS}.ConsoleProducer",
            *where,
            "--topic",
            topic_name,
            "--producer-property",
            "client.id=java-1",
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        wait_until(lambda: lines("java-1") or console.poll() is not None, 240)
        assert console.poll() is None
        (line,) = lines("java-1")[:1]
        assert line["client_software_name"] == "apache-kafka-java"
        assert names_in(line) <= {metrics}
        console.communicate("x\n", timeout=240)
        assert console.returncode == 0
    finally:
        console.kill()
        console.communicate()
    run_java(tool, *where, "--delete", *name)
    assert topic_name not in run_java(tool, *where, "--list").split()


def test_a_receiver_of_ones_own_that_fails_harms_nobody(
    tmp_path: Path, topic_name: str
) -> None:
    (tmp_path / "telemetry_plug_in.py").write_text(PLUG_IN)
    sizes = tmp_path / "sizes"
    environ = {"PYTHONPATH": str(tmp_path), "SIZES": str(sizes)}
    name = "python:telemetry_plug_in:Sizes"
    bad = {RECEIVER: name, "num.partitions": 7}
    with pytest.raises(BrokerFailedError, match="seven is bad luck"):
        Broker(tmp_path / "bad", bad, environ=environ).start()
    bad = {RECEIVER: "python:telemetry_plug_in:NotOne"}
    with pytest.raises(BrokerFailedError, match="no subclass of"):
        Broker(tmp_path / "bad", bad, environ=environ).start()
    broker = Broker(tmp_path / "data", {RECEIVER: name}, environ=environ)
    broker.start()
    try:
        subscribe(broker, "all", metrics="*", interval_ms="100")
        with producing(broker, client_id=topic_name) as producer:
            producer.produce(topic_name, b"x")
            wait_until(sizes.exists, 120)
            producer.produce(topic_name, b"y")
            assert producer.flush(60) == 0
        wait_until(lambda: "secret-detail" in broker.log_path.read_text())
    finally:
        broker.close()
    client_id, size = sizes.read_text().splitlines()[0].split()
    assert client_id == topic_name
    assert int(size) > 0


def test_a_broker_without_a_receiver_does_not_ask_for_metrics(
    own_broker: Broker,
) -> None:
    subscribe(own_broker, "unheard", metrics="*")
    host, port = own_broker.bootstrap.rsplit(":", 1)
    head = struct.pack(">hhih", ApiKey.API_VERSIONS, 0, 1, -1)
    with socket.create_connection((host, int(port)), TIMEOUT_S) as sock:
        sock.sendall(struct.pack(">i", len(head)) + head)
        answer = sock.makefile("rb")
        (size,) = struct.unpack(">i", answer.read(4))
        told = ApiVersionsResponse.decode(0, memoryview(answer.read(size))[4:])
    served = {each.api_key for each in told.api_keys}
    assert ApiKey.PRODUCE in served
    assert not served & TELEMETRY
