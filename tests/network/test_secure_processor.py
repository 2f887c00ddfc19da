"""Connections over TLS and SASL, from their first byte to their last."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import time

import pytest

from mpbroker.ipc.authentication_counts import AuthenticationResult as R
from mpbroker.ipc.authentication_counts import read_reauthentication
from mpbroker.ipc.layout import (
    CONNECTION_ENCRYPTION,
    ConnectionSecurity,
    connection_row,
)
from mpbroker.ipc.principals import PrincipalsFullError
from mpbroker.ipc.response_parts import FilePart
from mpbroker.network import secure_processor
from mpbroker.network.connection_export import KeptSocket, export_connections
from mpbroker.network.connection_rows import security_of
from mpbroker.network.encryption import encryption_names, registered_name
from mpbroker.network.hand_over import HAS_ROW
from mpbroker.network.listener_security import SaslSettings
from mpbroker.protocol.api_key import ApiKey
from tests.network.rig import frame
from tests.network.sasl.conversation import (
    authenticate,
    handshake,
    request,
    token_answer,
)
from tests.network.secure_rig import PLAIN, Certificates, SecureRig, security
from tests.network.test_departures import Two

MS = 1_000_000


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def sasl_rig(make_rig):
    """SASL_PLAINTEXT: sasl_rig(mechanisms and other settings of it)."""

    def make(sasl=PLAIN, **options):
        return make_rig(kind=SecureRig, security=security(sasl=sasl, **options))

    return make


@pytest.fixture
def tls_rig(make_rig, certificates):
    """SSL: tls_rig(settings of it)."""

    def make(sasl=None, options=None, **settings):
        tls = certificates.settings(**settings)
        return make_rig(kind=SecureRig, security=security(tls, sasl, **(options or {})))

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


def take_over(rig, *socks):
    """Kill the processor; its successor finds these sockets, by row."""
    from mpbroker.ipc.fdpass import send_fds
    from mpbroker.ipc.layout import HEADER, HEADER_COUNTERS
    from mpbroker.network.hand_over import pack_adopt

    words = rig.memory.control.words
    words[HEADER + HEADER_COUNTERS] = 1
    rig.processor._selector._epoll.close()
    for channel in [
        *rig.processor._channels.values(),
        *rig.processor._connections.unready.values(),
    ]:
        channel.sock.close()
    rows = list(range(len(socks)))
    send_fds(
        rig.memory.handovers[0][0], pack_adopt(rows), [sock.fileno() for sock in socks]
    )
    for sock in socks:
        sock.close()
    rig.start_processor()
    rig.processor.take_over()


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
    monkeypatch.setattr("mpbroker.network.secure_processor.time", HoursLater)
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


def test_no_room_for_a_principal_closes_its_connection_alone(sasl_rig, monkeypatch):
    rig = sasl_rig()
    first, second = rig.connect(), rig.connect()
    rig.log_in(first)

    def number_of(text):
        raise PrincipalsFullError("full")

    monkeypatch.setattr(rig.memory.principals, "number_of", number_of)
    second.send(frame(handshake("PLAIN")) + frame(authenticate(b"\0bob\0builder")))
    rig.pump(lambda: second.is_closed)
    assert rig.counted(R.UNAVAILABLE) == 1
    first.send(frame(b"x"))
    rig.pump(lambda: first.frames() == [b"x"])


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


# -- TLS ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_requests_of_all_sizes_pass_over_tls_both_ways(tls_rig, certificates, version):
    rig = tls_rig()
    context = certificates.client_context()
    context.maximum_version = version
    client = rig.connect_tls(context)
    sizes = [0, 1, 100, 16_000, 16_385, 70_000, 1_500_000]
    bodies = [os.urandom(size) for size in sizes]
    for body in bodies:
        client.send(frame(body))
    rig.pump(lambda: client.frames() == bodies)
    assert rig.counted(R.HANDSHAKE) == 1
    words = rig.memory.control.words
    assert security_of(words, 0) == ConnectionSecurity.PRIVATE
    cipher, protocol = encryption_names(
        words[connection_row(0) + CONNECTION_ENCRYPTION]
    )
    assert protocol == version.name.replace("_", ".")
    openssls, _, _ = client.sock.cipher()
    assert cipher == registered_name(openssls)
    # The next connection in the same row begins with nothing of it.
    client.close()
    rig.pump(lambda: rig.connections == 0)
    rig.connect_tls(context)
    rig.pump(lambda: len(rig.processor._unready) == 1)
    assert words[connection_row(0) + CONNECTION_ENCRYPTION] == 0


def test_what_openssl_has_decrypted_already_waits_for_no_event(tls_rig, certificates):
    rig = tls_rig()
    client = rig.connect_tls(certificates.client_context())
    rig.pump(lambda: client.has_handshake)
    client.send(b"".join(frame(b"%d" % number) for number in range(3000)))
    rig.pump(lambda: len(client.frames()) == 3000)


@pytest.mark.parametrize("rest", [b"", b"\0\0\0\x09half"])
def test_what_was_sent_over_tls_before_a_close_is_all_executed(
    tls_rig, certificates, rest
):
    """After Kafka's remoteCloseWithBufferedReceives, and with an incomplete one."""
    rig = tls_rig()
    rig.answer = lambda end, slot, body: end.send_nothing(slot)
    client = rig.connect_tls(certificates.client_context())
    rig.pump(lambda: client.has_handshake)
    bodies = [b"%d" % number for number in range(10)]
    client.send(b"".join(map(frame, bodies)) + rest)
    client.turn()
    assert client.has_sent
    client.close()
    rig.pump(lambda: not rig.connections)
    assert rig.requests == bodies
    rig.pump(rig.nothing_is_held)


def test_file_ranges_are_read_and_sent(tls_rig, certificates, tmp_path):
    data = os.urandom(3_000_000)
    path = tmp_path / "segment"
    path.write_bytes(data)

    def answer(end, slot, body):
        head = (len(data) - 5000).to_bytes(4, "big")
        part = FilePart(str(path), path.stat().st_ino, 5000, len(data) - 5000)
        end.send_parts(slot, [head, part])

    rig = tls_rig()
    rig.answer = answer
    slow = rig.connect_tls(certificates.client_context())
    slow.send(frame(b"fetch"))
    slow.reads = False
    rig.pump(lambda: rig.requests)
    rig.turns()
    slow.reads = True
    rig.pump(lambda: slow.frames() == [data[5000:]])


def test_a_client_is_who_its_certificate_says(tls_rig, certificates):
    rig = tls_rig(
        client_auth="required",
        truststore_location=certificates.authority_path,
        principal_mapping_rules=r"RULE:^.*O=([^,]+).*$/org-$1/L,DEFAULT",
    )
    path = certificates.issue(
        "client", "client.example", common_name="me", organization_name="Unit"
    )
    client = rig.connect_tls(certificates.client_context(path))
    client.send(frame(b"x"))
    rig.pump(lambda: client.frames() == [b"x"])
    assert rig.principal() == "User:org-unit"


def test_rules_that_come_during_a_handshake_are_not_for_its_certificate(
    tls_rig, certificates
):
    judged = {
        "client_auth": "required",
        "truststore_location": certificates.authority_path,
    }
    rig = tls_rig(**judged, principal_mapping_rules="RULE:^.*$/guest/")
    path = certificates.issue("guest", "client.example", common_name="me")
    client = rig.connect_tls(certificates.client_context(path))
    client.send(frame(b"x"))
    unready = rig.processor._connections.unready
    rig.pump(lambda: any(isinstance(c.sock, ssl.SSLSocket) for c in unready.values()))
    rules = {**judged, "principal_mapping_rules": "RULE:^.*$/admin/"}
    rig.processor._unready.use(security(certificates.settings(**rules)))
    rig.pump(lambda: client.frames() == [b"x"])
    assert rig.principal() == "User:guest"


def test_tls_and_sasl_together(tls_rig, certificates):
    rig = tls_rig(PLAIN)
    client = rig.connect_tls(certificates.client_context())
    rig.log_in(client)
    client.send(frame(b"x" * 100_000))
    rig.pump(lambda: client.frames() == [b"x" * 100_000])
    assert rig.principal() == "User:alice"
    assert rig.counted(R.AUTHENTICATED) == rig.counted(R.HANDSHAKE) == 1


def expired(certificates):
    now = datetime.datetime.now(datetime.UTC)
    path = certificates.issue(
        "expired", "client.example", not_after=now - datetime.timedelta(days=1)
    )
    return certificates.client_context(path)


def of_another_authority(certificates):
    from pathlib import Path

    directory = certificates.directory / "other"
    directory.mkdir(exist_ok=True)
    other = Certificates(Path(directory))
    return certificates.client_context(other.issue("client", "client.example"))


def without(certificates):
    return certificates.client_context()


@pytest.mark.parametrize("make", [expired, of_another_authority, without])
def test_a_client_certificate_that_is_not_good_is_refused(tls_rig, certificates, make):
    rig = tls_rig(
        client_auth="required", truststore_location=certificates.authority_path
    )
    client = rig.connect_tls(make(certificates))
    client.send(frame(b"x"))
    rig.pump(lambda: client.is_closed)
    assert rig.counted(R.TLS_CERTIFICATE) == 1 and rig.requests == []


def test_a_certificate_that_is_only_requested_may_be_missing(tls_rig, certificates):
    rig = tls_rig(
        client_auth="requested", truststore_location=certificates.authority_path
    )
    client = rig.connect_tls(certificates.client_context())
    client.send(frame(b"x"))
    rig.pump(lambda: client.frames() == [b"x"])
    assert rig.principal() == "User:ANONYMOUS"


def test_no_version_in_common(tls_rig, certificates):
    rig = tls_rig(enabled_protocols=("TLSv1.3",))
    context = certificates.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    client = rig.connect_tls(context)
    rig.pump(lambda: client.is_closed)
    assert rig.counted(R.TLS_VERSION) == 1


def test_no_cipher_suite_in_common(tls_rig, certificates):
    rig = tls_rig(
        enabled_protocols=("TLSv1.2",),
        cipher_suites=("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",),
    )
    context = certificates.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    client = rig.connect_tls(context)
    rig.pump(lambda: client.is_closed)
    assert rig.counted(R.TLS_CIPHER) == 1


def test_a_client_that_does_not_trust_us(tls_rig, certificates):
    rig = tls_rig()
    client = rig.connect_tls(ssl.create_default_context())
    rig.pump(lambda: client.is_closed)
    rig.pump(lambda: rig.counted(R.TLS_REFUSED_BY_CLIENT) == 1)


@pytest.mark.parametrize(
    "sent",
    [
        frame(request(ApiKey.API_VERSIONS, 0)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0",
        b"\x80",
    ],
)
def test_what_is_no_tls_is_closed_and_counted(tls_rig, sent):
    rig = tls_rig()
    client = rig.connect()
    client.send(sent)
    rig.pump(lambda: client.is_closed)
    assert rig.counted(R.NOT_TLS) == 1


def test_garbage_after_the_first_byte_of_tls_is_closed(tls_rig):
    rig = tls_rig()
    for rest in (os.urandom(200), b"\x03\x01\x00\x02ab", b"\x03\x03\xff\xff"):
        client = rig.connect()
        client.send(b"\x16" + rest)
        rig.turns()
        client.close()
    rig.pump(lambda: not rig.connections)


def test_a_slow_handshake_holds_nobody_up(tls_rig, certificates):
    rig = tls_rig(options={"setup_timeout_ns": 100 * MS})
    slow = rig.connect()
    slow.send(b"\x16\x03\x01")
    client = rig.connect_tls(certificates.client_context())
    client.send(frame(b"x"))
    rig.pump(lambda: client.frames() == [b"x"])
    rig.pump(lambda: slow.is_closed)
    assert rig.counted(R.TIMEOUT) == 1


def test_a_client_is_said_goodbye_when_its_processor_goes(tls_rig, certificates):
    from mpbroker.ipc.layout import (
        PROCESSOR_MOVE_COUNT,
        PROCESSOR_MOVE_DONE,
        PROCESSOR_MOVE_ORDER,
        processor_row,
    )

    rig = tls_rig()
    client = rig.connect_tls(certificates.client_context())
    client.send(frame(b"x"))
    rig.pump(lambda: client.frames() == [b"x"])
    words, row = rig.memory.control.words, processor_row(0)
    words[row + PROCESSOR_MOVE_COUNT] = 1  # to another: that cannot be
    words[row + PROCESSOR_MOVE_ORDER] += 1
    rig.memory.processor_bells[0].ring()
    rig.pump(
        lambda: words[row + PROCESSOR_MOVE_DONE] == words[row + PROCESSOR_MOVE_ORDER]
    )
    assert not client.is_closed
    words[row + PROCESSOR_MOVE_COUNT] = -1  # all of them
    words[row + PROCESSOR_MOVE_ORDER] += 1
    rig.memory.processor_bells[0].ring()
    rig.pump(lambda: client.is_closed)
    assert client.was_said_goodbye
    rig.pump(
        lambda: words[row + PROCESSOR_MOVE_DONE] == words[row + PROCESSOR_MOVE_ORDER]
    )


def test_a_tls_connection_ends_with_its_processor(tls_rig, certificates):
    rig = tls_rig()
    client = rig.connect_tls(certificates.client_context())
    client.send(frame(b"x"))
    rig.pump(lambda: client.frames() == [b"x"])
    [channel] = rig.processor._channels.values()
    take_over(rig, socket.socket(fileno=os.dup(channel.fd)))
    rig.pump(lambda: client.is_closed)
    assert rig.connections == 0


def test_new_certificates_are_used_as_soon_as_they_are_there(tls_rig, certificates):
    path = certificates.issue("changing", "old.example")
    rig = tls_rig(keystore_location=path)
    context = certificates.client_context()
    context.check_hostname = False

    def name():
        client = rig.connect_tls(context)
        rig.pump(lambda: client.has_handshake)
        return dict(client.sock.getpeercert()["subjectAltName"])["DNS"]

    assert name() == "old.example"
    certificates.issue("changing", "new.example")
    assert name() == "new.example"
    with open(path, "w") as file:
        file.write("half of it")
    assert name() == "new.example"
