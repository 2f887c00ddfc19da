"""What an authorizer of somebody else's raises, by one name."""

from mpbroker.base.errors import MpbrokerError


class AuthorizerError(MpbrokerError):
    """An authorizer did not decide: nobody gets in, and its bug is logged."""
