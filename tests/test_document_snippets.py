"""What documents for users show in Python, TOML and properties does what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpbroker import AdminClient, ApiError, Consumer, ErrorCode, Producer
from mpbroker.spark.pipeline import description
from tests.client import certificates
from tests.support.broker import Broker
from tests.support.children import wait_until

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
CLIENT, SPARK = ROOT / "docs/client.md", ROOT / "docs/spark.md"
SECURITY, OPERATIONS = ROOT / "docs/security.md", ROOT / "docs/operations.md"

# Blocks that need more than a broker, by what only they contain, and their tests below.
NEEDS_MORE = ("mpbroker.spark", "pytest", "sasl.password", "MpbrokerContainer")


def blocks(document: Path, language: str) -> list[str]:
    text = document.read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def the_block(document: Path, language: str, word: str) -> str:
    (block,) = [each for each in blocks(document, language) if word in each]
    return block


@pytest.mark.parametrize("document", [README, CLIENT], ids=lambda path: path.name)
def test_the_python_of_a_document_runs_from_top_to_bottom(
    document, make_broker, monkeypatch, capsys
):
    broker = make_broker({"group.initial.rebalance.delay.ms": 0})
    names: dict[str, Any] = {"__name__": "snippet"}
    for block in blocks(document, "python"):
        if not any(word in block for word in NEEDS_MORE):
            block = block.replace("localhost:9092", broker.bootstrap)
            exec(compile(block, str(document), "exec"), names)
    assert "b'value'" in capsys.readouterr().out  # what was produced was consumed


def test_the_plug_in_for_pytest_is_used_as_is_shown(tmp_path):
    block = the_block(CLIENT, "python", "mpbroker_server")
    service = """
from mpbroker import AdminClient

def run_my_service(bootstrap):
    with AdminClient(bootstrap_servers=bootstrap) as admin:
        topics = {each.name: each.partitions for each in admin.list_topics()}
    assert topics == {"orders": 1, "events": 4}
"""
    (tmp_path / "test_service.py").write_text(service + block)
    command = [sys.executable, "-m", "pytest", "-q", "test_service.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout


def settings_of(block: str) -> dict[str, object]:
    return dict(line.split("=", 1) for line in block.splitlines())


@pytest.fixture
def secured(make_broker, tmp_path) -> Iterator[Broker]:
    """The broker of docs/security.md, with a user."""
    identity = tmp_path / "server.pem"
    identity.write_text(certificates.BROKER_KEY + certificates.BROKER)
    settings = settings_of(the_block(SECURITY, "properties", "listeners="))
    assert settings["ssl.keystore.location"] == "/etc/mpbroker/server.pem"
    settings["ssl.keystore.location"] = identity
    for key in ("listeners", "advertised.listeners"):
        value = str(settings[key]).replace("broker.example.com", "localhost")
        settings[key] = re.sub(r":\d+", ":0", value)
    broker = make_broker(settings)
    with AdminClient(bootstrap_servers=broker.listeners["PLAINTEXT"]) as admin:
        admin.set_scram_password("alice", "SCRAM-SHA-512", "secret")
    return broker


def test_clients_log_in_as_is_shown_to_a_broker_that_is_set_up_as_is_shown(
    secured, tmp_path
):
    (tmp_path / "ca.pem").write_text(certificates.AUTHORITY)
    port = secured.listeners["SASL_SSL"].rpartition(":")[2]
    block = the_block(CLIENT, "python", "sasl.password")
    block = block.replace('"ca.pem"', repr(str(tmp_path / "ca.pem")))
    block = block.replace("broker.example.com:9093", f"localhost:{port}")
    names: dict[str, Any] = {"password": "secret"}
    exec(block, names)
    with Producer(names["settings"]) as producer:
        producer.send("events", b"value").result()
    with Consumer(names["settings"]) as consumer:
        consumer.assign([("events", 0)])
        consumer.seek(("events", 0), 0)
        while not (found := consumer.poll(1000)):
            pass
    assert [each.value for each in found["events", 0]] == [b"value"]


def test_acls_are_switched_on_as_is_shown(make_broker):
    broker = make_broker(settings_of(the_block(SECURITY, "properties", "authorizer")))
    with Producer(bootstrap_servers=broker.bootstrap) as producer:
        error = producer.send("events", b"value").exception()
    assert error is not None and "AUTHORIZATION_FAILED" in str(error)


def start_with_plug_in(tmp_path: Path, block: str, **settings: str) -> Broker:
    (tmp_path / "snippet.py").write_text(block)
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    named = {key.replace("_", "."): value for key, value in settings.items()}
    return Broker(tmp_path / "data", named, environ=environ)


def test_an_authorizer_of_ones_own_is_written_as_is_shown(tmp_path):
    block = the_block(SECURITY, "python", "TeamAuthorizer")
    name = "python:snippet:TeamAuthorizer"
    with (
        start_with_plug_in(tmp_path, block, authorizer_class_name=name) as broker,
        AdminClient(bootstrap_servers=broker.bootstrap) as admin,
    ):
        admin.create_topic("ANONYMOUS-events")
        with pytest.raises(ApiError) as caught:
            admin.create_topic("others-events")
        assert caught.value.error_code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
        with Producer(bootstrap_servers=broker.bootstrap) as producer:
            assert producer.send("ANONYMOUS-events", b"value").result().offset == 0


def test_a_receiver_of_clients_metrics_is_written_as_is_shown(tmp_path):
    block = the_block(OPERATIONS, "python", "ClientTelemetryReceiver")
    name = "python:snippet:PrintNames"
    settings = {"client_telemetry_receiver_class_name": name}
    with start_with_plug_in(tmp_path, block, **settings) as broker:
        command = [sys.executable, "-m", "mpbroker", "config", "set"]
        changes = ["metrics=*", "interval.ms=100"]
        subprocess.run(
            [*command, "-b", broker.bootstrap, "--client-metrics", "all", *changes],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with Producer(bootstrap_servers=broker.bootstrap, client_id="app-1") as client:
            client.send("events", b"value").result()
        wait_until(lambda: "app-1 ['" in broker.log_path.read_text())


@pytest.mark.parametrize("job", ["ingest", "report"])
def test_a_pipeline_is_described_as_is_shown(job, tmp_path):
    path = tmp_path / "pipeline.toml"
    path.write_text(the_block(SPARK, "toml", f'job = "{job}"'))
    assert description.load(path).job == job
