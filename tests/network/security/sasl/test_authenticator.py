"""Which SASL requests may come when, and what each is answered."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.ipc.counters.authentication_counts import AuthenticationResult as R
from mpbroker.network.security.sasl.authenticator import (
    AuthenticatorState,
    SaslServerAuthenticator,
    Session,
)
from mpbroker.network.security.sasl.mechanism import NotYetError, SaslError
from mpbroker.network.security.sasl.plain import PlainServer
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from tests.network.security.sasl.conversation import (
    authenticate,
    handshake,
    handshake_answer,
    payload,
    request,
    say,
    token_answer,
)

S = AuthenticatorState
GOOD, BAD = b"\0alice\0wonder", b"\0alice\0wrong"
NOW_MS = 1_000_000


class Expiring:
    """A mechanism whose credential ends; not at once to be judged."""

    def __init__(self) -> None:
        self.user, self.is_complete = "", False
        self.claimed = ""
        self.expires_ms: int | None = NOW_MS + 500
        self.by_token = False
        self.asked = 0

    def evaluate(self, token: bytes) -> bytes:
        self.asked += 1
        if token == b"later" and self.asked == 1:
            raise NotYetError("no keys")
        if token == b"bug":
            raise RecursionError("lists in lists")
        if token == b"no":
            raise SaslError("no", R.CREDENTIALS, "a detail")
        self.user, self.is_complete = token.decode(), True
        return b"welcome"


def answer_api_versions(version: int, body: memoryview) -> tuple[bytes, bool]:
    return b"apis", version <= 4


def made(**options) -> SaslServerAuthenticator:
    mechanisms = {
        "PLAIN": lambda: PlainServer({"alice": "wonder"}.get),
        "EXPIRING": Expiring,
    }
    return SaslServerAuthenticator(mechanisms, answer_api_versions, **options)


def test_an_unexpected_error_of_a_mechanism_fails_its_connection_alone(caplog):
    authenticator = made()
    say(authenticator, handshake("EXPIRING"))
    assert say(authenticator, authenticate(b"bug")) == b""
    assert authenticator.state is S.FAILED and authenticator.session is None
    assert authenticator.error is not None
    assert authenticator.error.result is R.UNAVAILABLE
    assert "lists in lists" not in str(authenticator.error)
    assert "lists in lists" in caplog.text  # with its traceback, for us


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_client_asks_for_the_apis_chooses_and_proves(version):
    sasl = made()
    assert payload(say(sasl, request(ApiKey.API_VERSIONS, 3)), 18, 3) == b"apis"
    answer = handshake_answer(say(sasl, handshake("PLAIN")))
    assert (answer.error_code, answer.mechanisms) == (0, ["PLAIN", "EXPIRING"])
    said = token_answer(say(sasl, authenticate(GOOD, version)), version)
    assert (said.error_code, bytes(said.auth_bytes)) == (0, b"")
    assert said.session_lifetime_ms == 0
    assert sasl.state is S.COMPLETE
    assert sasl.session == Session("alice", "PLAIN", 0)


def test_after_handshake_0_tokens_travel_bare():
    sasl = made()
    handshake_answer(say(sasl, handshake("PLAIN", 0)), 0)
    assert say(sasl, GOOD) == b"\0\0\0\0"
    assert sasl.state is S.COMPLETE
    sasl = made()
    say(sasl, handshake("PLAIN", 0))
    assert say(sasl, BAD) == b""
    assert sasl.state is S.FAILED and sasl.error.result == R.CREDENTIALS


def test_a_wrong_password_is_told_in_kafkas_words():
    sasl = made()
    say(sasl, handshake("PLAIN"))
    answer = token_answer(say(sasl, authenticate(BAD)))
    assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert answer.error_message == "Authentication failed: Invalid username or password"
    assert sasl.state is S.FAILED


def test_the_log_names_the_user_of_a_refused_login_and_no_password():
    for user, told in ((b"alice", "'alice'"), (b"al\nice", r"'al\nice'")):
        sasl = made()
        say(sasl, handshake("PLAIN"))
        say(sasl, authenticate(b"\0" + user + b"\0secret"))
        assert sasl.error is not None
        assert sasl.error.detail.startswith(f"{told} by PLAIN: Authentication failed")
        assert "secret" not in sasl.error.detail
        assert "alice" not in str(sasl.error)  # the client gets Kafka's words


def test_a_mechanism_that_is_not_offered_is_answered_with_those_that_are():
    sasl = made()
    answer = handshake_answer(say(sasl, handshake("GSSAPI")))
    assert answer.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
    assert answer.mechanisms == ["PLAIN", "EXPIRING"]
    assert sasl.state is S.FAILED and sasl.error.result == R.MECHANISM


def test_an_unknown_version_of_api_versions_may_be_asked_again():
    sasl = made()
    assert say(sasl, request(ApiKey.API_VERSIONS, 9))
    assert sasl.state is S.INITIAL
    assert say(sasl, request(ApiKey.API_VERSIONS, 0))
    assert sasl.state is S.HANDSHAKE


@pytest.mark.parametrize(
    "frames",
    [
        [request(ApiKey.METADATA, 1, b"\0\0\0\0")],
        [request(ApiKey.PRODUCE, 9)],
        [authenticate(GOOD)],
        [request(ApiKey.API_VERSIONS, 0), request(ApiKey.API_VERSIONS, 0)],
        [handshake("PLAIN"), handshake("PLAIN")],
        [handshake("PLAIN"), request(ApiKey.API_VERSIONS, 0)],
        [handshake("PLAIN"), request(ApiKey.METADATA, 1, b"\0\0\0\0")],
        [handshake("PLAIN"), request(ApiKey.SASL_AUTHENTICATE, 9)],
        [request(ApiKey.SASL_HANDSHAKE, 9)],
        [request(9999, 0)],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b""],
        [handshake("PLAIN")[:-1]],
    ],
)
def test_a_step_out_of_order_ends_it_without_an_answer(frames):
    sasl = made()
    *before, last = frames
    for frame in before:
        assert say(sasl, frame)
    assert say(sasl, last) == b""
    assert sasl.state is S.FAILED and sasl.session is None
    assert sasl.error.result == R.NOT_SASL


def test_what_cannot_be_judged_yet_is_judged_later():
    sasl = made()
    say(sasl, handshake("EXPIRING"))
    with pytest.raises(NotYetError):
        say(sasl, authenticate(b"later"))
    assert sasl.state is S.TOKENS
    assert token_answer(say(sasl, authenticate(b"later"))).error_code == 0
    assert sasl.session.user == "later"


@pytest.mark.parametrize(
    ("mechanism", "token", "limit_ms", "lifetime_ms"),
    [
        ("PLAIN", GOOD, {}, 0),
        ("PLAIN", GOOD, {"PLAIN": 300}, 300),
        ("EXPIRING", b"alice", {"PLAIN": 300}, 500),
        ("EXPIRING", b"alice", {"EXPIRING": 300}, 300),
        ("EXPIRING", b"alice", {"EXPIRING": 900}, 500),
    ],
)
def test_a_session_ends_with_the_limit_or_the_credential(
    mechanism, token, limit_ms, lifetime_ms
):
    sasl = made(max_reauth_ms=limit_ms)
    say(sasl, handshake(mechanism))
    answer = token_answer(say(sasl, authenticate(token), NOW_MS))
    assert answer.session_lifetime_ms == lifetime_ms
    assert sasl.session.ends_ms == (NOW_MS + lifetime_ms if lifetime_ms else 0)


BEFORE = Session("alice", "EXPIRING", NOW_MS)


def test_who_authenticates_again_must_be_who_it_was_by_the_same_mechanism():
    sasl = made(previous=BEFORE)
    say(sasl, handshake("EXPIRING"))
    assert token_answer(say(sasl, authenticate(b"alice"))).error_code == 0
    assert sasl.state is S.COMPLETE

    sasl = made(previous=BEFORE)
    say(sasl, handshake("EXPIRING"))
    answer = token_answer(say(sasl, authenticate(b"bob")))
    assert "Cannot change principals" in answer.error_message
    assert sasl.state is S.FAILED

    sasl = made(previous=BEFORE)
    answer = handshake_answer(say(sasl, handshake("PLAIN")))
    assert answer.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
    assert sasl.state is S.FAILED


# -- whatever comes -------------------------------------------------------------------

frames = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            handshake("PLAIN"),
            handshake("PLAIN", 0),
            handshake("x"),
            authenticate(BAD),
            authenticate(b"", 0),
            request(ApiKey.API_VERSIONS, 0),
            request(ApiKey.FETCH, 12),
        ]
    ),
    st.builds(
        request,
        st.sampled_from([17, 18, 36]),
        st.integers(-1, 3),
        st.binary(max_size=20),
    ),
)


@given(st.lists(frames, max_size=5))
def test_any_frames_are_answered_or_end_it_and_let_nobody_in(sent):
    sasl = made()
    for frame in sent:
        if sasl.state in (S.FAILED, S.COMPLETE):
            break
        with suppress(NotYetError):
            assert isinstance(say(sasl, frame), bytes)
    assert sasl.session is None
