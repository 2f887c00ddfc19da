"""Make TLS contexts from PEM, and explain why a handshake has failed.

Only processors of SSL and SASL_SSL listeners, and code that checks their settings, may
import this module, because it loads OpenSSL.

Source: Kafka's DefaultSslEngineFactory and KIP-651 for the settings; OpenSSL's
ssl_err.c for the reasons.
"""

from __future__ import annotations

import os
import ssl
import stat
from typing import Final, NamedTuple

from mpbroker.base.config_def import ConfigError
from mpbroker.base.logger import get_logger
from mpbroker.base.pem import Identity, in_words, load_identity, load_trust
from mpbroker.ipc.counters.authentication_counts import AuthenticationResult as R

_LOG = get_logger(__name__)

_VERSIONS: Final = {
    "TLSv1.2": ssl.TLSVersion.TLSv1_2,
    "TLSv1.3": ssl.TLSVersion.TLSv1_3,
}
_TLS_1_3_SUITES: Final = (
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_AES_128_GCM_SHA256",
)
_CLIENT_AUTH: Final = {
    "none": ssl.CERT_NONE,
    "requested": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
_PEM: Final = b"-----BEGIN "
_MAX_PEM_BYTES: Final = 1 << 20


class TlsSettings(NamedTuple):
    """Holds the settings ssl.* of one listener. Keys and certificates are in PEM.

    ``*_location`` is the path of a file; the other settings of key and certificates are
    texts.
    """

    keystore_location: str | None = None
    keystore_certificate_chain: str | None = None
    keystore_key: str | None = None
    key_password: str | None = None
    truststore_location: str | None = None
    truststore_certificates: str | None = None
    client_auth: str = "none"
    enabled_protocols: tuple[str, ...] = ("TLSv1.2", "TLSv1.3")
    cipher_suites: tuple[str, ...] = ()
    principal_mapping_rules: str = "DEFAULT"
    prefix: str = ""  # listener.name.x.
    own: frozenset[str] = frozenset()  # the keys that are set with this prefix
    where: str = ""  # stands in front of messages

    def named(self, key: str) -> str:
        """Return a key as it was set, for messages: for the listener, or for all."""
        return f"{self.where}{self.prefix if key in self.own else ''}{key}"


_Seen = tuple[tuple[int, int, int] | None, ...]


class TlsContexts:
    """Makes the TLS context for new connections, and a new one when its files change.

    The files have the broker's key and certificates, and the trusted certificates.
    Existing connections keep the context they began with.
    """

    def __init__(self, settings: TlsSettings) -> None:
        """Build the first TLS context.

        Raises:
            ConfigError: a setting cannot be used. The text says which, and what to do.
        """
        self._settings = settings
        self._seen = self._look()
        self._context = make_context(settings)

    def current(self) -> ssl.SSLContext:
        """Return the TLS context for a new connection, after a look at the PEM files.

        If a file has changed, make a new context first. If that fails, log a warning
        and return the old context. The look costs a stat() call for each of the two
        files.
        """
        seen = self._look()
        if seen != self._seen:
            # A half written file is read again when it has changed once more.
            self._seen = seen
            try:
                self._context = make_context(self._settings)
            except ConfigError as error:
                _LOG.warning("%s; the files that were read before stay in use", error)
            else:
                _LOG.info("%sssl: certificates were read again", self._settings.prefix)
        return self._context

    def _look(self) -> _Seen:
        settings = self._settings
        found: list[tuple[int, int, int] | None] = []
        for path in (settings.keystore_location, settings.truststore_location):
            if path is None:
                continue
            try:
                status = os.stat(path)
            except OSError:
                found.append(None)
            else:
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)


def make_context(settings: TlsSettings) -> ssl.SSLContext:
    """Build the TLS context of a server from a listener's settings.

    Raises:
        ConfigError: a setting cannot be used. The text says which, and what to do.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # With renegotiation a client could request handshakes without end, and a read might
    # have to write.
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Each ticket costs a record in every handshake, but Kafka clients resume no
    # session.
    context.num_tickets = 0
    _set_versions(context, settings)
    _load_key(context, settings)
    _load_trust(context, settings)
    return context


def _set_versions(context: ssl.SSLContext, settings: TlsSettings) -> None:
    versions_name = settings.named("ssl.enabled.protocols")
    suites_name = settings.named("ssl.cipher.suites")
    unknown = [each for each in settings.enabled_protocols if each not in _VERSIONS]
    if unknown or not settings.enabled_protocols:
        raise ConfigError(
            f"{versions_name}={','.join(settings.enabled_protocols)}:"
            f" served are {', '.join(_VERSIONS)}; older versions are not safe any more"
        )
    versions = {_VERSIONS[each] for each in settings.enabled_protocols}
    suites = settings.cipher_suites
    new = [each for each in suites if each in _TLS_1_3_SUITES]
    old = [_openssl_name(each) for each in suites if each not in _TLS_1_3_SUITES]
    if suites and not old:
        versions.discard(ssl.TLSVersion.TLSv1_2)
    if suites and not new:
        versions.discard(ssl.TLSVersion.TLSv1_3)
    if not versions:
        raise ConfigError(
            f"{suites_name}={','.join(suites)}: none of them is of a"
            f" version of ssl.enabled.protocols={','.join(settings.enabled_protocols)}"
        )
    context.minimum_version, context.maximum_version = min(versions), max(versions)
    if old:
        try:
            context.set_ciphers(":".join(old))
        except ssl.SSLError:
            known = {cipher["name"] for cipher in context.get_ciphers()}
            strangers = [each for each in old if each not in known]
            raise ConfigError(
                f"{suites_name}: OpenSSL knows none of {', '.join(strangers or old)}"
            ) from None
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE


def _openssl_name(name: str) -> str:
    """Return OpenSSL's name of a cipher suite, from the name in IANA's registry.

    TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 is ECDHE-RSA-AES128-GCM-SHA256. A name that is
    OpenSSL's already is returned as it is.
    """
    if not name.startswith("TLS_") or "_WITH_" not in name:
        return name  # it is one of OpenSSL's already
    exchange, _, cipher = name.removeprefix("TLS_").partition("_WITH_")
    cipher = cipher.replace("AES_128", "AES128").replace("AES_256", "AES256")
    cipher = cipher.replace("_CBC_", "_").replace("POLY1305_SHA256", "POLY1305")
    parts = [] if exchange == "RSA" else [exchange]
    return "_".join([*parts, cipher]).replace("_", "-")


def _load_key(context: ssl.SSLContext, settings: TlsSettings) -> None:
    key, chain = settings.keystore_key or "", settings.keystore_certificate_chain or ""
    key_name = settings.named("ssl.keystore.key")
    chain_name = settings.named("ssl.keystore.certificate.chain")
    is_text = settings.keystore_location is None
    if settings.keystore_location is not None:
        key_name = settings.named("ssl.keystore.location")
        key_name = chain_name = f"{key_name}={settings.keystore_location}"
        key = chain = _read_pem(settings.keystore_location, key_name)
    elif not key and not chain:
        raise ConfigError(
            f"{settings.named('ssl.keystore.location')}: a listener with TLS needs a"
            " file in PEM with its private key and certificates, or ssl.keystore.key"
            " and ssl.keystore.certificate.chain"
        )
    identity = Identity(key_name, key, chain_name, chain, is_text)
    load_identity(context, identity, settings.key_password)


def _load_trust(context: ssl.SSLContext, settings: TlsSettings) -> None:
    if settings.client_auth not in _CLIENT_AUTH:
        raise ConfigError(
            f"{settings.named('ssl.client.auth')}={settings.client_auth}: it must be"
            f" one of {', '.join(_CLIENT_AUTH)}"
        )
    context.verify_mode = _CLIENT_AUTH[settings.client_auth]
    if settings.client_auth == "none":
        return
    # As Java: an authority in the middle of a chain is enough, if it is trusted.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    is_text = settings.truststore_location is None
    if settings.truststore_location is not None:
        name = settings.named("ssl.truststore.location")
        name = f"{name}={settings.truststore_location}"
        text = _read_pem(settings.truststore_location, name)
    elif settings.truststore_certificates:
        name = settings.named("ssl.truststore.certificates")
        text = settings.truststore_certificates
    else:
        raise ConfigError(
            f"{settings.named('ssl.client.auth')}={settings.client_auth}: clients'"
            " certificates are judged by ssl.truststore.location or"
            " ssl.truststore.certificates; set one"
        )
    load_trust(context, name, text, is_text=is_text)


def _read_pem(path: str, name: str) -> str:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"{name}: not a file")  # a pipe might block us
        with open(path, "rb") as file:
            data = file.read(_MAX_PEM_BYTES)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None
    if _PEM not in data:
        raise ConfigError(
            f"{name}: no PEM; convert a PKCS12 store with: openssl pkcs12 -in FILE"
            " -nodes -out FILE.pem, and a JKS one first with: keytool -importkeystore"
            " -srckeystore FILE -destkeystore FILE.p12 -deststoretype PKCS12"
        )
    return data.decode("ascii", "ignore")


# -- handshakes that failed ------------------------------------------------------------

_RESULTS: Final = {
    "HTTP_REQUEST": R.NOT_TLS,
    "HTTPS_PROXY_REQUEST": R.NOT_TLS,
    "WRONG_VERSION_NUMBER": R.TLS_VERSION,
    "UNSUPPORTED_PROTOCOL": R.TLS_VERSION,
    "VERSION_TOO_LOW": R.TLS_VERSION,
    "NO_PROTOCOLS_AVAILABLE": R.TLS_VERSION,
    "UNKNOWN_PROTOCOL": R.TLS_VERSION,
    "NO_SHARED_CIPHER": R.TLS_CIPHER,
    "NO_SUITABLE_SIGNATURE_ALGORITHM": R.TLS_CIPHER,
    "NO_SUITABLE_KEY_SHARE": R.TLS_CIPHER,
    "NO_SHARED_GROUP": R.TLS_CIPHER,
    "NO_SUITABLE_GROUPS": R.TLS_CIPHER,
    "CERTIFICATE_VERIFY_FAILED": R.TLS_CERTIFICATE,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": R.TLS_CERTIFICATE,
    "UNEXPECTED_EOF_WHILE_READING": R.GONE,
}


def judge_failure(error: OSError) -> tuple[R, str]:
    """Return which counter a failed TLS handshake adds to, and why it failed.

    The reason is a text for the log.
    """
    if not isinstance(error, ssl.SSLError):
        return R.GONE, error.strerror or str(error)
    if isinstance(error, ssl.SSLEOFError):
        return R.GONE, "the client closed the connection"
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return R.TLS_CERTIFICATE, f"client certificate: {error.verify_message}"
    if "ALERT" in reason:
        return R.TLS_REFUSED_BY_CLIENT, f"the client said: {in_words(reason)}"
    return _RESULTS.get(reason, R.TLS_OTHER), in_words(reason) or str(error)
