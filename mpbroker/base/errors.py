"""The root of everything mpbroker raises on purpose."""


class MpbrokerError(Exception):
    """Base class of all errors that mpbroker raises itself."""
