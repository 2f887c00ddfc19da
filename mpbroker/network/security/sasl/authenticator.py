"""SaslServerAuthenticator: answer Kafka's requests for SASL, in their order.

Each state expects other requests:

    INITIAL        ApiVersions or SaslHandshake; nothing else is served yet
    HANDSHAKE      SaslHandshake; the client has asked for the APIs
    TOKENS         SaslAuthenticate (handshake 1), or bare tokens (handshake 0)
    COMPLETE       the client has authenticated
    FAILED         the connection closes after the last answer

Requests come in without their size field, and answers go out with it.

Source: Kafka protocol guide, "SASL Authentication Sequence"; KIP-43, KIP-152, KIP-368;
Kafka's SaslServerAuthenticator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from mpbroker.base.logger import get_logger
from mpbroker.ipc.counters.authentication_counts import AuthenticationResult
from mpbroker.network.security.sasl.mechanism import (
    NotYetError,
    SaslError,
    SaslMechanism,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.framing import encode_frame
from mpbroker.protocol.headers import (
    RequestHeader,
    encode_response_header,
    parse_request_header,
)
from mpbroker.protocol.messages.sasl_authenticate import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
)
from mpbroker.protocol.messages.sasl_handshake import (
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

_LOG = get_logger(__name__)

# Answers an ApiVersions request: takes its version and body; returns the body of the
# answer, and whether it lists the APIs (False: the version is not supported).
AnswerApiVersions = Callable[[int, memoryview], tuple[bytes, bool]]

_NO_LIMITS: Final[Mapping[str, int]] = {}
_HANDSHAKE_VERSIONS: Final = (0, 1)
_AUTHENTICATE_VERSIONS: Final = (0, 2)


class AuthenticatorState(Enum):
    """Names the states of an authentication, which the module describes."""

    INITIAL = auto()
    HANDSHAKE = auto()
    TOKENS = auto()
    COMPLETE = auto()
    FAILED = auto()


S = AuthenticatorState


class Session(NamedTuple):
    """Holds the result of a successful authentication: who, how, and for how long."""

    user: str
    mechanism: str
    ends_ms: int  # wall clock; 0: never
    by_token: bool = False


class SaslServerAuthenticator:
    """Authenticates one connection by SASL, at its beginning or again later.

    Args:
        mechanisms: makes an object of each offered mechanism, by name, in order.
        answer_api_versions: answers an ApiVersions request.
        max_reauth_ms: connections.max.reauth.ms, by mechanism. If a mechanism has none
            or 0, a session ends only when the credential expires.
        previous: the session before, if this is a re-authentication.

    Attributes:
        state: which request is expected next, see the module.
        session: the result, once the state is COMPLETE.
        error: the reason, once the state is FAILED.
    """

    def __init__(
        self,
        mechanisms: Mapping[str, Callable[[], SaslMechanism]],
        answer_api_versions: AnswerApiVersions,
        max_reauth_ms: Mapping[str, int] = _NO_LIMITS,
        previous: Session | None = None,
    ) -> None:
        self._mechanisms = mechanisms
        self._answer_api_versions = answer_api_versions
        self._max_reauth_ms = max_reauth_ms
        self._previous = previous
        self._mechanism: SaslMechanism | None = None
        self._name = ""
        self._is_framed = True
        self.state = S.INITIAL if previous is None else S.HANDSHAKE
        self.session: Session | None = None
        self.error: SaslError | None = None

    def handle(self, frame: memoryview, now_ms: int) -> bytes:
        """Take the client's next frame; return the bytes to send, which may be none.

        All exceptions of a mechanism except NotYetError are caught. So a client's bytes
        may fail its own connection, but never end the process that serves all others.

        Args:
            frame: without its size field.
            now_ms: wall clock.

        Raises:
            NotYetError: nothing has happened; give the same frame again later.
        """
        try:
            if self.state is S.TOKENS and not self._is_framed:
                return self._bare_token(bytes(frame), now_ms)
            header = parse_request_header(frame)
            body = frame[header.size :]
            if self.state is S.TOKENS:
                return self._authenticate(header, body, now_ms)
            return self._handshake(header, body)
        except ProtocolError as error:
            return self._refuse(f"not a request: {error}")
        except NotYetError:
            raise
        except Exception:  # noqa: BLE001 - a library's, or a bug of ours
            _LOG.exception(
                "a bug in SASL mechanism %s: its client is not authenticated",
                self._name or "(none yet)",
            )
            self._fail(
                SaslError(
                    "Authentication failed: the broker met an unexpected error",
                    AuthenticationResult.UNAVAILABLE,
                    "an unexpected error, logged with its traceback",
                )
            )
            return b""

    # -- before the tokens -------------------------------------------------------------

    def _handshake(self, header: RequestHeader, body: memoryview) -> bytes:
        if header.api_key == ApiKey.API_VERSIONS and self.state is S.INITIAL:
            answer, is_known = self._answer_api_versions(header.api_version, body)
            if is_known:
                self.state = S.HANDSHAKE
            return _framed(header, answer)
        if header.api_key != ApiKey.SASL_HANDSHAKE or self.state not in (
            S.INITIAL,
            S.HANDSHAKE,
        ):
            return self._refuse(
                f"Unexpected Kafka request of type {_api_name(header.api_key)} during"
                f" SASL handshake ({self.state.name})"
            )
        if not _is_in(header.api_version, _HANDSHAKE_VERSIONS):
            return self._refuse(f"SaslHandshake version {header.api_version}")
        request = SaslHandshakeRequest.decode(header.api_version, body)
        code = self._choose(request.mechanism)
        self._is_framed = header.api_version > 0
        response = SaslHandshakeResponse(
            error_code=code, mechanisms=list(self._mechanisms)
        )
        return _framed(header, response.encode(header.api_version))

    def _choose(self, name: str) -> ErrorCode:
        make = self._mechanisms.get(name)
        if make is None:
            self._fail(
                SaslError(
                    f"Client SASL mechanism '{name:.40}' not enabled in the server,"
                    f" enabled mechanisms are {list(self._mechanisms)}",
                    AuthenticationResult.MECHANISM,
                )
            )
            return ErrorCode.UNSUPPORTED_SASL_MECHANISM
        if self._previous is not None and name != self._previous.mechanism:
            self._fail(
                SaslError(
                    f"SASL mechanism '{name}' requested by client is not supported for"
                    f" re-authentication of mechanism '{self._previous.mechanism}'",
                    AuthenticationResult.MECHANISM,
                )
            )
            return ErrorCode.UNSUPPORTED_SASL_MECHANISM
        self._name, self._mechanism = name, make()
        self.state = S.TOKENS
        return ErrorCode.NONE

    # -- the tokens --------------------------------------------------------------------

    def _authenticate(
        self, header: RequestHeader, body: memoryview, now_ms: int
    ) -> bytes:
        version = header.api_version
        if header.api_key != ApiKey.SASL_AUTHENTICATE or not _is_in(
            version, _AUTHENTICATE_VERSIONS
        ):
            return self._refuse(
                f"Unexpected Kafka request of type {_api_name(header.api_key)}, version"
                f" {version}, during SASL authentication"
            )
        request = SaslAuthenticateRequest.decode(version, body)
        try:
            token, lifetime_ms = self._evaluate(bytes(request.auth_bytes), now_ms)
        except SaslError as error:
            self._fail(error)
            answer = SaslAuthenticateResponse(
                error_code=ErrorCode.SASL_AUTHENTICATION_FAILED,
                error_message=str(error),
            )
        else:
            answer = SaslAuthenticateResponse(
                auth_bytes=token, session_lifetime_ms=lifetime_ms
            )
        return _framed(header, answer.encode(version))

    def _bare_token(self, token: bytes, now_ms: int) -> bytes:
        try:
            answer, _ = self._evaluate(token, now_ms)
        except SaslError as error:
            self._fail(error)
            return b""  # bare tokens have no errors: the connection just ends
        return encode_frame([answer])

    def _evaluate(self, token: bytes, now_ms: int) -> tuple[bytes, int]:
        """Give a client's token to the SASL mechanism; after the last note the session.

        Returns:
            The token to answer with, and the session's length in ms. The length is 0 if
            there is no session yet, or if the session does not end.

        Raises:
            SaslError: the token is not valid, or the client is another user than
                before.
            NotYetError: the token cannot be judged yet.
        """
        mechanism = self._mechanism
        assert mechanism is not None
        answer = mechanism.evaluate(token)
        if not mechanism.is_complete:
            return answer, 0
        previous = self._previous
        if previous is not None and mechanism.user != previous.user:
            raise SaslError(
                "Cannot change principals during re-authentication from"
                f" User:{previous.user} to User:{mechanism.user}"
            )
        limits = []
        limit_ms = self._max_reauth_ms.get(self._name, 0)
        if limit_ms > 0:
            limits.append(limit_ms)
        if mechanism.expires_ms is not None:
            limits.append(max(0, mechanism.expires_ms - now_ms))
        lifetime_ms = min(limits, default=0)
        ends_ms = now_ms + lifetime_ms if limits else 0
        self.session = Session(mechanism.user, self._name, ends_ms, mechanism.by_token)
        self.state = S.COMPLETE
        return answer, lifetime_ms

    # -- its end -----------------------------------------------------------------------

    def _refuse(self, message: str) -> bytes:
        """Fail because of a request that is malformed or out of order.

        Return no bytes to send.
        """
        self._fail(SaslError(message, AuthenticationResult.NOT_SASL))
        return b""

    def _fail(self, error: SaslError) -> None:
        claimed = self._mechanism.claimed if self._mechanism is not None else ""
        if claimed:
            # As Python writes it: a client may send line ends, or a name without end.
            error.detail = f"{claimed!r:.100} by {self._name}: {error.detail}"
        self.error = error
        self.state = S.FAILED


def _framed(header: RequestHeader, body: bytes) -> bytes:
    head = encode_response_header(
        header.api_key, header.api_version, header.correlation_id
    )
    return encode_frame([head, body])


def _is_in(version: int, versions: Sequence[int]) -> bool:
    return versions[0] <= version <= versions[1]


def _api_name(key: int) -> str:
    try:
        return ApiKey(key).name
    except ValueError:
        return str(key)
