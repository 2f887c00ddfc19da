"""Define errors that several modules of the server raise or answer with."""

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


def voter_refusal(
    asked: str | None, cluster_id: str, change: str
) -> tuple[ErrorCode, str]:
    """Return the error code and the message that refuse to change the voters.

    Args:
        asked: the cluster id of the request; None: the request names none.
        cluster_id: this cluster's id.
        change: what the request wants, for example "adding voter".
    """
    if asked is not None and asked != cluster_id:
        return (
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f"The cluster id of the request is {asked}, and this cluster's is"
            f" {cluster_id}",
        )
    return (
        ErrorCode.UNSUPPORTED_VERSION,
        f"Cluster doesn't support {change} because the kraft.version feature is 0:"
        " mpbroker is a single node, which keeps the metadata log alone",
    )
