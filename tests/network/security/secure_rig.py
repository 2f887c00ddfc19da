"""A real SecureProcessor in this process, and clients that speak TLS and SASL to it."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any, Final

import trustme

from mpbroker.ipc.counters.authentication_counts import (
    AuthenticationResult,
    read_authentications,
)
from mpbroker.ipc.fdpass import send_fds
from mpbroker.ipc.layout import (
    CONNECTION_PRINCIPAL,
    HEADER,
    HEADER_COUNTERS,
    connection_row,
)
from mpbroker.network.moves.hand_over import pack_adopt
from mpbroker.network.processor import Processor
from mpbroker.network.security.listener_authentication import (
    ListenerSecurity,
    SaslSettings,
)
from mpbroker.network.security.sasl.scram import CredentialOf
from mpbroker.network.security.secure_processor import SecureProcessor
from mpbroker.network.security.tls import TlsSettings
from tests.network import rig
from tests.network.rig import Client, Rig, connected_pair, frame
from tests.network.security.sasl.conversation import authenticate, handshake

USERS: Final = {"alice": "wonder", "bob": "builder"}
GOOD: Final = b"\0alice\0wonder"


class Certificates:
    """An authority, and what it has issued, in files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = trustme.CA()
        self.authority_path = str(directory / "ca.pem")
        self.authority.cert_pem.write_to_path(self.authority_path)
        self.server_path = self.issue("server", "localhost")

    def issue(self, name: str, identity: str, **options: Any) -> str:
        """Return a file with a new key and certificate."""
        issued = self.authority.issue_cert(identity, **options)
        path = self.directory / f"{name}.pem"
        issued.private_key_and_cert_chain_pem.write_to_path(str(path))
        return str(path)

    def settings(self, **options: Any) -> TlsSettings:
        return TlsSettings(**{"keystore_location": self.server_path, **options})

    def client_context(self, certificate: str | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.authority_path)
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context


def security(
    tls: TlsSettings | None = None,
    sasl: SaslSettings | None = None,
    credential_of: CredentialOf = lambda user, mechanism: None,
    **options: Any,
) -> ListenerSecurity:
    protocol = ("SASL_" if sasl else "") + ("SSL" if tls else "PLAINTEXT")
    options = {"failure_delay_ns": 0, **options}
    return ListenerSecurity(
        protocol,
        tls,
        sasl,
        credential_of,
        lambda version, body: (b"apis", True),
        **options,
    )


PLAIN: Final = SaslSettings(("PLAIN",), USERS)


class SecureRig(Rig):
    """A listener's processor, of a security that the test gives."""

    def __init__(self, memory: Any, *, security: ListenerSecurity, **options: Any):
        self.security = security
        super().__init__(memory, **options)

    def start_processor(self) -> None:
        def make(*arguments: Any) -> Processor:
            return SecureProcessor(
                *arguments,
                security=self.security,
                principals=self.memory.principals,
            )

        before, rig.Processor = rig.Processor, make
        try:
            super().start_processor()
        finally:
            rig.Processor = before

    def connect_tls(self, context: ssl.SSLContext) -> TlsClient:
        client, accepted = connected_pair()
        plain = self.connect((client, accepted))
        made = TlsClient(plain.sock, context)
        self.clients[-1] = made
        return made

    def counted(self, result: AuthenticationResult) -> int:
        return read_authentications(self.memory.control.words)[result]

    def principal(self, connection: int = 0) -> str:
        words = self.memory.control.words
        number = words[connection_row(connection) + CONNECTION_PRINCIPAL]
        return self.memory.principals.name(number)

    def log_in(self, client: Client, token: bytes = GOOD) -> None:
        """Choose PLAIN, prove, and expect to be let in."""
        before = len(client.frames())
        client.send(frame(handshake("PLAIN")) + frame(authenticate(token)))
        self.pump(lambda: len(client.frames()) == before + 2)
        del client.frames()[before:]


class TlsClient(Client):
    """One connection's far end, over TLS."""

    def __init__(self, sock: Any, context: ssl.SSLContext) -> None:
        wrapped = context.wrap_socket(
            sock,
            server_hostname="localhost",
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
        )
        super().__init__(wrapped)
        self.has_handshake = False
        self.error: Exception | None = None
        self.was_said_goodbye = False

    def turn(self) -> None:
        if self.sock.fileno() < 0 or self.is_closed:
            return
        wants = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
        try:
            if not self.has_handshake:
                self.sock.do_handshake()
                self.has_handshake = True
            with contextlib.suppress(*wants):
                while self._unsent:
                    del self._unsent[: self.sock.send(self._unsent)]
            while self.reads:
                data = self.sock.recv(1 << 20)
                if not data:
                    self.is_closed = self.was_said_goodbye = True
                    return
                self._received += data
        except wants:
            return
        except OSError as error:
            self.error, self.is_closed = error, True


def take_over(rig: SecureRig, *socks: socket.socket) -> None:
    """Kill the processor; its successor finds these sockets, by row."""
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
