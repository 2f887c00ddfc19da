"""Define errors of the server that neither a client nor a request has caused."""

from mpbroker.base.errors import MpbrokerError


class AuthorizerError(MpbrokerError):
    """The authorizer raised an exception instead of deciding.

    The request is answered with UNKNOWN_SERVER_ERROR, so its sender gets no access. The
    dispatcher logs the traceback, since this is a bug of the authorizer.
    """
