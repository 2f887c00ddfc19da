"""Settings of TLS: what is refused, and who a certificate is."""

from __future__ import annotations

import os
import ssl
import subprocess
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.config_def import ConfigError
from mpbroker.client import tls_channel
from mpbroker.client.settings import ADMIN_CONFIG, parse_settings
from mpbroker.network.security.listener_authentication import PlainUsers
from mpbroker.network.security.sasl.jwt_validator import JwtSettings, JwtValidator
from mpbroker.network.security.ssl_principal import (
    NoRuleError,
    PrincipalMapper,
    distinguished_name,
)
from mpbroker.network.security.tls import TlsSettings, make_context


def refusal(certificates, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        make_context(certificates.settings(**options))
    return str(caught.value)


@pytest.mark.parametrize("line_end", ["\\n", " ", ""])
def test_key_and_certificates_may_be_texts(certificates, line_end):
    with open(certificates.server_path) as file:
        text = file.read()
    middle = text.index("-----BEGIN CERTIFICATE")
    options = {
        "keystore_location": None,
        "keystore_key": text[:middle].replace("\n", line_end),  # as in properties files
        "keystore_certificate_chain": text[middle:].replace("\n", line_end),
        "truststore_certificates": text[middle:].replace("\n", line_end),
        "client_auth": "required",
    }
    assert make_context(certificates.settings(**options)).get_ciphers()


def test_an_authority_in_the_middle_of_a_chain_may_be_trusted_alone(certificates):
    """As in Java, in the broker and in the client."""
    middle = certificates.authority.create_child_ca()
    trusted = middle.cert_pem.bytes().decode()
    server = make_context(
        certificates.settings(truststore_certificates=trusted, client_auth="required")
    )
    for side, context in (("client", server), ("broker", client_context(trusted))):
        issued = middle.issue_cert("localhost")
        other = ssl.SSLContext(
            ssl.PROTOCOL_TLS_CLIENT if side == "client" else ssl.PROTOCOL_TLS_SERVER
        )
        other.check_hostname, other.verify_mode = False, ssl.CERT_NONE
        issued.configure_cert(other)
        shake_hands(*((other, context) if side == "client" else (context, other)))


def client_context(trusted: str) -> ssl.SSLContext:
    given = {
        "bootstrap.servers": "localhost:1",
        "ssl.truststore.certificates": trusted.replace("\n", " "),
    }
    return tls_channel.make_context(parse_settings(ADMIN_CONFIG, given))


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Raises ssl.SSLError: one of the two refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(6):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert all(side.cipher() for side in sides)
    sides[0].write(b"x")
    assert sides[1].read(1) == b"x"


def test_an_encrypted_key_needs_its_password(certificates, tmp_path):
    path = str(tmp_path / "encrypted.pem")
    with open(certificates.server_path) as file:
        text = file.read()
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:sesame"]
    key = subprocess.run(
        command, input=text, capture_output=True, text=True, check=True
    ).stdout
    with open(path, "w") as file:
        file.write(key + text[text.index("-----BEGIN CERTIFICATE") :])
    settings = certificates.settings(keystore_location=path, key_password="sesame")
    assert make_context(settings)
    assert "set ssl.key.password" in refusal(certificates, keystore_location=path)
    wrong = refusal(certificates, keystore_location=path, key_password="barley")
    assert "cannot be used" in wrong and "barley" not in wrong


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"keystore_location": "/nowhere"}, "ssl.keystore.location=/nowhere: No such"),
        ({"keystore_location": None}, "needs a file in PEM"),
        ({"keystore_location": pytest.__file__}, "no PEM; convert a PKCS12 store"),
        ({"enabled_protocols": ("TLSv1.1",)}, "ssl.enabled.protocols=TLSv1.1: served"),
        ({"enabled_protocols": ()}, "ssl.enabled.protocols=: served"),
        ({"cipher_suites": ("TLS_NO_SUCH",)}, "OpenSSL knows none of TLS_NO_SUCH"),
        (
            {
                "enabled_protocols": ("TLSv1.2",),
                "cipher_suites": ("TLS_AES_128_GCM_SHA256",),
            },
            "none of them is of a version",
        ),
        ({"client_auth": "maybe"}, "must be one of none, requested, required"),
        ({"client_auth": "required"}, "set one"),
        (
            {"client_auth": "required", "truststore_certificates": "-----BEGIN x"},
            "no certificates can be read",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(certificates, options, complaint):
    message = refusal(certificates, **options)
    assert complaint in message and message.startswith("ssl.")
    key = message.partition("=")[0].partition(":")[0]
    own = refusal(
        certificates, prefix="listener.name.x.", own=frozenset({key}), **options
    )
    assert own == f"listener.name.x.{message}"


def test_of_key_and_chain_the_one_with_the_fault_is_named(certificates):
    with open(certificates.server_path) as file:
        text = file.read()
    middle = text.index("-----BEGIN CERTIFICATE")
    key, chain = text[:middle], text[middle:]
    damaged = chain.replace("MII", "AAA", 1)
    with open(certificates.issue("other", "localhost")) as file:
        other_key = file.read().partition("-----BEGIN CERTIFICATE")[0]
    for key_text, chain_text, begin, found in (
        (key, "", "ssl.keystore.key is set, and", "chain is not"),
        ("", chain, "ssl.keystore.certificate.chain is set, and", "key is not"),
        (key[:40], chain, "ssl.keystore.key: ", "cut off"),
        (chain, chain, "ssl.keystore.key: ", "CERTIFICATE; it must have"),
        (key, key, "ssl.keystore.certificate.chain: ", "PRIVATE KEY; it must have"),
        (key, damaged, "ssl.keystore.certificate.chain: ", "CERTIFICATE; it must have"),
        (other_key, chain, "ssl.keystore.key and ", "not that of the first"),
    ):
        message = refusal(
            certificates,
            keystore_location=None,
            keystore_key=key_text,
            keystore_certificate_chain=chain_text,
        )
        assert message.startswith(begin) and found in message, message
        for line in key.splitlines()[1:-1]:
            assert line not in message


def of_keystore(path):
    make_context(TlsSettings(keystore_location=path))


def of_users(path):
    PlainUsers({}, path)


def of_keys(path):
    JwtValidator(JwtSettings(f"file://{path}"))


@pytest.mark.parametrize("use", [of_keystore, of_users, of_keys])
def test_who_names_a_pipe_need_not_wait_for_what_comes_through_it(use, tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    for path in ("/dev/zero", pipe):
        with pytest.raises(ConfigError, match=f"{path}: not a file"):
            use(path)


def test_a_file_without_a_private_key_is_named(certificates):
    message = refusal(certificates, keystore_location=certificates.authority_path)
    assert "there is no private key in it: found 1 CERTIFICATE; it must" in message


def test_javas_names_of_cipher_suites_are_understood(certificates):
    names = (
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
        "ECDHE-RSA-AES256-GCM-SHA384",
    )
    context = make_context(certificates.settings(cipher_suites=names))
    chosen = {
        cipher["name"]
        for cipher in context.get_ciphers()
        if cipher["protocol"] == "TLSv1.2"
    }
    assert chosen == {
        "ECDHE-RSA-AES128-GCM-SHA256",
        "ECDHE-ECDSA-CHACHA20-POLY1305",
        "ECDHE-RSA-AES256-GCM-SHA384",
    }
    assert context.maximum_version.name == "TLSv1_2"


# -- who a certificate is -------------------------------------------------------------


def test_a_name_is_printed_as_java_does():
    subject = (
        (("countryName", "DE"),),
        (("organizationName", "A, B"),),
        (("organizationalUnitName", "x"), ("commonName", " #me ")),
        (("emailAddress", "a@b"),),
    )
    assert distinguished_name(subject) == (
        "1.2.840.113549.1.9.1=#1603614062,OU=x+CN=\\ #me\\ ,O=A\\, B,C=DE"
    )


BOB = "CN=Bob,OU=ServiceUsers,O=Org"


@pytest.mark.parametrize(
    ("rules", "user"),
    [
        ("DEFAULT", BOB),
        ("", BOB),
        (r"RULE:^CN=(.*?),.*$/$1/", "Bob"),
        (r"RULE:^CN=(.*?),.*$/$1/L", "bob"),
        (r"RULE:^CN=(.*?),OU=(.*?),.*$/$1@$2/U, DEFAULT", "BOB@SERVICEUSERS"),
        (r"RULE:^CN=Eve.*$/eve/,RULE:^CN=(B)ob.*$/$1\/x/", "B/x"),
        (r"RULE:^CN=Eve.*$/eve/,DEFAULT", BOB),
    ],
)
def test_the_first_rule_that_matches_counts(rules, user):
    assert PrincipalMapper(rules).user(BOB) == user


def test_whom_no_rule_is_about_is_nobody():
    with pytest.raises(NoRuleError):
        PrincipalMapper(r"RULE:^CN=Eve$/eve/").user(BOB)


@pytest.mark.parametrize("rules", ["RULE:^CN/x", "default", "RULE:(/x/", "RULE:a/$1/"])
def test_rules_with_a_mistake_are_refused(rules):
    with pytest.raises(ConfigError, match=r"ssl\.principal\.mapping\.rules"):
        PrincipalMapper(rules)


@given(st.text(alphabet="RULEDFAT:/\\$1,(.*) L", max_size=30), st.text(max_size=20))
def test_any_rules_are_understood_or_refused(rules, name):
    with suppress(ConfigError, NoRuleError):
        PrincipalMapper(rules).user(name)
