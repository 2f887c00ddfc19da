"""TLS and SASL of every user of the client core, with a broker of ours."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpbroker.cli import main
from mpbroker.client.addresses import parse_addresses
from mpbroker.client.cluster import Cluster
from mpbroker.client.consumer import Consumer
from mpbroker.client.errors import AuthenticationError
from mpbroker.producer import FatalError, Producer
from mpbroker.protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    ScramCredentialUpsertion,
)
from tests.client import certificates
from tests.support.broker import Broker
from tests.support.children import wait_until

USER, PASSWORD = "alice", "wonder,land="
SCRAM = {"SCRAM-SHA-256": (1, "sha256"), "SCRAM-SHA-512": (2, "sha512")}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    directory: Path = tmp_path_factory.mktemp("secured")
    identity = directory / "broker.pem"
    identity.write_text(certificates.BROKER_KEY + certificates.BROKER)
    (directory / "users").write_text(f"{USER}:{PASSWORD}\n")
    protocols = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
    broker = Broker(
        directory / "data",
        {
            "listeners": ",".join(f"{each}://127.0.0.1:0" for each in protocols),
            "num.network.threads": 1,
            "num.io.threads": 1,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": identity,
            "sasl.enabled.mechanisms": ",".join(["PLAIN", *SCRAM]),
            "sasl.plain.users.file": directory / "users",
            # So short that a test sees sessions end.
            "listener.name.sasl_plaintext.connections.max.reauth.ms": 4000,
        },
    )
    broker.start()
    try:
        with Cluster(parse_addresses(broker.bootstrap), 30) as cluster:
            request = AlterUserScramCredentialsRequest(
                deletions=[],
                upsertions=[
                    ScramCredentialUpsertion(
                        name=USER,
                        mechanism=number,
                        iterations=4096,
                        salt=b"salt",
                        salted_password=hashlib.pbkdf2_hmac(
                            algorithm, PASSWORD.encode(), b"salt", 4096
                        ),
                    )
                    for number, algorithm in SCRAM.values()
                ],
            )
            response = cluster.request(request, AlterUserScramCredentialsResponse)
            assert [result.error_code for result in response.results] == [0]
        yield broker
    finally:
        broker.close()


def settings_for(
    broker: Broker, protocol: str, mechanism: str = "PLAIN", password: str = PASSWORD
) -> dict[str, object]:
    return {
        "bootstrap.servers": broker.listeners[protocol],
        "security.protocol": protocol,
        "ssl.truststore.certificates": certificates.AUTHORITY,
        # The certificate is for localhost; clients are sent to 127.0.0.1.
        "ssl.endpoint.identification.algorithm": "",
        **(
            {
                "sasl.mechanism": mechanism,
                "sasl.username": USER,
                "sasl.password": password,
            }
            if protocol.startswith("SASL")
            else {}
        ),
    }


WAYS = [
    ("SSL", ""),
    ("SASL_PLAINTEXT", "PLAIN"),
    ("SASL_PLAINTEXT", "SCRAM-SHA-256"),
    ("SASL_SSL", "SCRAM-SHA-512"),
]


@pytest.mark.parametrize(("protocol", "mechanism"), WAYS)
def test_what_is_produced_is_consumed(secured, topic_name, protocol, mechanism):
    settings = settings_for(secured, protocol, mechanism)
    values = [b"%d" % n * 1000 for n in range(300)]
    with Producer(settings) as producer:
        futures = [producer.send(topic_name, v, partition=0) for v in values]
        assert [future.result(30).offset for future in futures] == list(range(300))
    with Consumer({**settings, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([(topic_name, 0)])
        found: list[bytes | None] = []
        while len(found) < len(values):
            for records in consumer.poll(5000).values():
                found += [record.value for record in records]
    assert found == values


@pytest.mark.parametrize("mechanism", ["PLAIN", *SCRAM])
def test_a_wrong_password_is_said_to_be_one(secured, mechanism):
    settings = settings_for(secured, "SASL_PLAINTEXT", mechanism, "wrong")
    with Producer(settings) as producer, pytest.raises(FatalError, match="password"):
        producer.send("t", b"x")
    with Consumer(settings) as consumer:
        consumer.assign([("t", 0)])
        with pytest.raises(AuthenticationError, match="SASL_AUTHENTICATION_FAILED"):
            consumer.poll(5000)


def test_sessions_are_renewed_without_a_new_connection(secured, topic_name):
    settings = settings_for(secured, "SASL_PLAINTEXT", "SCRAM-SHA-256")
    with Producer({**settings, "linger.ms": 0}) as producer:
        producer.send(topic_name, b"first").result(30)
        before = producer.metrics()["producer-metrics"]
        sent = 0

        def went_on() -> bool:
            nonlocal sent
            producer.send(topic_name, b"%d" % sent).result(30)
            sent += 1
            own = producer.metrics()["producer-metrics"]
            return own["successful-reauthentication-total"] >= 1

        wait_until(went_on)
        after = producer.metrics()["producer-metrics"]
    for name in ("connection-close-total", "record-error-total", "record-retry-total"):
        assert after[name] == before[name]


def test_the_tools_take_settings_from_a_file(secured, topic_name, tmp_path, capfd):
    path = tmp_path / "client.properties"
    settings = settings_for(secured, "SASL_SSL", "SCRAM-SHA-256")
    authority = tmp_path / "ca.pem"
    authority.write_text(certificates.AUTHORITY)
    del settings["ssl.truststore.certificates"]
    address = settings.pop("bootstrap.servers")
    lines = [f"{name}={value}" for name, value in settings.items()]
    path.write_text("\n".join([*lines, f"ssl.truststore.location={authority}"]))
    where = ["-b", str(address), "-F", str(path)]
    (tmp_path / "input").write_text("hello\n")
    produce = ["produce", "-t", topic_name, "-l", str(tmp_path / "input")]
    assert main([*produce, *where]) == 0
    assert main(["consume", "-t", topic_name, "-e", *where]) == 0
    assert main(["topic", "describe", topic_name, *where]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("hello\n")
    assert not err
    assert main(["topic", "list", *where, "-X", "sasl.password=wrong"]) == 1
    assert "SASL_AUTHENTICATION_FAILED" in capfd.readouterr().err
