"""SASL mechanisms, and what they are made from, without a broker."""

import base64
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.config_def import ConfigError
from mpbroker.client.errors import SaslAuthenticationError
from mpbroker.client.sasl import (
    OAuthBearerMechanism,
    PlainMechanism,
    SaslAuthenticator,
    ScramMechanism,
)
from mpbroker.client.security import (
    SecuritySettings,
    load_provider,
    parse_jaas,
    unsecured_token,
)
from mpbroker.client.settings import ADMIN_CONFIG, parse_settings
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.messages.metadata import MetadataResponse
from mpbroker.protocol.messages.sasl_authenticate import SaslAuthenticateResponse
from mpbroker.protocol.messages.sasl_handshake import SaslHandshakeResponse

# RFC 7677, section 3.
NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_FIRST = (
    b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
)
CLIENT_FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


@pytest.fixture
def scram():
    return ScramMechanism("SCRAM-SHA-256", "user", "pencil", NONCE)


def test_scram_says_what_rfc_7677_says(scram):
    assert scram.first() == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    assert scram.answer(SERVER_FIRST) == CLIENT_FINAL
    assert scram.answer(SERVER_FINAL) is None


def test_a_broker_that_does_not_know_the_password_is_not_believed(scram):
    scram.answer(SERVER_FIRST)
    wrong = base64.b64encode(bytes(32))
    with pytest.raises(SaslAuthenticationError, match="its signature is wrong"):
        scram.answer(b"v=" + wrong)


def test_names_may_hold_what_scram_uses_itself():
    first = ScramMechanism("SCRAM-SHA-512", "a=b,c", "p", "n").first()
    assert first == b"n,,n=a=3Db=2Cc,r=n"


def test_every_authentication_has_a_nonce_of_its_own():
    firsts = {ScramMechanism("SCRAM-SHA-256", "u", "p").first() for _ in range(20)}
    assert len(firsts) == 20


@pytest.mark.parametrize(
    ("challenge", "words"),
    [
        (b"r=another,s=AAAA,i=4096", "another nonce"),
        (b"r=rOprNGfwEbeRWgbNEkqO,s=AAAA,i=4096", "another nonce"),
        (SERVER_FIRST.replace(b"4096", b"4095"), "4095 iterations"),
        (SERVER_FIRST.replace(b"4096", b"999999999"), "999999999 iterations"),
        (SERVER_FIRST.replace(b"i=4096", b"i=many"), "cannot be read"),
        (b"e=unknown-user", "cannot be read"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_challenges_that_must_not_be_answered(scram, challenge, words):
    with pytest.raises(SaslAuthenticationError, match=words):
        scram.answer(challenge)


@given(challenges=st.lists(st.binary(max_size=60), max_size=3))
def test_any_challenge_is_an_error_or_answered(challenges):
    scram = ScramMechanism("SCRAM-SHA-256", "user", "pencil", NONCE)
    for challenge in challenges:
        try:
            assert scram.answer(challenge) is None or challenge
        except SaslAuthenticationError:
            return


def test_plain_is_one_token():
    plain = PlainMechanism("üser", "pässword")
    assert plain.first() == "\0üser\0pässword".encode()
    assert plain.answer(b"") is None
    with pytest.raises(SaslAuthenticationError):
        plain.answer(b"more?")


def test_a_refused_token_says_why():
    bearer = OAuthBearerMechanism("abc")
    assert bearer.first() == b"n,,\x01auth=Bearer abc\x01\x01"
    with pytest.raises(SaslAuthenticationError, match="invalid_token"):
        bearer.answer(b'{"status":"invalid_token"}')
    with pytest.raises(SaslAuthenticationError, match="refused"):
        bearer.answer(b"\xff{")
    assert bearer.answer(b"") is None


def test_answers_that_do_not_belong_there_are_protocol_errors():
    authenticator = SaslAuthenticator("PLAIN", lambda: PlainMechanism("u", "p"), "x")
    authenticator.begin()
    with pytest.raises(ProtocolError):
        authenticator.take(SaslAuthenticateResponse(error_message=None, auth_bytes=b""))
    with pytest.raises(ProtocolError):
        authenticator.take(MetadataResponse())
    handshake = SaslHandshakeResponse(error_code=0, mechanisms=["PLAIN"])
    authenticator.take(handshake)
    with pytest.raises(ProtocolError):
        authenticator.take(handshake)


# -- settings --------------------------------------------------------------------------


def security(**given):
    values = {name.replace("_", "."): value for name, value in given.items()}
    return SecuritySettings.of(parse_settings(ADMIN_CONFIG, values))


JAAS = (
    "org.apache.kafka.common.security.scram.ScramLoginModule required"
    ' username="al\\"ice" password=\'s p;ace\';'
)


def test_a_jaas_config_gives_user_and_password():
    assert parse_jaas(JAAS) == {"username": 'al"ice', "password": "s p;ace"}
    found = security(
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_jaas_config=JAAS,
    )
    assert (found.username, found.password) == ('al"ice', "s p;ace")


@pytest.mark.parametrize(
    "text", ["", "PlainLoginModule;", JAAS[:-1], JAAS + "x", 'M required a="b;']
)
def test_a_jaas_config_of_another_form_is_refused_and_not_repeated(text):
    with pytest.raises(ConfigError) as caught:
        parse_jaas(text)
    assert "ace" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_jaas_text_is_read_or_a_config_error(text):
    try:
        parse_jaas(f"M required {text}")
    except ConfigError:
        pass


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"security_protocol": "TLS"}, "one of PLAINTEXT"),
        ({"security_protocol": "SASL_SSL"}, "sasl.mechanism=GSSAPI"),
        (
            {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"},
            "needs sasl.username",
        ),
        (
            {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"},
            "token.endpoint.url .* or sasl.oauthbearer.token.provider",
        ),
        (
            {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "OAUTHBEARER",
                "sasl_oauthbearer_token_endpoint_url": "https://example.com/t",
            },
            "only file://",
        ),
        (
            {"security_protocol": "SSL", "ssl_enabled_protocols": "SSLv3"},
            "SSLv3",
        ),
        ({"ssl_truststore_type": "JKS"}, "PEM"),
    ],
)
def test_settings_that_cannot_be_used_say_what_to_do(given, words):
    with pytest.raises(ConfigError, match=words):
        security(**given)


def test_files_that_are_no_certificates_are_named(tmp_path):
    path = tmp_path / "trust.pem"
    settings = {"security_protocol": "SSL", "ssl_truststore_location": str(path)}
    name = re.escape(f"ssl.truststore.location={path}: ")
    with pytest.raises(ConfigError, match=f"{name}No such file"):
        security(**settings).make_channels()
    path.write_text("no certificate")
    with pytest.raises(ConfigError, match=f"{name}no certificates can be read"):
        security(**settings).make_channels()


def test_providers_of_tokens_are_functions_or_names_of_them():
    assert load_provider("json:dumps") is json.dumps
    assert load_provider(json.loads) is json.loads
    for name in ("json", "json:nothing", "nowhere.at.all:x"):
        with pytest.raises(ConfigError, match="MODULE:FUNCTION"):
            load_provider(name)


def test_an_unsecured_token_says_who_and_for_how_long():
    header, claims, signature = unsecured_token("alice", 1000.5).split(".")
    assert json.loads(base64.urlsafe_b64decode(header + "==")) == {"alg": "none"}
    assert json.loads(base64.urlsafe_b64decode(claims + "==")) == {
        "sub": "alice",
        "iat": 1000,
        "exp": 4600,
    }
    assert not signature
