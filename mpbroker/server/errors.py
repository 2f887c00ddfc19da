"""Define errors that several packages of the server raise."""

from mpbroker.base.errors import MpbrokerError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError


class AuthorizerError(MpbrokerError):
    """The authorizer raised an exception instead of deciding.

    The request is answered with UNKNOWN_SERVER_ERROR, so its sender gets no access. The
    dispatcher logs the traceback, since this is a bug of the authorizer.
    """


def invalid_request(message: str) -> ApiError:
    """Return the ApiError INVALID_REQUEST; its message is for the client."""
    return ApiError(ErrorCode.INVALID_REQUEST, message)
