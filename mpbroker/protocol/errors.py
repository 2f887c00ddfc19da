"""Errors of the wire: what a peer sent, and what we refuse.

The class says who must act. `ProtocolError` is the peer's fault and ends its
connection; `ApiError` was understood and refused, and becomes an error code in the
answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpbroker.base.errors import MpbrokerError

if TYPE_CHECKING:
    from mpbroker.protocol.error_code import ErrorCode


class ProtocolError(MpbrokerError):
    """Bytes that are not the protocol: close that connection, log one line.

    Also raised when a message of ours cannot be put on the wire in the asked version;
    then the caller chose the wrong version or value.
    """


class FrameLengthError(ProtocolError):
    """A frame's length is negative or above the limit.

    The stream cannot be resynchronised: close the connection without answering.
    """


class ApiError(MpbrokerError):
    """A request that was understood and refused.

    The dispatcher turns it into its error code; the message is for the log, and for
    answers that have an error message field.
    """

    def __init__(self, error_code: ErrorCode, message: str = "") -> None:
        super().__init__(message or error_code.name)
        self.error_code = error_code
        self.message = message

    def __reduce__(self) -> tuple[type[ApiError], tuple[ErrorCode, str]]:
        return type(self), (self.error_code, self.message)
