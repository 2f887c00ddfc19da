"""PLAIN, SCRAM and OAUTHBEARER: who gets in, and who is told what."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpbroker.base.config_def import ConfigError
from mpbroker.ipc.arena import ANSWER_BYTES
from mpbroker.ipc.counters.authentication_counts import AuthenticationResult as R
from mpbroker.metadata.scram_credentials import ScramMechanism
from mpbroker.network.security.sasl.jaas import users_of_jaas
from mpbroker.network.security.sasl.mechanism import SaslError
from mpbroker.network.security.sasl.oauthbearer import OAuthBearerServer, Token
from mpbroker.network.security.sasl.plain import PlainServer
from mpbroker.network.security.sasl.scram import ScramServer
from tests.network.security.sasl.conversation import ScramClient
from tests.support.scram import credential_of_password

SHA_256, SHA_512 = ScramMechanism
PASSWORDS = {"alice": "wonder", "bob": "pä,=s"}


# -- PLAIN ----------------------------------------------------------------------------


def plain() -> PlainServer:
    return PlainServer(PASSWORDS.get)


@pytest.mark.parametrize("token", [b"\0alice\0wonder", b"alice\0alice\0wonder"])
def test_plain_lets_in_whoever_knows_the_password(token):
    server = plain()
    assert server.evaluate(token) == b""
    assert server.is_complete and server.user == "alice"
    with pytest.raises(SaslError, match="a token after the last one"):
        server.evaluate(token)


@pytest.mark.parametrize(
    ("token", "complaint"),
    [
        (b"\0alice\0wrong", "Invalid username or password"),
        (b"\0nobody\0wonder", "Invalid username or password"),
        (b"\0alice\0", "password not specified"),
        (b"\0\0wonder", "username not specified"),
        (b"bob\0alice\0wonder", "authorization id"),
        (b"alice\0wonder", "expected 3 tokens, got 2"),
        (b"\0a\0b\0c", "expected 3 tokens, got 4"),
        (b"", "expected 3 tokens, got 1"),
        (b"\0alice\0\xff", "not UTF-8"),
    ],
)
def test_plain_refuses_all_else_and_repeats_no_password(token, complaint):
    server = plain()
    with pytest.raises(SaslError, match=complaint) as caught:
        server.evaluate(token)
    assert not server.is_complete
    assert "wonder" not in str(caught.value) + caught.value.detail


@pytest.mark.parametrize(
    ("token", "password"),
    [
        (b"\0alice\0wrong", b"wrong"),
        (b"\0alice\0w", b"w"),
        (b"\0nobody\0wrong", b"wrong"),
        (b"\0alice\0wonder", b"wonder"),
    ],
)
def test_plain_takes_as_long_wherever_a_password_differs(monkeypatch, token, password):
    """Known or not, right or not: one comparison, whose time tells nothing."""
    compared = []

    def compare_digest(mine, theirs):
        compared.append((mine, theirs))
        return mine == theirs

    monkeypatch.setattr(
        "mpbroker.network.security.sasl.plain.hmac.compare_digest", compare_digest
    )
    with suppress(SaslError):
        plain().evaluate(token)
    ((mine, theirs),) = compared
    assert mine == password
    assert (mine == theirs) is (token == b"\0alice\0wonder")


# -- SCRAM ----------------------------------------------------------------------------

CREDENTIALS = {
    (user, mechanism): credential_of_password(mechanism, password, b"salt" * 4, 4096)
    for user, password in PASSWORDS.items()
    for mechanism in ScramMechanism
}


def scram(mechanism: ScramMechanism = SHA_256, secret: bytes = b"s") -> ScramServer:
    def credential_of(user, mechanism):
        return CREDENTIALS.get((user, mechanism))

    return ScramServer(mechanism, credential_of, "ours", secret)


@pytest.mark.parametrize("mechanism", ScramMechanism)
@pytest.mark.parametrize("user", PASSWORDS)
def test_scram_proves_both_sides(mechanism, user):
    server, client = scram(mechanism), ScramClient(mechanism, user, PASSWORDS[user])
    final = client.final(server.evaluate(client.first()))
    assert not server.is_complete
    assert client.trusts(server.evaluate(final))
    assert server.is_complete and server.user == user


def test_scram_speaks_as_in_the_example_of_the_rfc():
    salt = bytes.fromhex("5b6d99689d12358eeca04b141236fa81")  # W22ZaJ0SNY7soEsUEjb6gQ==
    credential = credential_of_password(SHA_256, "pencil", salt, 4096)
    server = ScramServer(
        SHA_256,
        lambda user, mechanism: credential if user == "user" else None,
        "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0",
        b"",
    )
    assert server.evaluate(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO") == (
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    assert server.evaluate(
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    ) == (b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


def scram_failure(user: str, password: str, secret: bytes = b"s"):
    server, client = scram(secret=secret), ScramClient(SHA_256, user, password)
    first = server.evaluate(client.first())
    with pytest.raises(SaslError) as caught:
        server.evaluate(client.final(first))
    assert not server.is_complete
    return first, str(caught.value)


def test_scram_tells_nobody_which_users_there_are():
    known, known_error = scram_failure("alice", "wrong")
    unknown, unknown_error = scram_failure("nobody", "wonder")
    assert known_error == unknown_error
    assert known.split(b",")[2] == unknown.split(b",")[2]  # iterations
    # Their salt is the same at every attempt, and another broker's is another.
    assert scram_failure("nobody", "wonder")[0] == unknown
    assert scram_failure("nobody", "wonder", b"other")[0] != unknown
    assert scram_failure("nobody2", "wonder")[0] != unknown


@pytest.mark.parametrize(
    "first",
    [
        b"p=tls-unique,,n=alice,r=x",
        b"n,a=bob,n=alice,r=x",
        b"n,,n=alice,r=x,tokenauth=true",
        b"n,,m=ext,n=alice,r=x",
        b"n,,n=al=ice,r=x",
        b"n,,n=,r=x",
        b"n,,n=alice,r=",
        b"n,,n=alice",
        b"\xff",
        b"",
        b"n,,n=alice,r=" + b"x" * 257,
        b"n,,n=alice,r=" + b"x" * 5000,
    ],
)
def test_scram_refuses_first_messages_that_it_cannot_serve(first):
    with pytest.raises(SaslError):
        scram().evaluate(first)


def test_scram_serves_the_longest_nonce_with_an_answer_that_fits():
    answer = scram().evaluate(b"n,,n=alice,r=" + b"x" * 256)
    assert answer.startswith(b"r=" + b"x" * 256)
    assert len(answer) < ANSWER_BYTES - 100  # beside it: header and the other fields


def test_scram_refuses_a_proof_of_another_conversation():
    client = ScramClient(SHA_256, "alice", "wonder")
    server = scram()
    final = client.final(server.evaluate(client.first()))
    for wrong in (
        final.replace(b"c=biws", b"c=eSws"),  # another channel binding
        final.replace(b"r=fyko", b"r=Fyko"),
        final[:-4],
        final.replace(b",p=", b",p=AA"),
        final.replace(b",p=", b",x=1,p="),
        b"",
    ):
        server = scram()
        server.evaluate(client.first())
        with pytest.raises(SaslError):
            server.evaluate(wrong)
    # One that was seen is of no use to whoever has seen it.
    server = ScramServer(SHA_256, lambda *_: CREDENTIALS["alice", SHA_256], "new", b"")
    server.evaluate(client.first())
    with pytest.raises(SaslError, match="nonce is another"):
        server.evaluate(final)


# -- OAUTHBEARER ----------------------------------------------------------------------


def validate(text: str) -> Token:
    if text != "good.to-ken":
        raise SaslError("no", R.CREDENTIALS, "expired yesterday")
    return Token("alice", 5000)


def first_of(token: bytes, authzid: bytes = b"") -> bytes:
    return b"n," + authzid + b",\x01auth=Bearer " + token + b"\x01\x01"


@pytest.mark.parametrize("authzid", [b"", b"a=alice"])
def test_a_good_token_says_who_it_is_and_until_when(authzid):
    server = OAuthBearerServer(validate)
    assert server.evaluate(first_of(b"good.to-ken", authzid)) == b""
    assert (server.user, server.expires_ms, server.is_complete) == ("alice", 5000, True)


@pytest.mark.parametrize(
    "first", [first_of(b"bad"), first_of(b"good.to-ken", b"a=bob")]
)
def test_a_bad_token_is_answered_and_fails_when_that_is_acknowledged(first):
    server = OAuthBearerServer(validate)
    assert server.evaluate(first) == b'{"status":"invalid_token"}'
    assert not server.is_complete
    with pytest.raises(SaslError) as caught:
        server.evaluate(b"\x01")
    assert "yesterday" not in str(caught.value)


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"n,,\x01\x01",
        b"n,,\x01auth=Basic abc\x01\x01",
        b"p,,\x01auth=Bearer good.to-ken\x01\x01",
        first_of(b"to ken"),
        first_of(b"good.to-ken") + b"x",
        b"\xff",
    ],
)
def test_what_is_no_token_at_all_fails_at_once(first):
    with pytest.raises(SaslError) as caught:
        OAuthBearerServer(validate).evaluate(first)
    assert caught.value.result == R.NOT_SASL


# -- all of them ----------------------------------------------------------------------

noise = st.one_of(
    st.binary(max_size=60),
    st.text(alphabet="nyrapcv=,\x01 \0x", max_size=40).map(str.encode),
)


@given(st.lists(noise, min_size=1, max_size=4))
@example([b"n,,n=alice,r=x", b"c=biws,r=xours,p="])
@pytest.mark.parametrize(
    "make", [plain, scram, lambda: OAuthBearerServer(validate)], ids=lambda make: ""
)
def test_any_bytes_are_answered_or_refused_and_let_nobody_in(make, tokens):
    server = make()
    with suppress(SaslError):
        for token in tokens:
            assert isinstance(server.evaluate(token), bytes)
    assert not server.is_complete


# -- the users of a sasl.jaas.config --------------------------------------------------

MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule required"


def test_users_are_read_from_a_jaas_config():
    text = f'{MODULE}\n username="admin" password="x" user_alice="w;\\"=" user_b=c ;'
    assert users_of_jaas(text, "key") == {"alice": 'w;"=', "b": "c"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must begin"),
        (f'{MODULE} user_alice="w"', "must end with a semicolon"),
        (f'{MODULE} user_alice="wonder;', "quotation mark is missing"),
        (f"{MODULE} user_alice wonder;", "name=value"),
        (f"{MODULE} user_alice = ;", "name=value"),
        ("Other required;", "must begin"),
    ],
)
def test_a_jaas_config_with_a_mistake_is_refused_without_its_passwords(text, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        users_of_jaas(text, "key")
    assert "wonder" not in str(caught.value)


@given(st.text(alphabet='ab"=; \\user_\n', max_size=40))
def test_any_jaas_config_gives_users_or_a_config_error(text):
    with suppress(ConfigError):
        users_of_jaas(f"{MODULE} {text};", "key")
