"""Tokens: whose are good, and where the keys come from."""

from __future__ import annotations

import base64
import json
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from mpbroker.base.config_def import ConfigError
from mpbroker.network.security.sasl.jwt_validator import JwtSettings, JwtValidator
from mpbroker.network.security.sasl.mechanism import NotYetError, SaslError
from tests.support.children import wait_until

KEY = ec.generate_private_key(ec.SECP256R1())
OTHER = ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)


def jwks(**keys) -> str:
    found = []
    for name, key in keys.items():
        is_rsa = isinstance(key, rsa.RSAPrivateKey)
        algorithm = (
            jwt.algorithms.RSAAlgorithm if is_rsa else jwt.algorithms.ECAlgorithm
        )
        text = algorithm.to_jwk(key.public_key())
        found.append({**json.loads(text), "kid": name, "use": "sig"})
    return json.dumps({"keys": found})


def token(key=KEY, kid="one", algorithm="ES256", **claims) -> str:
    now_s = int(time.time())
    claims = {"sub": "alice", "iat": now_s, "exp": now_s + 3600, **claims}
    claims = {name: value for name, value in claims.items() if value is not None}
    headers = {"kid": kid} if kid else {}
    return jwt.encode(claims, key, algorithm, headers=headers)


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "jwks.json"
    found.write_text(jwks(one=KEY, two=RSA))
    return found


def validator(path, **settings) -> JwtValidator:
    return JwtValidator(JwtSettings(f"file://{path}", **settings))


def test_a_token_signed_by_one_of_the_keys_says_who_it_is(path):
    exp = int(time.time()) + 3600
    found = validator(path)(token(exp=exp))
    assert (found.user, found.expires_ms) == ("alice", exp * 1000)
    assert validator(path)(token(RSA, "two", "RS256")).user == "alice"
    assert validator(path, user_claim="name")(token(name="bob")).user == "bob"
    assert validator(path)(token(iat=int(time.time()) + 10)).user == "alice"  # skew


@pytest.mark.parametrize("unit", [1_000, 1_000_000, 1_000_000_000])
def test_an_end_in_another_unit_is_one_that_can_be_told(path, unit):
    """Kafka's session_lifetime_ms has 64 bits."""
    found = validator(path)(token(exp=int(time.time()) * unit))
    assert time.time() * 1000 < found.expires_ms < 1 << 63


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        (lambda: token(exp=int(time.time()) - 3600), "Expired"),
        (lambda: token(exp=int(time.time()) - 10), "expired 1"),  # within the skew
        (lambda: token(exp=None), "exp"),
        (lambda: token(iat=None), "iat"),
        (lambda: token(nbf=int(time.time()) + 3600), "not yet valid"),
        (lambda: token(OTHER), "Signature"),
        (lambda: token(kid="three"), "no key has the kid"),
        (lambda: token(kid=None), "no key has the kid"),
        (lambda: token("x" * 32, algorithm="HS256"), "alg 'HS256' is not accepted"),
        (lambda: token("", algorithm="none"), "alg 'none' is not accepted"),
        (lambda: token(sub=None), "sub"),
        (lambda: token(sub=" "), "no name"),
        (lambda: "x.y.z", "DecodeError"),
        (lambda: "x" * 16_385 + ".y.z", "its header has 16385 characters"),
        (lambda: "", "DecodeError"),
    ],
)
def test_a_token_that_is_not_good_is_refused_and_the_client_not_told_why(
    path, text, detail
):
    with pytest.raises(SaslError) as caught:
        validator(path)(text())
    assert str(caught.value) == "Authentication failed: the token is not valid"
    assert detail in caught.value.detail


def test_the_log_names_the_user_of_a_refused_token_and_not_the_token(path):
    text = token(exp=int(time.time()) - 3600)
    with pytest.raises(SaslError) as caught:
        validator(path)(text)
    assert "the token is for 'alice'" in caught.value.detail
    assert text.rpartition(".")[2] not in caught.value.detail


def test_audience_and_issuer_are_checked_where_they_are_set(path):
    ours = validator(path, expected_audience=("us", "ours"), expected_issuer="them")
    assert ours(token(aud="us", iss="them")).user == "alice"
    for wrong in ({"aud": "you", "iss": "them"}, {"aud": "us", "iss": "me"}, {}):
        with pytest.raises(SaslError):
            ours(token(**wrong))


def test_a_file_is_read_when_it_changes_and_what_is_half_written_is_not(path):
    judge = validator(path)
    path.write_text(jwks(three=OTHER))
    assert judge(token(OTHER, "three")).user == "alice"
    path.write_text("{")
    assert judge(token(OTHER, "three")).user == "alice"
    with pytest.raises(SaslError):
        judge(token())


@pytest.mark.parametrize(
    "text", ["", "{}", '{"keys": []}', '{"keys": [1, {}]}', "[" * 100_000]
)
def test_a_file_without_keys_is_refused_at_the_start(path, text):
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"sasl\.oauthbearer\.jwks\.endpoint\.url"):
        validator(path)


def test_keys_over_plain_http_are_warned_of(caplog):
    wanted = {"expected_issuer": "issuer"}
    JwtValidator(JwtSettings("https://u:p@127.0.0.1:1/keys", **wanted)).close()
    assert not caplog.records
    JwtValidator(JwtSettings("http://u:p@127.0.0.1:1/keys", **wanted)).close()
    assert "can be replaced on the way" in caplog.text
    assert "u:p@" not in caplog.text


def test_a_missing_issuer_is_warned_of(path, caplog):
    validator(path, expected_issuer="issuer")
    assert not caplog.records
    validator(path)
    assert "sasl.oauthbearer.expected.issuer is not set" in caplog.text


def test_other_urls_are_refused():
    with pytest.raises(ConfigError, match="must be a file:///, https:// or http://"):
        JwtValidator(JwtSettings("ftp://x/y"))


def test_what_a_url_lets_us_in_with_is_shown_to_nobody(caplog):
    for scheme in ("ftp", "http"):  # refused; nobody listens there
        url = f"{scheme}://us:hunter2@127.0.0.1:1/keys?key=hunter2"
        settings = JwtSettings(url, retry_s=0.01, max_retry_s=0.02)
        if scheme == "ftp":
            with pytest.raises(ConfigError) as refused:
                JwtValidator(settings)
        else:
            judge = JwtValidator(settings)
            with pytest.raises(NotYetError) as refused:
                judge(token())
            assert wait_until(lambda: "tried again" in caplog.text)
            judge.close()
        shown = f"{scheme}://[hidden]@127.0.0.1:1/keys?key=[hidden]"
        assert shown in str(refused.value)
        assert "hunter2" not in str(refused.value) + caplog.text


def test_keys_from_a_url_come_in_the_background():
    answers = [b"nonsense", jwks(one=KEY).encode(), jwks(three=OTHER).encode()]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = answers[0] if len(answers) == 1 else answers.pop(0)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/keys"
        judge = JwtValidator(JwtSettings(url, retry_s=0.01, max_retry_s=0.02))
        try:
            with pytest.raises(NotYetError):
                judge(token())
            assert wait_until(lambda: accepts(judge, token()))
            # A key that is not known is asked for.
            assert wait_until(lambda: accepts(judge, token(OTHER, "three")))
        finally:
            judge.close()
            server.shutdown()
            thread.join()


NESTED = b'{"keys":' + b"[" * 100_000


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",  # another service, or TLS, on that port
        b"\x15\x03\x03\0\2\2\x28",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://[x/\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + NESTED,
    ],
)
def test_whatever_a_url_answers_it_is_asked_again(answer):
    good = b"HTTP/1.1 200 OK\r\n\r\n" + jwks(one=KEY).encode()
    answers = [answer, good]

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1 << 16)
            self.request.sendall(answers[0] if len(answers) == 1 else answers.pop(0))

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/keys"
        judge = JwtValidator(JwtSettings(url, retry_s=0.01, max_retry_s=0.02))
        try:
            assert wait_until(lambda: accepts(judge, token()))
        finally:
            judge.close()
            server.shutdown()
            thread.join()


def accepts(judge, text) -> bool:
    try:
        return judge(text).user == "alice"
    except (NotYetError, SaslError):
        return False


def test_a_header_of_nested_lists_is_not_valid(path):
    nested = base64.urlsafe_b64encode(b"[" * 3000).rstrip(b"=").decode()
    with pytest.raises(SaslError, match="not valid"):
        validator(path)(f"{nested}.e30.AA")
