"""Define the errors of the network layer."""

from mpbroker.base.errors import MpbrokerError


class NetworkError(MpbrokerError):
    """A connection cannot continue."""


class FrameLengthError(NetworkError):
    """The size field of a frame cannot be that of a request.

    The connection is closed without an answer.
    """


class SegmentGoneError(NetworkError):
    """A log segment that an answer refers to cannot be opened any more."""
