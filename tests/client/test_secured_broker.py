"""TLS and SASL of every user of the client core, with the broker under test."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mpbroker.cli import main
from mpbroker.client.addresses import parse_addresses
from mpbroker.client.cluster import Cluster
from mpbroker.client.consumer.consumer import Consumer
from mpbroker.client.errors import AuthenticationError
from mpbroker.producer import Producer, RetriableError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    ScramCredentialUpsertion,
)
from tests.client import certificates
from tests.support.apache_kafka import LISTENERS_VARIABLE, PASSWORD, USER
from tests.support.broker import Broker
from tests.support.children import wait_until

SCRAM = {"SCRAM-SHA-256": (1, "sha256"), "SCRAM-SHA-512": (2, "sha512")}


class Secured(NamedTuple):
    """A broker with a listener of every protocol; their addresses."""

    listeners: dict[str, str]


@contextlib.contextmanager
def own_secured_broker(directory: Path) -> Iterator[Secured]:
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
        yield Secured(broker.listeners)
    finally:
        broker.close()


def add_scram_user(
    cluster: Cluster,
    mechanism: int,
    algorithm: str,
    user: str = USER,
    password: str = PASSWORD,
) -> None:
    salt = b"salt"
    request = AlterUserScramCredentialsRequest(
        deletions=[],
        # One a request: Apache Kafka refuses two of a user, even of two mechanisms.
        upsertions=[
            ScramCredentialUpsertion(
                name=user,
                mechanism=mechanism,
                iterations=4096,
                salt=salt,
                salted_password=hashlib.pbkdf2_hmac(
                    algorithm, password.encode(), salt, 4096
                ),
            )
        ],
    )
    response = cluster.request(request, AlterUserScramCredentialsResponse)
    assert [result.error_code for result in response.results] == [0]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with contextlib.ExitStack() as stack:
        if listeners := os.environ.get(LISTENERS_VARIABLE):
            found = Secured(json.loads(listeners))
        else:
            directory = tmp_path_factory.mktemp("secured")
            found = stack.enter_context(own_secured_broker(directory))
        plain = parse_addresses(found.listeners["PLAINTEXT"])
        with Cluster(plain, 30) as cluster:
            for number, algorithm in SCRAM.values():
                add_scram_user(cluster, number, algorithm)
        yield found


def settings_for(
    broker: Secured, protocol: str, mechanism: str = "PLAIN", password: str = PASSWORD
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
    with Producer(settings) as producer:
        error = producer.send("t", b"x").exception(30)
    assert isinstance(error, RetriableError)
    assert error.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert "password" in str(error)
    with Consumer(settings) as consumer:
        consumer.assign([("t", 0)])
        with pytest.raises(AuthenticationError, match="SASL_AUTHENTICATION_FAILED"):
            consumer.poll(5000)


@pytest.mark.parametrize("transactional", [False, True])
def test_a_refused_producer_goes_on_when_the_password_is_right(
    secured, topic_name, transactional
):
    user = f"{topic_name}-user"
    settings = settings_for(secured, "SASL_PLAINTEXT", "SCRAM-SHA-256", "later")
    settings |= {"sasl.username": user}
    if transactional:
        settings["transactional.id"] = topic_name
    with Producer(settings) as producer:
        for _ in range(2):
            if transactional:
                with pytest.raises(RetriableError, match="password"):
                    producer.init_transactions()
            else:
                assert "password" in str(producer.send(topic_name, b"x").exception(30))
        with Cluster(parse_addresses(secured.listeners["PLAINTEXT"]), 30) as cluster:
            add_scram_user(cluster, 1, "sha256", user, "later")

        def is_accepted() -> bool:
            try:
                if transactional:
                    producer.init_transactions()
                else:
                    producer.send(topic_name, b"x").result(30)
            except RetriableError as error:
                assert error.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
                return False
            return True

        wait_until(is_accepted)
        if transactional:
            producer.begin_transaction()
            producer.send(topic_name, b"x").result(30)
            producer.commit_transaction()


@pytest.mark.skipif(
    LISTENERS_VARIABLE not in os.environ,
    reason="ours takes signed tokens only; see tests/compat/test_security.py",
)
def test_a_token_that_nobody_signed_is_taken_where_that_is_allowed(secured, topic_name):
    settings = settings_for(secured, "SASL_PLAINTEXT", "OAUTHBEARER")
    del settings["sasl.username"], settings["sasl.password"]
    settings["sasl.jaas.config"] = (
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
        f' required unsecuredLoginStringClaim_sub="{USER}";'
    )
    with Producer(settings) as producer:
        assert producer.send(topic_name, b"x").result(30).offset >= 0


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
