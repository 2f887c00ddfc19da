"""Make the authentication of one listener's clients from its settings."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mpbroker.base.config_def import ConfigError
from mpbroker.base.logger import get_logger
from mpbroker.ipc.counters.authentication_counts import AuthenticationResult
from mpbroker.ipc.layout import ConnectionSecurity
from mpbroker.metadata.delegation_tokens import TokenLoginOf
from mpbroker.metadata.scram_credentials import ScramMechanism
from mpbroker.network.security.sasl.authenticator import (
    AnswerApiVersions,
    SaslServerAuthenticator,
    Session,
)
from mpbroker.network.security.sasl.mechanism import SaslError, SaslMechanism
from mpbroker.network.security.sasl.oauthbearer import OAuthBearerServer
from mpbroker.network.security.sasl.plain import PlainServer
from mpbroker.network.security.sasl.scram import CredentialOf, ScramServer

if TYPE_CHECKING:
    import socket
    import ssl

    from mpbroker.network.security.sasl.jwt_validator import JwtSettings, JwtValidator
    from mpbroker.network.security.tls import TlsSettings

_LOG = get_logger(__name__)

MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_NONCE_BYTES: Final = 24
_MAX_USERS_BYTES: Final = 1 << 20
_MS: Final = 1_000_000


class SaslSettings(NamedTuple):
    """Holds the settings sasl.* of one listener."""

    mechanisms: tuple[str, ...]
    plain_users: Mapping[str, str] = {}
    plain_users_file: str | None = None
    jwt: JwtSettings | None = None
    max_reauth_ms: Mapping[str, int] = {}  # by mechanism
    max_receive_bytes: int = 524288
    secret: bytes = b""  # see ScramServer


class ListenerSecurity:
    """Makes the TLS socket and the SASL authenticator of each new connection.

    Args:
        protocol: SSL, SASL_PLAINTEXT or SASL_SSL.
        tls: the settings for SSL and SASL_SSL; None without TLS.
        sasl: the settings for SASL_PLAINTEXT and SASL_SSL; None without SASL.
        credential_of: returns a SCRAM user's credential.
        answer_api_versions: answers an ApiVersions request that comes before the
            authentication; see SaslServerAuthenticator.
        failure_delay_ns: connection.failed.authentication.delay.ms, in ns.
        setup_timeout_ns: connections.setup.timeout.ms, in ns.
        token_of: returns the login of a delegation token. None: clients cannot log in
            with delegation tokens.

    Attributes:
        has_sessions: whether connections may have to authenticate again.
    """

    def __init__(
        self,
        protocol: str,
        tls: TlsSettings | None,
        sasl: SaslSettings | None,
        credential_of: CredentialOf,
        answer_api_versions: AnswerApiVersions,
        failure_delay_ns: int = 100 * _MS,
        setup_timeout_ns: int = 30_000 * _MS,
        token_of: TokenLoginOf | None = None,
    ) -> None:
        """Check the settings of TLS and SASL, and load the files that they name.

        Raises:
            ConfigError: a setting cannot be used.
        """
        self.protocol: Final = protocol
        self.failure_delay_ns: Final = failure_delay_ns
        self.setup_timeout_ns: Final = setup_timeout_ns
        self.sasl: Final = sasl
        self._contexts = None
        if tls is not None:
            from mpbroker.network.security.ssl_principal import PrincipalMapper
            from mpbroker.network.security.tls import TlsContexts

            self._contexts = TlsContexts(tls)
            self._mapper = PrincipalMapper(tls.principal_mapping_rules)
        self._credential_of = credential_of
        self._token_of = token_of
        self._answer_api_versions = answer_api_versions
        self._validator: JwtValidator | None = None
        self._mechanisms: dict[str, Callable[[], SaslMechanism]] = {}
        if sasl is not None:
            self._mechanisms = {
                each: self._maker(each, sasl) for each in sasl.mechanisms
            }
        self.has_sessions: Final = sasl is not None and (
            "OAUTHBEARER" in sasl.mechanisms
            or token_of is not None
            or any(sasl.max_reauth_ms.get(each, 0) > 0 for each in sasl.mechanisms)
        )

    def close(self) -> None:
        """Stop fetching keys for tokens, since another object replaces this one.

        Authenticators that this object has made continue to work.
        """
        if self._validator is not None:
            self._validator.close()

    @property
    def has_tls(self) -> bool:
        return self._contexts is not None

    @property
    def has_sasl(self) -> bool:
        return self.sasl is not None

    # -- TLS ---------------------------------------------------------------------------

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """Wrap a connection in TLS; the handshake comes later.

        Raises:
            OSError: the client has closed the connection already.
        """
        assert self._contexts is not None
        return self._contexts.current().wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False
        )

    def user_of_certificate(self, sock: ssl.SSLSocket) -> str:
        """Return the user of a client's certificate.

        Return ANONYMOUS if the client has sent no certificate.

        Raises:
            SaslError: no rule applies to the certificate.
        """
        from mpbroker.network.security.ssl_principal import (
            NoRuleError,
            distinguished_name,
        )

        certificate = sock.getpeercert()
        if not certificate:
            return "ANONYMOUS"
        names = certificate.get("subject", ())
        try:
            return self._mapper.user(distinguished_name(names))  # type: ignore[arg-type]
        except NoRuleError as error:
            raise SaslError(str(error), AuthenticationResult.TLS_CERTIFICATE) from None

    # -- SASL --------------------------------------------------------------------------

    def authenticator(self, previous: Session | None = None) -> SaslServerAuthenticator:
        """Make a SASL authenticator, for a new connection or a re-authentication.

        Args:
            previous: the session that is to be renewed; None for a new connection.
        """
        assert self.sasl is not None
        return SaslServerAuthenticator(
            self._mechanisms,
            self._answer_api_versions,
            self.sasl.max_reauth_ms,
            previous,
        )

    def _maker(self, name: str, sasl: SaslSettings) -> Callable[[], SaslMechanism]:
        if name == "PLAIN":
            if not sasl.plain_users and sasl.plain_users_file is None:
                raise ConfigError(
                    "sasl.enabled.mechanisms has PLAIN, but there are no users: set"
                    " listener.name.<listener>.plain.sasl.jaas.config, or"
                    " sasl.plain.users.file"
                )
            users = PlainUsers(sasl.plain_users, sasl.plain_users_file)
            return lambda: PlainServer(users.password_of)
        if name == "OAUTHBEARER":
            if sasl.jwt is None:
                raise ConfigError(
                    "sasl.enabled.mechanisms has OAUTHBEARER, but there are no keys to"
                    " verify tokens: set sasl.oauthbearer.jwks.endpoint.url"
                )
            try:
                from mpbroker.network.security.sasl.jwt_validator import JwtValidator

                validate = self._validator = JwtValidator(sasl.jwt)
            except ImportError:
                raise ConfigError(
                    "sasl.enabled.mechanisms has OAUTHBEARER, which needs PyJWT and"
                    " cryptography: pip install 'mpbroker-server[oauth]'"
                ) from None
            return lambda: OAuthBearerServer(validate)
        for mechanism in ScramMechanism:
            if mechanism.mechanism_name == name:
                return partial(self._scram, mechanism, sasl.secret)
        raise ConfigError(
            f"sasl.enabled.mechanisms: {name:.40} is not served; served are"
            f" {', '.join(MECHANISMS)}"
        )

    def _scram(self, mechanism: ScramMechanism, secret: bytes) -> ScramServer:
        nonce = secrets.token_urlsafe(_NONCE_BYTES)
        return ScramServer(
            mechanism, self._credential_of, nonce, secret, self._token_of
        )


def security_of_mechanism(name: str) -> ConnectionSecurity:
    return ConnectionSecurity[name.replace("-", "_")]


def mechanism_of_security(security: ConnectionSecurity) -> str:
    if security in (ConnectionSecurity.NONE, ConnectionSecurity.PRIVATE):
        return ""
    return security.name.replace("_", "-")


class PlainUsers:
    """Finds the passwords of PLAIN's users, in a file and in the settings.

    A user who is in both has the password of the file. The file is read again when it
    changes. It has one line ``user:password`` for each user; lines that begin with #
    are comments.
    """

    def __init__(self, users: Mapping[str, str], path: str | None) -> None:
        """Read the file with users and passwords, if ``path`` names one.

        Raises:
            ConfigError: the file cannot be read, or has a line of another form.
        """
        self._users = users
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._of_file: dict[str, str] = {}
        if path is not None:
            self._read(path)

    def password_of(self, user: str) -> str | None:
        if self._path is not None:
            try:
                self._read(self._path)
            except ConfigError as error:
                _LOG.warning("%s; the users before stay", error)
        return self._of_file.get(user) or self._users.get(user)

    def _read(self, path: str) -> None:
        name = f"sasl.plain.users.file={path}"
        try:
            status = os.stat(path)
            seen = status.st_mtime_ns, status.st_size, status.st_ino
            if seen == self._seen:
                return
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{name}: not a file")  # a pipe might block us
            with open(path, encoding="utf-8") as file:
                lines = file.read(_MAX_USERS_BYTES).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name}: {error}") from None
        users = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            user, colon, password = line.partition(":")
            if not (user and colon and password):
                raise ConfigError(f"{name}: line {number} is not user:password")
            users[user] = password
        self._of_file, self._seen = users, seen


def wall_ms() -> int:
    return time.time_ns() // _MS
