"""The root of the errors that mpbroker raises."""


class MpbrokerError(Exception):
    """Base class of all errors that mpbroker raises itself."""
