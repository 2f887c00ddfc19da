"""What can go wrong between a client and its brokers; what users of a client catch."""

from __future__ import annotations

from mpbroker.base.config_def import ConfigError
from mpbroker.base.errors import MpbrokerError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError


class ClientError(MpbrokerError):
    """Base class of the client's own errors."""


class AddressError(ClientError):
    """A bootstrap address that is not host:port."""


class BrokerUnavailableError(ClientError):
    """No broker was reached, or the one reached went away or fell silent."""


class RequestTimeoutError(BrokerUnavailableError):
    """No answer in time; whether the broker acted on the request is unknown."""


class DisconnectedError(BrokerUnavailableError):
    """The connection ended before the answer came, or was never made."""


class AuthenticationError(ClientError):
    """A broker and we do not trust each other: trying again cannot help."""


class SaslAuthenticationError(AuthenticationError):
    """The broker does not believe who we say we are."""


class SslAuthenticationError(AuthenticationError):
    """A certificate, the broker's or ours, was refused."""


class UnsupportedVersionError(ClientError):
    """The broker does not serve an API in any version that this client speaks."""


def error_code_of(number: int) -> ErrorCode:
    """Return the code of a number off the wire; one from the future is unknown."""
    try:
        return ErrorCode(number)
    except ValueError:
        return ErrorCode.UNKNOWN_SERVER_ERROR


def describe_error(number: int, message: str | None) -> str:
    """Return `NAME: message` for an error code off the wire."""
    code = error_code_of(number)
    name = code.name if code == number else f"error code {number}"
    return f"{name}: {message}" if message else name


def check_error(number: int, what: str, message: str | None = None) -> None:
    """Raise ApiError unless an answer's error code is 0.

    Args:
        number: the code.
        what: what was asked for, to begin the error's text with.
        message: the broker's own words, if the answer has any.
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
]
