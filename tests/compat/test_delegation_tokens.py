"""Delegation tokens: made, renewed, expired, and logged in with; as Kafka answers.

With $MPBROKER_TEST_LISTENERS they run against that broker, which has the users of
tests/support/apache_kafka.py and a delegation.token.secret.key.
"""

from __future__ import annotations

import hmac
import json
import os
import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mpbroker.metadata.scram_credentials import ScramMechanism
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.create_delegation_token import (
    CreatableRenewers,
    CreateDelegationTokenRequest,
    CreateDelegationTokenResponse,
)
from mpbroker.protocol.messages.describe_delegation_token import (
    DescribeDelegationTokenOwner,
    DescribeDelegationTokenRequest,
    DescribeDelegationTokenResponse,
)
from mpbroker.protocol.messages.expire_delegation_token import (
    ExpireDelegationTokenRequest,
    ExpireDelegationTokenResponse,
)
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataResponse
from mpbroker.protocol.messages.renew_delegation_token import (
    RenewDelegationTokenRequest,
    RenewDelegationTokenResponse,
)
from mpbroker.protocol.messages.sasl_authenticate import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
)
from mpbroker.protocol.messages.sasl_handshake import (
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tests.compat.test_answers import Wire
from tests.compat.test_java_tools import TOOLS, run_java
from tests.conftest import _running
from tests.network.security.sasl.conversation import ScramClient
from tests.support.apache_kafka import LISTENERS_VARIABLE, PASSWORD, USER
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.fetch_clients import have_java_tools

PROTOCOL = "SASL_PLAINTEXT"
PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
SECRET = "a secret of tests"  # as in tests/support/apache_kafka.py
HOUR_MS = 3_600_000


class Addresses(NamedTuple):
    """The listeners of the broker."""

    plaintext: str
    sasl: str


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    if listeners := os.environ.get(LISTENERS_VARIABLE):
        found = json.loads(listeners)
        yield Addresses(found["PLAINTEXT"], found[PROTOCOL])
        return
    broker = Broker(
        tmp_path_factory.mktemp("tokens") / "data",
        {
            "listeners": f"PLAINTEXT://127.0.0.1:0,{PROTOCOL}://127.0.0.1:0",
            "num.network.threads": 1,
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
                f'{PLAIN_MODULE} required user_{USER}="{PASSWORD}" user_bob="bob";'
            ),
            "delegation.token.secret.key": SECRET,
        },
    )
    broker.start()
    _running.append(broker)
    yield Addresses(broker.listeners["PLAINTEXT"], broker.listeners[PROTOCOL])
    _running.remove(broker)
    broker.close()


class Tokens(Wire):
    """A connection that has authenticated, and asks about tokens."""

    def log_in(self, user: str = USER, password: str = PASSWORD) -> Tokens:
        assert self._handshake("PLAIN").error_code == ErrorCode.NONE
        assert self._say(f"\0{user}\0{password}".encode()).error_code == ErrorCode.NONE
        return self

    def log_in_with(self, token: Any, mechanism: ScramMechanism) -> int:
        """Log in with a token; return the error code, and keep the last answer."""
        self._handshake(mechanism.mechanism_name)
        password = b64encode(bytes(token.hmac)).decode()
        client = ScramClient(
            mechanism, token.token_id, password, extensions=",tokenauth=true"
        )
        first = self._say(client.first())
        if first.error_code:
            return first.error_code
        self.last = self._say(client.final(bytes(first.auth_bytes)))
        return self.last.error_code

    def _handshake(self, mechanism: str) -> SaslHandshakeResponse:
        request = SaslHandshakeRequest(mechanism=mechanism)
        return self.ask(request, 1, SaslHandshakeResponse)

    def _say(self, token: bytes) -> SaslAuthenticateResponse:
        request = SaslAuthenticateRequest(auth_bytes=token)
        return self.ask(request, 2, SaslAuthenticateResponse)

    def create(self, *renewers: str, **fields: Any) -> CreateDelegationTokenResponse:
        kind = fields.pop("kind", "User")
        request = CreateDelegationTokenRequest(
            renewers=[
                CreatableRenewers(principal_type=kind, principal_name=each)
                for each in renewers
            ],
            **{
                "owner_principal_type": None,
                "owner_principal_name": None,
                "max_lifetime_ms": -1,
                **fields,
            },
        )
        return self.ask(request, 3, CreateDelegationTokenResponse)

    def describe(self, *owners: str) -> dict[str, Any]:
        """Return the tokens of owners by their ids; without owners, all that it may."""
        request = DescribeDelegationTokenRequest(
            owners=[
                DescribeDelegationTokenOwner(principal_type="User", principal_name=each)
                for each in owners
            ]
            or None
        )
        answer = self.ask(request, 3, DescribeDelegationTokenResponse)
        assert answer.error_code == ErrorCode.NONE
        return {each.token_id: each for each in answer.tokens}

    def renew(self, mac: bytes, period_ms: int = -1) -> RenewDelegationTokenResponse:
        request = RenewDelegationTokenRequest(hmac=mac, renew_period_ms=period_ms)
        return self.ask(request, 2, RenewDelegationTokenResponse)

    def expire(self, mac: bytes, period_ms: int = -1) -> ExpireDelegationTokenResponse:
        request = ExpireDelegationTokenRequest(
            hmac=mac, expiry_time_period_ms=period_ms
        )
        return self.ask(request, 2, ExpireDelegationTokenResponse)


@pytest.fixture
def dial(addresses: Addresses) -> Iterator[Any]:
    """Connect to the listener with SASL: dial() -> a connection."""
    made: list[Tokens] = []

    def connect(address: str = addresses.sasl) -> Tokens:
        made.append(Tokens(address))
        return made[-1]

    yield connect
    for each in made:
        each.sock.close()


def test_a_token_is_made_described_renewed_and_removed(dial: Any) -> None:
    wire = dial().log_in()
    token = wire.create("bob", max_lifetime_ms=2 * HOUR_MS)
    assert token.error_code == ErrorCode.NONE
    assert (token.principal_type, token.principal_name) == ("User", USER)
    assert token.token_requester_principal_name == USER
    assert token.max_timestamp_ms == token.issue_timestamp_ms + 2 * HOUR_MS
    assert token.expiry_timestamp_ms == token.max_timestamp_ms
    # A token is good at both brokers, if they have the same secret.
    mac = hmac.digest(SECRET.encode(), token.token_id.encode(), "sha512")
    assert bytes(token.hmac) == mac
    wait_until(lambda: token.token_id in wire.describe())
    told = wire.describe(USER)[token.token_id]
    assert bytes(told.hmac) == bytes(token.hmac)
    assert [each.principal_name for each in told.renewers] == ["bob"]
    assert told.max_timestamp == token.max_timestamp_ms
    assert token.token_id in wire.describe("bob")  # who may renew it
    assert token.token_id not in wire.describe("carol")
    expired = wire.expire(bytes(token.hmac), HOUR_MS)
    assert expired.error_code == ErrorCode.NONE
    assert expired.expiry_timestamp_ms < token.expiry_timestamp_ms
    renewed = wire.renew(bytes(token.hmac), 10 * HOUR_MS)
    assert renewed.error_code == ErrorCode.NONE
    assert renewed.expiry_timestamp_ms == token.max_timestamp_ms
    assert wire.expire(bytes(token.hmac)).error_code == ErrorCode.NONE
    wait_until(lambda: token.token_id not in wire.describe())
    for answer in (wire.renew(bytes(token.hmac)), wire.expire(bytes(token.hmac))):
        assert answer.error_code == ErrorCode.DELEGATION_TOKEN_NOT_FOUND


def test_a_token_is_for_users_only(dial: Any) -> None:
    wire = dial().log_in()
    refused = wire.create("bob", kind="Group")
    assert refused.error_code == ErrorCode.INVALID_PRINCIPAL_TYPE


def test_a_connection_that_has_not_authenticated_gets_no_token(
    dial: Any, addresses: Addresses
) -> None:
    refused = dial(addresses.plaintext).create()
    assert refused.error_code == ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED


@pytest.mark.parametrize("mechanism", list(ScramMechanism))
def test_a_token_logs_in_as_its_owner_and_makes_no_other(
    dial: Any, mechanism: ScramMechanism
) -> None:
    wire = dial().log_in()
    token = wire.create()
    wait_until(lambda: token.token_id in wire.describe())
    other = dial()
    assert other.log_in_with(token, mechanism) == ErrorCode.NONE
    assert 0 < other.last.session_lifetime_ms <= 24 * HOUR_MS
    assert other.ask(MetadataRequest(topics=[]), 12, MetadataResponse).brokers
    not_allowed = ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
    assert other.create().error_code == not_allowed
    assert other.renew(bytes(token.hmac)).error_code == not_allowed
    # Its session goes on for its time, but nobody logs in with it any more.
    assert wire.expire(bytes(token.hmac)).error_code == ErrorCode.NONE
    wait_until(lambda: token.token_id not in wire.describe())
    failed = ErrorCode.SASL_AUTHENTICATION_FAILED
    assert dial().log_in_with(token, mechanism) == failed


def test_a_wrong_password_is_no_token(dial: Any) -> None:
    token = dial().log_in().create()
    token.hmac = bytes(64)
    refused = dial().log_in_with(token, ScramMechanism.SCRAM_SHA_256)
    assert refused == ErrorCode.SASL_AUTHENTICATION_FAILED


@pytest.mark.skipif(LISTENERS_VARIABLE in os.environ, reason="it has no user bob")
def test_others_change_a_token_only_as_renewers(dial: Any) -> None:
    wire, bob = dial().log_in(), dial().log_in("bob", "bob")
    own, shared = wire.create(), wire.create("bob")
    mismatch = ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH
    assert bob.renew(bytes(own.hmac)).error_code == mismatch
    assert bob.expire(bytes(own.hmac)).error_code == mismatch
    assert bob.renew(bytes(shared.hmac)).error_code == ErrorCode.NONE


@pytest.mark.skipif(not have_java_tools(), reason="no Apache Kafka in .downloads/java")
@pytest.mark.timeout(300)
def test_kafka_delegation_tokens_makes_one_that_javas_client_logs_in_with(
    addresses: Addresses, tmp_path: Path
) -> None:
    def config(name: str, mechanism: str, login: str) -> str:
        file = tmp_path / name
        file.write_text(
            f"security.protocol={PROTOCOL}\nsasl.mechanism={mechanism}\n"
            f"sasl.jaas.config={login};\n"
        )
        return str(file)

    plain = config(
        "plain",
        "PLAIN",
        f'{PLAIN_MODULE} required username="{USER}" password="{PASSWORD}"',
    )
    at = ("--bootstrap-server", addresses.sasl, "--command-config")
    tool = f"{TOOLS}.DelegationTokenCommand"
    lifetime = ("--max-life-time-period", "-1")
    said = run_java(tool, *at, plain, "--create", *lifetime)
    row = next(line for line in said.splitlines() if f"User:{USER}" in line)
    token_id, mac = re.split(r"\s+", row)[:2]
    login = (
        f'{SCRAM_MODULE} required username="{token_id}" password="{mac}"'
        ' tokenauth="true"'
    )
    token = config("token", "SCRAM-SHA-256", login)
    run_java(f"{TOOLS}.TopicCommand", *at, token, "--list")
    said = run_java(
        tool, *at, plain, "--renew", "--renew-time-period", "-1", "--hmac", mac
    )
    assert "Completed renew operation" in said
    said = run_java(
        tool, *at, plain, "--expire", "--expiry-time-period", "-1", "--hmac", mac
    )
    assert "Completed expire operation" in said
