"""The console over TLS, with the broker's certificate."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlsplit

import pytest
import trustme

from tests.console.serving import Browser, secured, url_of
from tests.exporter.asking import told, wait_until
from tests.network.security.secure_rig import Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory, certificates):
    settings = {
        "console.listeners": "HTTPS://0.0.0.0:0",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": certificates.server_path,
        "ssl.client.auth": "required",  # of clients; a browser has a password
    }
    with secured(tmp_path_factory.mktemp("tls"), settings) as made:
        wait_until(lambda: "console" in told(made))
        yield made


@pytest.fixture
def browser(broker, certificates):
    address = url_of(broker)
    assert address.startswith("https://0.0.0.0:")
    made = Browser(
        address.replace("0.0.0.0", "localhost"), certificates.client_context()
    )

    def answers():
        try:
            return made.get("session").status == 200
        except ConnectionRefusedError:
            return False

    wait_until(answers)
    return made


def test_a_login_over_tls_gets_a_cookie_for_tls_alone(browser):
    answer = browser.log_in("admin")
    assert answer.json["user"] == "admin"
    assert "; Secure" in answer.headers["set-cookie"]
    assert browser.get("topics").status == 200


def test_what_speaks_no_tls_gets_no_answer_and_harms_no_one(broker, browser):
    port = urlsplit(url_of(broker)).port
    with socket.create_connection(("127.0.0.1", port), 60) as plain:
        plain.sendall(b"GET /api/session HTTP/1.1\r\n\r\n")
        try:
            received = plain.recv(1 << 16)
        except ConnectionResetError:
            received = b""
        assert not received.startswith(b"HTTP/")
    assert browser.get("session").status == 200


def test_a_new_certificate_is_used_without_a_restart(browser, certificates):
    context = ssl.create_default_context()
    trustme.CA().configure_trust(context)
    stranger = Browser(f"https://{browser.address}", context)
    with pytest.raises(ssl.SSLCertVerificationError):
        stranger.get("session")
    other = Certificates(certificates.directory)  # written over those before
    renewed = Browser(f"https://{browser.address}", other.client_context())
    assert renewed.get("session").status == 200
