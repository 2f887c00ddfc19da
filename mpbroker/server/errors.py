"""Errors of the server that are neither an answer nor the peer's fault."""

from mpbroker.base.errors import MpbrokerError


class AuthorizerError(MpbrokerError):
    """An authorizer raised, so it did not decide: the sender is denied.

    It is a bug of the authorizer, and is logged with its traceback.
    """
