"""Errors of the network layer."""

from mpbroker.base.errors import MpbrokerError


class NetworkError(MpbrokerError):
    """A connection cannot continue."""


class FrameLengthError(NetworkError):
    """A size field that is not valid for a request: close without an answer."""


class SegmentGoneError(NetworkError):
    """A log segment that an answer refers to cannot be opened any more."""
