"""Connections over TLS and SASL, from their first byte to their last."""

from __future__ import annotations

import time

import pytest

from mpbroker.ipc.counters.authentication_counts import AuthenticationResult as R
from mpbroker.ipc.counters.authentication_counts import read_reauthentication
from mpbroker.ipc.layout import ConnectionSecurity
from mpbroker.ipc.tables import principals
from mpbroker.ipc.tables.principals import PrincipalsFullError
from mpbroker.metadata.scram_credentials import ScramMechanism
from mpbroker.network.connection_rows import live_rows, security_of
from mpbroker.network.moves.hand_over import HAS_ROW
from mpbroker.network.security import secure_processor, unready_channels
from mpbroker.network.security.listener_authentication import SaslSettings
from mpbroker.protocol.api_key import ApiKey
from mpbroker.supervisor.upgrade.connection_export import KeptSocket, export_connections
from tests.network.rig import connected_pair, frame
from tests.network.security.sasl.conversation import (
    ScramClient,
    authenticate,
    handshake,
    request,
    token_answer,
)
from tests.network.security.secure_rig import (
    GOOD,
    PLAIN,
    SecureRig,
    security,
    take_over,
)
from tests.network.test_departures import Two
from tests.support.scram import credential_of_password

MS = 1_000_000


@pytest.fixture
def sasl_rig(make_rig):
    """SASL_PLAINTEXT: sasl_rig(mechanisms and other settings of it)."""

    def make(sasl=PLAIN, **options):
        return make_rig(kind=SecureRig, security=security(sasl=sasl, **options))

    return make


# -- SASL without TLS -----------------------------------------------------------------


def test_nothing_is_served_before_the_client_has_proved_who_it_is(sasl_rig):
    rig = sasl_rig()
    client = rig.connect()
    client.send(frame(request(ApiKey.METADATA, 1, b"\0\0\0\0")))
    rig.pump(lambda: client.is_closed)
    assert rig.requests == [] and rig.counted(R.NOT_SASL) == 1


def test_who_has_proved_it_is_served_and_its_row_says_who_it_is(sasl_rig):
    rig = sasl_rig()
    client = rig.connect()
    client.send(frame(request(ApiKey.API_VERSIONS, 0)))
    rig.pump(lambda: len(client.frames()) == 1)
    words = rig.memory.control.words
    assert security_of(words, 0) == ConnectionSecurity.PRIVATE
    assert rig.principal() == "User:ANONYMOUS"
    rig.log_in(client)
    assert rig.principal() == "User:alice"
    assert security_of(words, 0) == ConnectionSecurity.PLAIN
    client.send(frame(b"hello") + frame(b"again"))
    rig.pump(lambda: client.frames()[1:] == [b"hello", b"again"])
    assert rig.counted(R.AUTHENTICATED) == 1


def test_requests_behind_the_last_token_are_served_and_none_before_it(sasl_rig):
    rig = sasl_rig()
    client = rig.connect()
    client.send(
        frame(handshake("PLAIN"))
        + frame(authenticate(b"\0alice\0wonder"))
        + frame(b"eager") * 3
    )
    rig.pump(lambda: client.frames()[2:] == [b"eager"] * 3)
    assert rig.requests == [b"eager"] * 3


def test_an_authenticated_connection_outlives_its_processor_at_any_byte(sasl_rig):
    rig = sasl_rig()
    client = rig.connect()
    rig.log_in(client)
    long = frame(b"x" * 30_000)
    client.send(long[:20_000])
    rig.pump(lambda: client.has_sent)
    rig.turns()
    [channel] = rig.processor._channels.values()
    take_over(rig, channel.sock.dup())
    client.send(long[20_000:])
    rig.pump(lambda: client.frames() == [b"x" * 30_000])
    assert rig.principal() == "User:alice"


def test_another_layout_of_memory_gets_nobody_who_has_authenticated(sasl_rig):
    rig = sasl_rig()
    client = rig.connect()
    rig.log_in(client)
    [channel] = rig.processor._channels.values()
    kept = {channel.cookie: KeptSocket(channel.fd, HAS_ROW, -1, 0)}
    control, arena = rig.memory.control, rig.memory.arena
    assert list(export_connections(control.words, arena, kept, ())) == []


def test_half_an_authentication_ends_with_its_processor(sasl_rig):
    rig = sasl_rig()
    client = rig.connect()
    client.send(frame(handshake("PLAIN")))
    rig.pump(lambda: len(client.frames()) == 1)
    [channel] = rig.processor._connections.unready.values()
    take_over(rig, channel.sock.dup())
    rig.pump(lambda: client.is_closed)
    assert rig.connections == 0


def test_a_wrong_password_is_told_after_a_while_and_others_are_served(sasl_rig):
    rig = sasl_rig(failure_delay_ns=300 * MS)
    client, other = rig.connect(), rig.connect()
    rig.log_in(other)
    started = time.monotonic_ns()
    client.send(frame(handshake("PLAIN")) + frame(authenticate(b"\0alice\0wrong")))
    rig.pump(lambda: rig.counted(R.CREDENTIALS) == 1)
    other.send(frame(b"meanwhile"))
    rig.pump(lambda: other.frames() == [b"meanwhile"])
    rig.pump(lambda: client.is_closed)
    assert time.monotonic_ns() - started >= 300 * MS
    answer = token_answer(frame(client.frames()[1]))
    assert answer.error_message == "Authentication failed: Invalid username or password"


@pytest.mark.parametrize(
    ("sent", "result"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", R.NOT_SASL),  # TLS
        (b"GET / HTTP/1.1\r\n\r\n", R.NOT_SASL),
        (b"PROXY UNKNOWN\r\n", R.NOT_SASL),
        (b"\xff\xff\xff\xff", R.NOT_SASL),
        (b"\x00\x08\x00\x01", R.TOO_LARGE),
        (frame(b"nonsense"), R.NOT_SASL),
    ],
)
def test_what_is_no_sasl_is_closed_and_counted(sasl_rig, sent, result):
    rig = sasl_rig()
    client = rig.connect()
    client.send(sent)
    rig.pump(lambda: client.is_closed)
    assert rig.counted(result) == 1


def test_memory_follows_what_was_sent_and_not_what_was_promised(sasl_rig):
    rig = sasl_rig()
    client = rig.connect()
    client.send((500_000).to_bytes(4, "big") + b"x" * 1000)
    rig.pump(lambda: client.has_sent)
    rig.turns()
    [unready] = rig.processor._unready._by_fd.values()
    assert len(unready.buffer) == 1004


def test_who_says_nothing_is_closed_in_time(sasl_rig):
    rig = sasl_rig()
    fast = rig.connect()
    rig.log_in(fast)
    rig.processor._unready.use(security(sasl=PLAIN, setup_timeout_ns=50 * MS))
    silent, slow = rig.connect(), rig.connect()
    slow.send(b"\0\0")
    rig.pump(lambda: silent.is_closed and slow.is_closed)
    assert rig.counted(R.TIMEOUT) == 2
    fast.send(frame(b"still here"))
    rig.pump(lambda: fast.frames() == [b"still here"])


class HoursLater:
    @staticmethod
    def monotonic_ns() -> int:
        return time.monotonic_ns() + 5 * 3_600_000 * MS


def test_nobody_stays_awake_for_those_who_have_proved_it(sasl_rig, monkeypatch):
    """The time that they had for it passes all the same."""
    rig = sasl_rig()
    rig.log_in(rig.connect())
    rig.turns()
    monkeypatch.setattr("mpbroker.network.security.secure_processor.time", HoursLater)
    monkeypatch.setattr("mpbroker.network.processor._IDLE_POLL_S", 1.0)
    assert rig.processor._wait_s() == 1.0
    monkeypatch.setattr("mpbroker.network.processor._IDLE_POLL_S", 0)


def test_what_follows_a_token_that_had_to_wait_is_published_before_any_sleep(sasl_rig):
    rig = sasl_rig()
    client = rig.connect()
    rig.log_in(client)
    processor = rig.processor
    [channel] = processor._channels.values()
    client.send(frame(b"behind it"))
    rig.handles = False

    def is_published() -> bool:
        assert not processor._requests.unpublished
        if rig.memory.ring.waiting():
            return True
        channel.waiting, processor._retries = True, [channel]
        return False

    rig.pump(is_published)


def test_clients_that_authenticate_at_the_same_time_take_turns(sasl_rig, monkeypatch):
    """One client may begin it on thousands of connections."""
    monkeypatch.setattr(unready_channels, "_LONGEST_NS", -1)
    rig = sasl_rig()
    clients = [rig.connect() for _ in range(6)]
    other = rig.connect(connected_pair("127.0.0.2"))
    rig.pump(lambda: rig.connections == 7)
    for client in (*clients, other):
        client.send(frame(handshake("PLAIN")) + frame(authenticate(GOOD)))
    rig.pump(lambda: len(other.frames()) == 2)
    assert sum(len(client.frames()) == 2 for client in clients) <= 2
    rig.pump(lambda: all(len(client.frames()) == 2 for client in clients))


def test_no_room_for_a_principal_closes_its_connection_alone(sasl_rig, monkeypatch):
    rig = sasl_rig()
    first, second = rig.connect(), rig.connect()
    rig.log_in(first)

    def assigning(text):
        raise PrincipalsFullError("full")

    monkeypatch.setattr(rig.memory.principals, "assigning", assigning)
    second.send(frame(handshake("PLAIN")) + frame(authenticate(b"\0bob\0builder")))
    rig.pump(lambda: second.is_closed)
    assert rig.counted(R.UNAVAILABLE) == 1
    first.send(frame(b"x"))
    rig.pump(lambda: first.frames() == [b"x"])


def test_the_room_of_a_principal_that_has_gone_is_the_next_ones(sasl_rig, monkeypatch):
    monkeypatch.setattr(principals, "MAX_PRINCIPALS", 1)
    rig = sasl_rig()
    log_in_as_bob = frame(handshake("PLAIN")) + frame(authenticate(b"\0bob\0builder"))
    first, second = rig.connect(), rig.connect()
    rig.log_in(first)
    second.send(log_in_as_bob)
    rig.pump(lambda: second.is_closed)
    assert rig.counted(R.UNAVAILABLE) == 1
    first.sock.close()
    rig.pump(lambda: not list(live_rows(rig.memory.control.words)))
    third = rig.connect()
    third.send(log_in_as_bob)
    rig.pump(lambda: rig.counted(R.AUTHENTICATED) == 2)


# -- sessions -------------------------------------------------------------------------


def with_sessions(ms):
    return SaslSettings(("PLAIN",), PLAIN.plain_users, max_reauth_ms={"PLAIN": ms})


def test_a_request_after_the_end_of_a_session_closes_the_connection(sasl_rig):
    rig = sasl_rig(with_sessions(50))
    client = rig.connect()
    rig.log_in(client)
    deadline = time.monotonic() + 0.06
    rig.pump(lambda: time.monotonic() > deadline)
    client.send(frame(request(ApiKey.METADATA, 1)))
    rig.pump(lambda: client.is_closed)
    assert rig.counted(R.SESSION_EXPIRED) == 1
    assert rig.requests == []


def test_a_session_ends_though_a_successor_knows_of_none(sasl_rig):
    rig = sasl_rig(with_sessions(50))
    client = rig.connect()
    rig.log_in(client)
    ended = time.monotonic() + 0.06
    [channel] = rig.processor._channels.values()
    rig.security = security(sasl=PLAIN)  # since, sessions do not end any more
    take_over(rig, channel.sock.dup())
    rig.pump(lambda: time.monotonic() > ended)
    client.send(frame(request(ApiKey.METADATA, 1)))
    rig.pump(lambda: client.is_closed)
    assert rig.counted(R.SESSION_EXPIRED) == 1
    assert rig.requests == []


def test_a_session_is_prolonged_between_requests(sasl_rig):
    rig = sasl_rig(with_sessions(60_000))
    client = rig.connect()
    rig.log_in(client)
    metadata = request(ApiKey.METADATA, 1)
    client.send(frame(metadata) + frame(handshake("PLAIN")))
    client.send(frame(authenticate(b"\0alice\0wonder")) + frame(metadata))
    rig.pump(lambda: len(client.frames()) == 4)
    assert rig.requests == [metadata] * 2
    assert token_answer(frame(client.frames()[2])).session_lifetime_ms == 60_000
    assert rig.counted(R.REAUTHENTICATED) == 1
    latency = read_reauthentication(rig.memory.control.words)
    assert latency.times == 1 and latency.sum_ns == latency.max_ns > 0


class SecureTwo(Two, SecureRig):
    other_kind = SecureRig


def test_who_authenticates_again_goes_elsewhere_when_that_is_done(
    make_rig, monkeypatch
):
    monkeypatch.setattr(secure_processor, "_REAUTH_NS", 1 << 62)  # however slow it is
    two = make_rig(kind=SecureTwo, security=security(sasl=with_sessions(3_600_000)))
    client = two.connect()
    two.log_in(client)
    client.send(frame(handshake("PLAIN")))
    two.pump(client.frames)
    two.move()
    two.turns()
    metadata = request(ApiKey.METADATA, 1)
    client.send(frame(authenticate(b"\0alice\0wonder")) + frame(metadata))
    two.pump(lambda: len(client.frames()) == 3)
    assert token_answer(frame(client.frames()[1])).error_code == 0
    assert two.requests == [metadata]
    two.pump(lambda: two.other.connections == 1)


def test_others_go_elsewhere_in_the_place_of_who_authenticates_again(
    make_rig, monkeypatch
):
    monkeypatch.setattr(secure_processor, "_REAUTH_NS", 1 << 62)
    two = make_rig(kind=SecureTwo, security=security(sasl=with_sessions(3_600_000)))
    busy, idle = two.connect(), two.connect()
    for client in (busy, idle):
        two.log_in(client)
    busy.send(frame(handshake("PLAIN")))
    two.pump(busy.frames)
    two.move(1)
    two.pump(lambda: two.other.connections == 1)
    assert two.connections == 1


def test_who_takes_long_to_authenticate_again_holds_nobody_up(make_rig, monkeypatch):
    monkeypatch.setattr(secure_processor, "_REAUTH_NS", 0)
    two = make_rig(kind=SecureTwo, security=security(sasl=with_sessions(3_600_000)))
    client = two.connect()
    two.log_in(client)
    client.send(frame(handshake("PLAIN")))
    two.pump(client.frames)
    two.move()
    two.pump(lambda: two.other.connections == 1)
    client.send(frame(authenticate(b"\0alice\0wonder")))
    two.pump(lambda: client.is_closed)
    assert two.requests == []


def test_who_authenticates_again_when_its_processor_dies_is_closed(sasl_rig):
    """Told that its token is out of order, it would give up for good."""
    rig = sasl_rig(with_sessions(3_600_000))
    client = rig.connect()
    rig.log_in(client)
    client.send(frame(handshake("PLAIN")))
    rig.pump(client.frames)
    [channel] = rig.processor._channels.values()
    take_over(rig, channel.sock.dup())
    client.send(frame(authenticate(b"\0alice\0wonder")))
    rig.pump(lambda: client.is_closed)
    assert rig.requests == []


def test_who_fails_to_authenticate_again_is_told_and_closed(sasl_rig):
    """After Kafka's testSaslReauthenticationFailureWithKip152SaslAuthenticate."""
    rig = sasl_rig(with_sessions(60_000))
    client = rig.connect()
    rig.log_in(client)
    client.send(frame(handshake("PLAIN")) + frame(authenticate(b"\0alice\0wrong")))
    client.send(frame(request(ApiKey.METADATA, 1)))
    rig.pump(lambda: client.is_closed)
    answer = token_answer(frame(client.frames()[1]))
    assert answer.error_message == "Authentication failed: Invalid username or password"
    assert rig.counted(R.CREDENTIALS) == 1 and rig.counted(R.REAUTHENTICATED) == 0
    assert rig.requests == []


def test_nobody_authenticates_again_and_again(sasl_rig):
    """At most once a second, as in Kafka; a handshake before that is a request."""
    rig = sasl_rig(with_sessions(60_000))
    client = rig.connect()
    rig.log_in(client)
    again = frame(handshake("PLAIN")) + frame(authenticate(b"\0alice\0wonder"))
    client.send(again)
    rig.pump(lambda: rig.counted(R.REAUTHENTICATED) == 1)
    connection, lease = next(iter(rig.processor._leases.items()))
    soon = lease._replace(reauthenticated_ns=time.monotonic_ns() + 60_000 * MS)
    rig.processor._leases[connection] = soon
    client.send(frame(handshake("PLAIN")))
    rig.pump(lambda: rig.requests == [handshake("PLAIN")])  # and the handler refuses it
    later = lease._replace(reauthenticated_ns=time.monotonic_ns() - 1_000 * MS)
    rig.processor._leases[connection] = later
    client.send(again)
    rig.pump(lambda: rig.counted(R.REAUTHENTICATED) == 2)
    assert rig.requests == [handshake("PLAIN")]


def test_nobody_becomes_somebody_else(sasl_rig):
    rig = sasl_rig(with_sessions(60_000))
    client = rig.connect()
    rig.log_in(client)
    client.send(frame(handshake("PLAIN")) + frame(authenticate(b"\0bob\0builder")))
    rig.pump(lambda: client.is_closed)
    assert (
        "Cannot change principals"
        in token_answer(frame(client.frames()[1])).error_message
    )
    assert rig.counted(R.REAUTHENTICATED) == 0


def test_an_answer_too_long_for_its_place_closes_its_connection_alone(sasl_rig, caplog):
    """A re-authentication by SCRAM, with a salt that an administrator made long."""
    mechanism = ScramMechanism.SCRAM_SHA_256
    salt = bytearray(b"salt")
    rig = sasl_rig(
        SaslSettings(
            (mechanism.mechanism_name,),
            max_reauth_ms={mechanism.mechanism_name: 60_000},
        ),
        credential_of=lambda user, mechanism: credential_of_password(
            mechanism, "wonder", bytes(salt), 4096
        ),
    )
    other, client = rig.connect(), rig.connect()
    for each in (other, client):
        log_in_by_scram(rig, each, mechanism)
    salt *= 500
    first = ScramClient(mechanism, "alice", "wonder").first()
    client.send(frame(handshake(mechanism.mechanism_name)) + frame(authenticate(first)))
    rig.pump(lambda: client.is_closed)
    assert "the answer to its re-authentication has" in caplog.text
    other.send(frame(b"hello"))
    rig.pump(lambda: other.frames()[-1:] == [b"hello"])
    assert rig.counted(R.TOO_LARGE) == 1


def log_in_by_scram(rig, client, mechanism):
    scram = ScramClient(mechanism, "alice", "wonder")
    client.send(frame(handshake(mechanism.mechanism_name)))
    client.send(frame(authenticate(scram.first())))
    rig.pump(lambda: len(client.frames()) == 2)
    server_first = token_answer(frame(client.frames()[1])).auth_bytes
    client.send(frame(authenticate(scram.final(bytes(server_first)))))
    rig.pump(lambda: len(client.frames()) == 3)
