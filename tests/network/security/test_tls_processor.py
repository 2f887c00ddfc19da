"""Processors of TLS listeners: what they read, send and refuse."""

from __future__ import annotations

import datetime
import os
import socket
import ssl

import pytest

from mpbroker.ipc.counters.authentication_counts import AuthenticationResult as R
from mpbroker.ipc.layout import (
    CONNECTION_ENCRYPTION,
    ConnectionSecurity,
    connection_row,
)
from mpbroker.ipc.response_parts import FilePart
from mpbroker.network.connection_rows import security_of
from mpbroker.network.security.encryption import encryption_names, registered_name
from mpbroker.network.security.listener_authentication import ListenerSecurity
from mpbroker.protocol.api_key import ApiKey
from tests.network.rig import frame
from tests.network.security.sasl.conversation import request
from tests.network.security.secure_rig import PLAIN, Certificates, security, take_over

MS = 1_000_000


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


def test_a_bug_in_a_handshake_ends_its_connection_and_no_other(
    tls_rig, certificates, monkeypatch, caplog
):
    rig = tls_rig()
    other = rig.connect_tls(certificates.client_context())
    rig.pump(lambda: other.has_handshake)
    other.send(frame(b"x"))
    rig.pump(lambda: other.frames() == [b"x"])

    def fail(self, sock):
        raise IndexError("in a name")

    monkeypatch.setattr(ListenerSecurity, "user_of_certificate", fail)
    client = rig.connect_tls(certificates.client_context())
    rig.pump(lambda: client.is_closed)
    assert rig.counted(R.TLS_OTHER) == 1
    assert "a bug in the TLS handshake" in caplog.text
    other.send(frame(b"y"))
    rig.pump(lambda: other.frames() == [b"x", b"y"])


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
    ("sent", "reason"),
    [
        (frame(request(ApiKey.API_VERSIONS, 0)), "does not speak TLS"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
        (b"\0", "does not speak TLS"),
        (b"\x80", "does not speak TLS"),
        (b"PROXY UNKNOWN\r\n", "PROXY protocol"),
        (b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0", "PROXY protocol"),
    ],
)
def test_what_is_no_tls_is_closed_and_counted(tls_rig, caplog, sent, reason):
    caplog.set_level("INFO")
    rig = tls_rig()
    client = rig.connect()
    client.send(sent)
    rig.pump(lambda: client.is_closed)
    assert rig.counted(R.NOT_TLS) == 1
    assert reason in caplog.text


def test_garbage_after_the_first_byte_of_tls_is_closed(tls_rig):
    rig = tls_rig()
    for rest in (os.urandom(200), b"\x03\x01\x00\x02ab", b"\x03\x03\xff\xff"):
        client = rig.connect()
        client.send(b"\x16" + rest)
        rig.turns()
        client.close()
    rig.pump(lambda: not rig.connections)


def test_a_slow_handshake_holds_nobody_up(tls_rig, certificates):
    # Long enough for the other's handshake, however busy the machine is.
    rig = tls_rig(options={"setup_timeout_ns": 3000 * MS})
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
