"""Real clients over TLS and each SASL mechanism, on one broker with all listeners."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jwt
import pytest
import trustme
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.abc import AbstractTokenProvider
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives.asymmetric import ec
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaPartition
from kafka.net.sasl.oauth import AbstractTokenProvider as KafkaTokenProvider

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from tests.compat.test_java_tools import TOOLS, run_java
from tests.conftest import _running
from tests.network.security.sasl.conversation import (
    authenticate,
    handshake,
    handshake_answer,
    request,
    token_answer,
)
from tests.support.broker import Broker
from tests.support.fetch_clients import have_java_tools
from tests.support.patience import LONGEST_S

USER, PASSWORD = "alice", "wonder,=land"
JAAS = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required"
    f' user_{USER}="{PASSWORD}";'
)
KEY = ec.generate_private_key(ec.SECP256R1())

WAYS = [
    ("SSL", ""),
    ("SASL_PLAINTEXT", "PLAIN"),
    ("SASL_PLAINTEXT", "SCRAM-SHA-256"),
    ("SASL_PLAINTEXT", "OAUTHBEARER"),
    ("SASL_SSL", "PLAIN"),
    ("SASL_SSL", "SCRAM-SHA-512"),
]


class Secured(NamedTuple):
    """A broker with all listeners."""

    broker: Broker
    authority: str

    def address(self, protocol: str) -> str:
        return self.broker.listeners[protocol]


def token(lifetime_s: int = 3600) -> str:
    now_s = int(time.time())
    claims = {"sub": USER, "iat": now_s, "exp": now_s + lifetime_s}
    return jwt.encode(claims, KEY, "ES256", headers={"kid": "one"})


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory: Path = tmp_path_factory.mktemp("secured")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    key = jwt.algorithms.ECAlgorithm.to_jwk(KEY.public_key())
    jwks = {"keys": [{**json.loads(key), "kid": "one"}]}
    (directory / "jwks.json").write_text(json.dumps(jwks))
    protocols = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
    broker = Broker(
        directory / "data",
        {
            "listeners": ",".join(f"{each}://127.0.0.1:0" for each in protocols),
            "num.network.threads": 1,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": directory / "server.pem",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
            "sasl.oauthbearer.jwks.endpoint.url": f"file://{directory}/jwks.json",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": JAAS,
            "listener.name.sasl_ssl.plain.sasl.jaas.config": JAAS,
        },
    )
    broker.start()
    _running.append(broker)
    admin = AdminClient({"bootstrap.servers": broker.listeners["PLAINTEXT"]})
    # One a request: as in Kafka, two of a user are refused, even of two mechanisms.
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        info = ScramCredentialInfo(mechanism, 4096)
        alter(admin, UserScramCredentialUpsertion(USER, info, PASSWORD.encode()))
    yield Secured(broker, str(directory / "ca.pem"))
    _running.remove(broker)
    broker.close()


def alter(admin: AdminClient, *changes: Any) -> None:
    for future in admin.alter_user_scram_credentials(list(changes)).values():
        future.result(LONGEST_S)


# -- one record there and back --------------------------------------------------------


def confluent(secured: Secured, protocol: str, mechanism: str, topic: str) -> bytes:
    settings = confluent_settings(secured, protocol, mechanism)
    producer = Producer(settings)
    producer.produce(topic, b"x" * 100_000)
    assert producer.flush(LONGEST_S) == 0
    consumer = Consumer({**settings, "group.id": "unused"})
    consumer.assign([Partition(topic, 0, 0)])
    message = consumer.poll(LONGEST_S)
    consumer.close()
    assert message is not None and message.error() is None
    return bytes(message.value())


def confluent_settings(
    secured: Secured, protocol: str, mechanism: str, password: str = PASSWORD
) -> dict[str, Any]:
    settings = {
        "bootstrap.servers": secured.address(protocol),
        "security.protocol": protocol,
        "ssl.ca.location": secured.authority,
    }
    if mechanism == "OAUTHBEARER":
        settings["oauth_cb"] = lambda _: (token(), time.time() + 3600)
    if mechanism:
        settings |= {"sasl.mechanism": mechanism}
    if mechanism not in ("", "OAUTHBEARER"):
        settings |= {"sasl.username": USER, "sasl.password": password}
    return settings


class KafkaToken(KafkaTokenProvider):
    def token(self) -> str:
        return token()


def kafka_python(secured: Secured, protocol: str, mechanism: str, topic: str) -> bytes:
    settings: dict[str, Any] = {
        "bootstrap_servers": secured.address(protocol),
        "security_protocol": protocol,
        "ssl_cafile": secured.authority,
    }
    if mechanism:
        settings |= {"sasl_mechanism": mechanism}
    if mechanism == "OAUTHBEARER":
        settings["sasl_oauth_token_provider"] = KafkaToken()
    elif mechanism:
        settings |= {"sasl_plain_username": USER, "sasl_plain_password": PASSWORD}
    producer = KafkaProducer(**settings)
    producer.send(topic, b"y" * 100_000).get(LONGEST_S)
    producer.close()
    consumer = KafkaConsumer(**settings, consumer_timeout_ms=LONGEST_S * 1000)
    partition = KafkaPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek(partition, 0)
    value = next(consumer).value
    consumer.close()
    return bytes(value)


class AioToken(AbstractTokenProvider):
    async def token(self) -> str:
        return token()


def aiokafka(secured: Secured, protocol: str, mechanism: str, topic: str) -> bytes:
    async def there_and_back() -> bytes:
        settings: dict[str, Any] = {
            "bootstrap_servers": secured.address(protocol),
            "security_protocol": protocol,
        }
        if "SSL" in protocol:
            settings["ssl_context"] = ssl.create_default_context(
                cafile=secured.authority
            )
        if mechanism:
            settings |= {"sasl_mechanism": mechanism}
        if mechanism == "OAUTHBEARER":
            settings["sasl_oauth_token_provider"] = AioToken()
        elif mechanism:
            settings |= {"sasl_plain_username": USER, "sasl_plain_password": PASSWORD}
        async with AIOKafkaProducer(**settings) as producer:
            await producer.send_and_wait(topic, b"z" * 100_000)
        consumer = AIOKafkaConsumer(**settings)
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        async with consumer:
            consumer.seek(partition, 0)
            return bytes((await consumer.getone()).value)

    return asyncio.run(asyncio.wait_for(there_and_back(), LONGEST_S))


CLIENTS: list[Callable[..., bytes]] = [confluent, kafka_python, aiokafka]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
@pytest.mark.parametrize(("protocol", "mechanism"), WAYS)
def test_a_record_goes_there_and_back(
    secured: Secured,
    topic_name: str,
    client: Callable[..., bytes],
    protocol: str,
    mechanism: str,
) -> None:
    value = client(secured, protocol, mechanism, topic_name)
    assert len(value) == 100_000 and len(set(value)) == 1


@pytest.mark.skipif(shutil.which("kcat") is None, reason="no kcat on PATH")
@pytest.mark.parametrize(
    ("protocol", "mechanism"), [way for way in WAYS if way[1] != "OAUTHBEARER"]
)
def test_kcat(secured: Secured, topic_name: str, protocol: str, mechanism: str) -> None:
    settings = confluent_settings(secured, protocol, mechanism)
    bootstrap = settings.pop("bootstrap.servers")
    options = [part for pair in settings.items() for part in ("-X", "=".join(pair))]
    common = ["kcat", "-q", "-b", bootstrap, *options, "-t", topic_name]
    subprocess.run([*common, "-P"], input=b"a record\n", check=True, timeout=LONGEST_S)
    done = subprocess.run(
        [*common, "-C", "-e"], capture_output=True, check=True, timeout=LONGEST_S
    )
    assert done.stdout == b"a record\n"


@pytest.mark.skipif(not have_java_tools(), reason="no Apache Kafka in .downloads/java")
@pytest.mark.parametrize(
    ("protocol", "mechanism"), [("SSL", ""), ("SASL_SSL", "SCRAM-SHA-512")]
)
def test_javas_producer_and_consumer(
    secured: Secured, topic_name: str, tmp_path: Path, protocol: str, mechanism: str
) -> None:
    settings = {
        "security.protocol": protocol,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": secured.authority,
    }
    if mechanism:
        settings["sasl.mechanism"] = mechanism
        settings["sasl.jaas.config"] = (
            "org.apache.kafka.common.security.scram.ScramLoginModule required"
            f' username="{USER}" password="{PASSWORD}";'
        )
    file = tmp_path / "client.properties"
    file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    common = ("--bootstrap-server", secured.address(protocol), "--topic", topic_name)
    producer = "org.apache.kafka.tools.ConsoleProducer"
    lines = "".join(f"record {number}\n" for number in range(100))
    run_java(producer, *common, "--command-config", str(file), stdin=lines)
    # As a member of a group, whose coordinator it finds over the same listener.
    read = run_java(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *(*common, "--command-config", str(file), "--from-beginning"),
        *("--max-messages", "100", "--timeout-ms", str(LONGEST_S * 1000)),
    )
    assert read == lines


# -- what outlives what ---------------------------------------------------------------


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), LONGEST_S)


def ask(sock: socket.socket, payload: bytes) -> bytes:
    """Send a request; return the answer, or nothing if the connection has ended."""
    with contextlib.suppress(ConnectionError):
        sock.sendall(len(payload).to_bytes(4, "big") + payload)
        data = b""
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
            chunk = sock.recv(65536)
            if not chunk:
                return b""
            data += chunk
        return data
    return b""


def kill_processor_of(secured: Secured, protocol: str) -> None:
    titles = {
        pid: Path(f"/proc/{pid}/cmdline").read_text()
        for pid in secured.broker.processes()
    }
    wanted = f"ListenerName({protocol})-{protocol}-"
    [pid] = [
        pid
        for pid, title in titles.items()
        if "network-thread" in title and wanted in title
    ]
    os.kill(pid, signal.SIGKILL)


def test_an_authenticated_connection_outlives_its_processor(secured: Secured) -> None:
    with dial(secured.address("SASL_PLAINTEXT")) as sock:
        assert handshake_answer(ask(sock, handshake("PLAIN"))).error_code == 0
        proof = authenticate(f"\0{USER}\0{PASSWORD}".encode())
        assert token_answer(ask(sock, proof)).error_code == 0
        kill_processor_of(secured, "SASL_PLAINTEXT")
        assert ask(sock, request(ApiKey.METADATA, 1, b"\0\0\0\0"))
        # It is not anybody's to begin again, and the broker says so.
        again = handshake_answer(ask(sock, handshake("PLAIN")))
        assert again.error_code == ErrorCode.ILLEGAL_SASL_STATE


def test_a_tls_connection_is_closed_with_its_processor_and_the_next_one_served(
    secured: Secured,
) -> None:
    context = ssl.create_default_context(cafile=secured.authority)

    def connected() -> ssl.SSLSocket:
        sock = dial(secured.address("SSL"))
        return context.wrap_socket(sock, server_hostname="localhost")

    metadata = request(ApiKey.METADATA, 1, b"\0\0\0\0")
    with connected() as sock:
        assert ask(sock, metadata)
        kill_processor_of(secured, "SSL")
        with contextlib.suppress(OSError):
            assert sock.recv(1) == b""
    with connected() as sock:
        assert ask(sock, metadata)


# -- who is not let in ----------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_wrong_password_is_told_and_stays_out_of_the_log(
    secured: Secured, mechanism: str
) -> None:
    errors: list[KafkaError] = []
    settings = confluent_settings(secured, "SASL_SSL", mechanism, "not wonder")
    producer = Producer({**settings, "error_cb": errors.append, "log_level": 0})
    deadline = time.monotonic() + LONGEST_S
    while not errors and time.monotonic() < deadline:
        producer.poll(0.1)
    assert errors[0].code() == KafkaError._AUTHENTICATION
    assert "not wonder" not in secured.broker.log_path.read_text()
    assert PASSWORD not in secured.broker.log_path.read_text()


def test_scram_users_come_and_go_while_the_broker_serves(
    secured: Secured, topic_name: str
) -> None:
    admin = AdminClient({"bootstrap.servers": secured.address("PLAINTEXT")})
    mechanism = ScramMechanism.SCRAM_SHA_256
    info = ScramCredentialInfo(mechanism, 8192)
    alter(admin, UserScramCredentialUpsertion("carol", info, b"first"))
    described = admin.describe_user_scram_credentials(["carol"])["carol"].result()
    assert [each.iterations for each in described.scram_credential_infos] == [8192]

    def logs_in(password: str) -> bool:
        settings = confluent_settings(
            secured, "SASL_PLAINTEXT", "SCRAM-SHA-256", password
        )
        settings |= {"sasl.username": "carol", "log_level": 0}
        errors: list[KafkaError] = []
        producer = Producer({**settings, "error_cb": errors.append})
        done: list[Any] = []
        producer.produce(topic_name, b"x", on_delivery=lambda *_: done.append(1))
        deadline = time.monotonic() + LONGEST_S
        while not (done or errors) and time.monotonic() < deadline:
            producer.poll(0.1)
        producer.purge()
        producer.flush()
        return not errors

    assert logs_in("first")
    alter(admin, UserScramCredentialUpsertion("carol", info, b"second"))
    assert logs_in("second") and not logs_in("first")
    alter(admin, UserScramCredentialDeletion("carol", mechanism))
    assert not logs_in("second")


@pytest.mark.skipif(not have_java_tools(), reason="no Apache Kafka in .downloads/java")
def test_kafka_configs_sets_describes_and_deletes_scram_users(secured: Secured) -> None:
    bootstrap = ("--bootstrap-server", secured.address("PLAINTEXT"))
    entity = ("--entity-type", "users", "--entity-name", "dave")

    def configs(*arguments: str) -> str:
        return run_java(f"{TOOLS}.ConfigCommand", *bootstrap, *entity, *arguments)

    configs("--alter", "--add-config", "SCRAM-SHA-256=[iterations=8192,password=pw]")
    assert "SCRAM-SHA-256=iterations=8192" in configs("--describe")
    configs("--alter", "--delete-config", "SCRAM-SHA-256")
    assert "SCRAM-SHA-256" not in configs("--describe")
