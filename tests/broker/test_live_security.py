"""TLS and SASL of a running broker get other settings: for new connections only."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
import trustme

from mpbroker.metadata.metadata_log import metadata_log_path
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
)
from tests.broker.load import api_versions, ask, dial, receive_frame, states
from tests.broker.resizing import OF_ALL, alter, resize, settle
from tests.config.test_live_configs import OF_A_LISTENER
from tests.network.security.sasl.conversation import (
    authenticate,
    handshake,
    handshake_answer,
    token_answer,
)
from tests.support.broker import Broker
from tests.support.children import wait_until

JAAS = "org.apache.kafka.common.security.plain.PlainLoginModule required {};"
TLS, SASL = "listener.name.ssl.ssl", "listener.name.sasl_plaintext"
USERS = f"{SASL}.plain.sasl.jaas.config"
INVALID_REQUEST, INVALID_CONFIG = 42, 40
LISTENERS = 3  # of a processor each


class Pki:
    """Two authorities, and keys that they have vouched for, in files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authorities = [trustme.CA(), trustme.CA()]
        self.keys = [self.issue(number) for number in (0, 1)]

    def issue(self, authority: int) -> str:
        issued = self.authorities[authority].issue_cert("localhost", "127.0.0.1")
        path = self.directory / f"{authority}.pem"
        issued.private_key_and_cert_chain_pem.write_to_path(str(path))
        return str(path)

    def parts(self, number: int) -> tuple[str, str]:
        """A private key and its certificates, as texts."""
        text = Path(self.keys[number]).read_text()
        middle = text.index("-----BEGIN CERTIFICATE")
        return text[:middle], text[middle:]

    def encrypted(self, password: str) -> str:
        """The first key once more, in a file for those who know its password."""
        key, chain = self.parts(0)
        command = ["openssl", "pkey", "-aes256", "-passout", f"pass:{password}"]
        done = subprocess.run(
            command, input=key, capture_output=True, text=True, check=True
        )
        path = self.directory / "encrypted.pem"
        path.write_text(done.stdout + chain)
        return str(path)

    def trusted(self) -> str:
        path = self.directory / "authority.pem"
        self.authorities[0].cert_pem.write_to_path(str(path))
        return str(path)

    def context(self, authority: int) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authorities[authority].configure_trust(context)
        return context


@pytest.fixture(scope="module")
def pki(tmp_path_factory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory, pki):
    directory = tmp_path_factory.mktemp("live-security")
    protocols = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT")
    config = {
        "listeners": ",".join(f"{each}://127.0.0.1:0" for each in protocols),
        "num.network.threads": 1,
        "ssl.keystore.location": pki.keys[0],
        "sasl.enabled.mechanisms": "PLAIN",
        USERS: JAAS.format('user_alice="wonder"'),
    }
    with Broker(directory / "data", config) as made:
        yield made


@pytest.fixture(autouse=True)
def as_it_was_started(broker):
    yield
    ours = {
        name: None for name, each in described(broker).items() if each.config_source < 4
    }
    if ours:
        assert alter(broker, ours).error_code == 0
    settle(broker)  # those that retire close whoever is about to log in
    wait_until(lambda: has_processors(broker, LISTENERS, set()))


def dial_listener(broker: Broker, name: str) -> socket.socket:
    host, _, port = broker.listeners[name].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def dial_tls(broker: Broker, context: ssl.SSLContext) -> ssl.SSLSocket:
    sock = dial_listener(broker, "SSL")
    return context.wrap_socket(sock, server_hostname="localhost")


def is_of(broker: Broker, pki: Pki, authority: int) -> bool:
    """Whether a new connection is shown a certificate of that authority."""
    try:
        with dial_tls(broker, pki.context(authority)) as sock:
            return bool(api_versions(sock))
    except ssl.SSLCertVerificationError:
        return False


def logs_in(broker: Broker, user: str, password: str) -> bool:
    with dial_listener(broker, "SASL_PLAINTEXT") as sock:
        if handshake_answer(say(sock, handshake("PLAIN"))).error_code:
            return False
        answer = say(sock, authenticate(f"\0{user}\0{password}".encode()))
        return not token_answer(answer).error_code


def say(sock: socket.socket, message: bytes) -> bytes:
    sock.sendall(len(message).to_bytes(4, "big") + message)
    answer = receive_frame(sock)
    return len(answer).to_bytes(4, "big") + answer


def described(broker: Broker):
    resource = DescribeConfigsResource(
        resource_type=4, resource_name="1", configuration_keys=None
    )
    request = DescribeConfigsRequest(resources=[resource], include_synonyms=True)
    with dial(broker) as sock:
        body = ask(sock, ApiKey.DESCRIBE_CONFIGS, 4, request.encode(4))
    (result,) = DescribeConfigsResponse.decode(4, body).results
    return {each.name: each for each in result.configs}


def test_new_connections_get_another_certificate_and_those_there_are_stay(broker, pki):
    with dial_tls(broker, pki.context(0)) as before:
        assert api_versions(before)
        answer = alter(broker, {f"{TLS}.keystore.location": pki.keys[1]})
        assert answer.error_code == 0, answer
        assert is_of(broker, pki, 1) and not is_of(broker, pki, 0)
        assert api_versions(before)
    assert alter(broker, {f"{TLS}.keystore.location": None}).error_code == 0
    assert is_of(broker, pki, 0)


# What the other tests set.
SET_ELSEWHERE = {
    "sasl.enabled.mechanisms",
    "sasl.jaas.config",
    "ssl.keystore.certificate.chain",
    "ssl.keystore.key",
}
TLS_SETTINGS = {
    "suites": lambda pki: {"cipher.suites": "TLS_AES_256_GCM_SHA384"},
    "versions": lambda pki: {"enabled.protocols": "TLSv1.3", "protocol": "TLSv1.3"},
    "trust in a file": lambda pki: {
        "client.auth": "requested",
        "truststore.location": pki.trusted(),
        "truststore.type": "PEM",
        "truststore.password": "nobody's",
    },
    "trust as a text": lambda pki: {
        "client.auth": "requested",
        "truststore.certificates": Path(pki.trusted()).read_text(),
    },
    "an encrypted key": lambda pki: {
        "keystore.location": pki.encrypted("sesame"),
        "keystore.type": "PEM",
        "key.password": "sesame",
        "keystore.password": "nobody's",  # in PEM only keys are encrypted
    },
}


@pytest.mark.parametrize("kind", TLS_SETTINGS)
def test_whatever_kafka_changes_of_tls_changes(broker, pki, kind):
    configs = TLS_SETTINGS[kind](pki)
    named = {f"{TLS}.{name}": text for name, text in configs.items()}
    answer = alter(broker, named)
    assert answer.error_code == 0, answer
    told = described(broker)
    for name, text in named.items():
        found = told[name]
        assert (found.config_source, found.read_only) == (2, False), name
        assert found.value == (None if found.is_sensitive else text), name
    assert is_of(broker, pki, 0)


def test_no_setting_of_a_listener_that_kafka_changes_is_left_out(pki):
    tried = {f"ssl.{name}" for make in TLS_SETTINGS.values() for name in make(pki)}
    assert tried | SET_ELSEWHERE == set(OF_A_LISTENER)


def test_a_key_as_text_is_taken_and_never_told(broker, pki):
    key, chain = pki.parts(1)
    configs = {
        f"{TLS}.keystore.location": None,
        f"{TLS}.keystore.key": key,
        f"{TLS}.keystore.certificate.chain": chain,
    }
    # A file is looked at before texts, as it was started with one.
    assert alter(broker, configs).error_code == 0
    entry = described(broker)[f"{TLS}.keystore.key"]
    assert entry.is_sensitive and entry.value is None and entry.config_source == 2
    assert all(each.value is None for each in entry.synonyms)
    secret = key.splitlines()[2]
    assert secret not in broker.log_path.read_text()
    path = metadata_log_path(str(broker.data_dir))
    assert os.stat(path).st_mode & 0o777 == 0o600  # where it is kept


def refused(broker: Broker, configs, resource: str = "1", code: int = INVALID_CONFIG):
    """The complaint about configs that must be refused; nothing has changed."""
    before = described(broker)
    answer = alter(broker, {"fetch.max.bytes": 5000, **configs}, resource)
    assert answer.error_code == code, answer
    assert described(broker) == before
    return answer.error_message


def test_what_cannot_be_used_is_refused_with_the_setting_and_the_remedy(
    broker, pki, tmp_path
):
    broken = tmp_path / "broken.pem"
    broken.write_text(Path(pki.keys[1]).read_text()[:-200])
    told = refused(broker, {f"{TLS}.keystore.location": str(broken)})
    assert f"{TLS}.keystore.location={broken}" in told
    (key, _), (_, chain) = pki.parts(0), pki.parts(1)
    mixed = tmp_path / "mixed.pem"
    mixed.write_text(key + chain)
    told = refused(broker, {f"{TLS}.keystore.location": str(mixed)})
    assert "give both of one pair" in told and key.splitlines()[1] not in told
    told = refused(broker, {f"{TLS}.client.auth": "required"})
    assert "ssl.truststore.location" in told and "set one" in told
    told = refused(broker, {f"{SASL}.sasl.enabled.mechanisms": "GSSAPI"})
    assert "GSSAPI is not served" in told
    told = refused(broker, {f"{SASL}.PLAIN.connections.max.reauth.ms": "9"})
    assert "there is no SASL mechanism 'PLAIN'" in told and "plain" in told
    told = refused(broker, {USERS: JAAS.format('user_bob="hunter2')})
    assert USERS in told and "hunter2" not in told
    assert is_of(broker, pki, 0) and logs_in(broker, "alice", "wonder")
    assert "hunter2" not in broker.log_path.read_text()


def test_of_all_brokers_or_of_all_listeners_they_cannot_be_set(broker, pki):
    name = f"{TLS}.keystore.location"
    told = refused(broker, {name: pki.keys[1]}, OF_ALL, INVALID_REQUEST)
    assert told.startswith("Cannot update these configs at default cluster level")
    configs = {"ssl.keystore.location": pki.keys[1]}
    told = refused(broker, configs, code=INVALID_REQUEST)
    assert "using the listener prefix: ssl.keystore.location" in told


def test_one_for_the_broker_counts_for_each_listener_without_its_own(broker):
    told = refused(broker, {"sasl.enabled.mechanisms": "GSSAPI"})
    assert "listener sasl_plaintext: " in told and "GSSAPI is not served" in told
    told = refused(broker, {"ssl.client.auth": "required"})
    assert "listener ssl: " in told and "ssl.truststore.location" in told
    configs = {"sasl.enabled.mechanisms": "SCRAM-SHA-256"}
    assert alter(broker, configs).error_code == 0
    assert not logs_in(broker, "alice", "wonder")
    own = {f"{SASL}.sasl.enabled.mechanisms": "PLAIN"}
    assert alter(broker, own).error_code == 0
    assert logs_in(broker, "alice", "wonder")


def test_users_and_mechanisms_come_and_go(broker):
    assert logs_in(broker, "alice", "wonder") and not logs_in(broker, "bob", "builder")
    assert alter(broker, {USERS: JAAS.format('user_bob="builder"')}).error_code == 0
    assert logs_in(broker, "bob", "builder") and not logs_in(broker, "alice", "wonder")
    entry = described(broker)[USERS]
    assert entry.is_sensitive and entry.value is None
    assert [each.source for each in entry.synonyms][:2] == [2, 4]
    # Sessions that end need more of the processor; whoever was there goes on.
    configs = {f"{SASL}.plain.connections.max.reauth.ms": 3_600_000}
    assert alter(broker, configs).error_code == 0
    assert logs_in(broker, "bob", "builder")
    configs = {f"{SASL}.sasl.enabled.mechanisms": "SCRAM-SHA-256"}
    assert alter(broker, configs).error_code == 0
    assert not logs_in(broker, "bob", "builder")


def test_processors_that_come_later_have_them(broker, pki):
    name = f"{TLS}.keystore.location"
    assert alter(broker, {name: pki.keys[1]}).error_code == 0
    processors = [each for each in states(broker) if each["role"] == "processor"]
    for each in processors:
        os.kill(each["pid"], signal.SIGKILL)
    killed = {each["pid"] for each in processors}
    wait_until(lambda: has_processors(broker, LISTENERS, killed))
    assert is_of(broker, pki, 1)
    resize(broker, processors=2)
    wait_until(lambda: has_processors(broker, 2 * LISTENERS, set()))
    assert all(is_of(broker, pki, 1) for _ in range(4))  # by turns


def has_processors(broker: Broker, number: int, without: set[int]) -> bool:
    found = [
        each["pid"]
        for each in states(broker)
        if each["role"] == "processor" and each["state"] == "READY"
    ]
    return len(found) == number and not without.intersection(found)


def test_they_are_there_after_a_restart_and_a_file_that_has_gone_stops_nobody(
    broker, pki, tmp_path
):
    path = tmp_path / "mine.pem"
    path.write_bytes(Path(pki.keys[1]).read_bytes())
    assert alter(broker, {f"{TLS}.keystore.location": str(path)}).error_code == 0
    broker.stop()
    broker.start()
    assert is_of(broker, pki, 1)
    broker.stop()
    path.unlink()
    broker.start()
    assert is_of(broker, pki, 0)  # what it was started with
    assert "what was before stays in use" in broker.log_path.read_text()
