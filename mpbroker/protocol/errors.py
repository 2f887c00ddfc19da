"""ProtocolError and ApiError: the errors of requests and responses.

A `ProtocolError` is about malformed bytes: the connection is closed. An `ApiError` is
about a request that was understood and refused: the response has its error code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpbroker.base.errors import MpbrokerError

if TYPE_CHECKING:
    from mpbroker.protocol.error_code import ErrorCode


class ProtocolError(MpbrokerError):
    """The bytes are not Kafka's protocol: close the connection and log one line.

    It is also raised when a message cannot be encoded, because the caller has chosen a
    version that lacks a field, or a value that does not fit.
    """


class TooManyElementsError(ProtocolError):
    """A request has more elements than its API allows here, but not than in Kafka.

    Kafka would execute it, so the connection stays, and the answer has INVALID_REQUEST.

    Args:
        reason: a text for people.
        partial: the request, as far as it was decoded.
    """

    def __init__(self, reason: str, partial: object = None) -> None:
        super().__init__(reason)
        self.partial = partial


class FrameLengthError(ProtocolError):
    """A frame's length is negative or above the limit.

    The stream cannot be resynchronised: close the connection without answering.
    """


class ApiError(MpbrokerError):
    """A request was understood and refused.

    The dispatcher answers with the error code. The message is for the log, and for
    responses that have a field for it.

    Args:
        error_code: the code for the response.
        message: a text for people; by default the name of the code.
    """

    def __init__(self, error_code: ErrorCode, message: str = "") -> None:
        super().__init__(message or error_code.name)
        self.error_code = error_code
        self.message = message

    def __reduce__(self) -> tuple[type[ApiError], tuple[ErrorCode, str]]:
        return type(self), (self.error_code, self.message)
