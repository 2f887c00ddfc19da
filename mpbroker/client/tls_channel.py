"""TlsChannel: the bytes of a connection over TLS, and the TLS context for it."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Final, cast

from mpbroker.base.config_def import ConfigError, ConfigValue
from mpbroker.base.pem import Identity, load_identity, load_trust
from mpbroker.client.errors import SslAuthenticationError

_RECEIVE_BYTES: Final = 256 * 1024
_RECORD_BYTES: Final = 16 * 1024  # one read returns at most one TLS record
_TLS_VERSIONS: Final = {
    "TLSv1.2": ssl.TLSVersion.TLSv1_2,
    "TLSv1.3": ssl.TLSVersion.TLSv1_3,
}


class TlsChannel:
    """A `selector.Channel` whose bytes are encrypted by TLS."""

    gathers = False

    def __init__(self, sock: socket.socket, host: str, context: ssl.SSLContext) -> None:
        """Make a channel over a socket that is being connected.

        Args:
            sock: the socket, which is non-blocking.
            host: the name that was dialled; the broker's certificate must be for it.
            context: the certificates to trust, and the client's own certificate.
        """
        self._socket = sock
        self._host = host
        self._context = context
        self._tls: ssl.SSLSocket | None = None
        self._has_received = False
        self.wants_write = True

    def fileno(self) -> int:
        return self._socket.fileno() if self._tls is None else self._tls.fileno()

    def finish_connect(self) -> bool:
        """Go on with connecting and the TLS handshake; return whether both are done.

        Raises:
            SslAuthenticationError: one side does not trust the other's certificate.
            OSError: the connection broke.
        """
        if self._tls is None:
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self._tls = self._context.wrap_socket(
                self._socket,
                do_handshake_on_connect=False,
                server_hostname=self._host,
            )
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self.wants_write = False
            return False
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise OSError(
                None, "closed during the TLS handshake; is it a TLS listener?"
            ) from None
        except ssl.SSLError as error:
            raise _refusal(error) from error
        return True

    def receive(self) -> bytes | None:
        assert self._tls is not None
        chunks: list[bytes] = []
        size = 0
        try:
            # No poll reports bytes that are decrypted already: read them all.
            while size < _RECEIVE_BYTES or self._tls.pending():
                chunk = self._tls.recv(_RECORD_BYTES)
                if not chunk:
                    return b"".join(chunks)  # the next call sees the end again
                chunks.append(chunk)
                size += len(chunk)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except ssl.SSLError as error:
            if not chunks and not self._has_received:
                # With TLS 1.3 a broker refuses our certificate after the handshake.
                raise _refusal(error) from error
            raise
        if not chunks:
            return None
        self._has_received = True
        return b"".join(chunks)

    def send(self, data: memoryview) -> int:
        assert self._tls is not None
        try:
            return self._tls.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def send_parts(self, parts: Sequence[memoryview]) -> int:
        # Send one part: each part would become a TLS record of its own anyway.
        return self.send(parts[0])

    def close(self) -> None:
        (self._socket if self._tls is None else self._tls).close()


def _refusal(error: ssl.SSLError) -> SslAuthenticationError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return SslAuthenticationError(
            f"its certificate is not trusted: {error.verify_message}; see"
            " ssl.truststore.location and ssl.endpoint.identification.algorithm"
        )
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "wrong version number" in reason or "record layer failure" in reason:
        advice = "it speaks no TLS; see security.protocol"
    elif "certificate" in reason or "handshake failure" in reason:
        advice = "it does not accept our certificate; see ssl.keystore.location"
    else:
        advice = "see the settings that begin with ssl."
    return SslAuthenticationError(f"TLS handshake failed: {reason}; {advice}")


def make_context(values: Mapping[str, ConfigValue]) -> ssl.SSLContext:
    """Return the TLS context that the settings beginning with ``ssl.`` describe.

    Raises:
        ConfigError: a certificate or key cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = values["ssl.endpoint.identification.algorithm"] != ""
    versions = sorted(
        _TLS_VERSIONS[name]
        for name in cast(tuple[str, ...], values["ssl.enabled.protocols"])
    )
    if versions:
        context.minimum_version, context.maximum_version = versions[0], versions[-1]
    ciphers = cast(tuple[str, ...], values["ssl.cipher.suites"])
    if ciphers:
        try:
            context.set_ciphers(":".join(ciphers))
        except ssl.SSLError:
            raise ConfigError(
                f"ssl.cipher.suites={','.join(ciphers)}: OpenSSL knows none of them"
            ) from None
    # As Java: an authority in the middle of a chain is enough, if it is trusted.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    location = values["ssl.truststore.location"]
    certificates = values["ssl.truststore.certificates"]
    if location is not None:
        name = f"ssl.truststore.location={location}"
        path = str(location)
        load_trust(context, name, _read(name, path), is_text=False, path=path)
    elif certificates is not None:
        name = "ssl.truststore.certificates"
        load_trust(context, name, str(certificates), is_text=True)
    else:
        context.load_default_certs()
    _load_identity(context, values)
    return context


def _load_identity(context: ssl.SSLContext, values: Mapping[str, ConfigValue]) -> None:
    location, password = values["ssl.keystore.location"], values["ssl.key.password"]
    key = str(values["ssl.keystore.key"] or "")
    chain = str(values["ssl.keystore.certificate.chain"] or "")
    if location is not None:
        name = f"ssl.keystore.location={location}"
        text = _read(name, str(location))
        identity = Identity(name, text, name, text, is_text=False)
    elif key or chain:
        names = "ssl.keystore.key", "ssl.keystore.certificate.chain"
        identity = Identity(names[0], key, names[1], chain, is_text=True)
    else:
        return
    load_identity(context, identity, None if password is None else str(password))


def _read(name: str, path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="ignore") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from None
