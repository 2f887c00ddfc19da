"""The errors that clients raise, for users to catch."""

from __future__ import annotations

from mpbroker.base.config_def import ConfigError
from mpbroker.base.errors import MpbrokerError
from mpbroker.client.error_words import MEANINGS
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError


class ClientError(MpbrokerError):
    """The base class of the client's own errors."""


class AddressError(ClientError):
    """A bootstrap address is not HOST:PORT."""


class WakeupError(ClientError):
    """Another thread has called `wakeup`, to end a call that waits."""


class BrokerUnavailableError(ClientError):
    """No broker could be reached, or the connection to one was lost."""


class RequestTimeoutError(BrokerUnavailableError):
    """A broker did not answer in time; it may have executed the request."""


class DisconnectedError(BrokerUnavailableError):
    """The connection ended before the response came, or could not be made."""


class AuthenticationError(ClientError):
    """A login or a certificate was refused; the client or the broker must change it."""


class SaslAuthenticationError(AuthenticationError):
    """The login failed: a wrong user, password or token, or no common mechanism."""


class SslAuthenticationError(AuthenticationError):
    """The broker's certificate, or the client's, was refused."""


class UnsupportedVersionError(ClientError):
    """The broker does not know a request in any version that this client knows."""


def error_code_of(number: int) -> ErrorCode:
    """Return the error code of a number; UNKNOWN_SERVER_ERROR for an unknown one."""
    try:
        return ErrorCode(number)
    except ValueError:
        return ErrorCode.UNKNOWN_SERVER_ERROR


def describe_error(number: int, message: str | None) -> str:
    """Return `NAME: message` for the number of an error code.

    Most of Kafka's responses have no message; then it is what the code means.
    """
    code = error_code_of(number)
    if code != number:
        return f"error code {number}: {message or 'this client does not know it'}"
    return f"{code.name}: {message or MEANINGS[code]}"


def check_error(number: int, what: str, message: str | None = None) -> None:
    """Raise ApiError unless a response's error code is 0.

    Args:
        number: the error code.
        what: names the thing that was asked for; the error's text begins with it.
        message: the broker's own words, if the response has any.
    """
    if number != ErrorCode.NONE:
        text = f"{what}: {describe_error(number, message)}"
        raise ApiError(error_code_of(number), text)


__all__ = [
    "AddressError",
    "ApiError",
    "AuthenticationError",
    "BrokerUnavailableError",
    "ClientError",
    "ConfigError",
    "DisconnectedError",
    "ErrorCode",
    "MpbrokerError",
    "ProtocolError",
    "RequestTimeoutError",
    "SaslAuthenticationError",
    "SslAuthenticationError",
    "UnsupportedVersionError",
    "WakeupError",
]
