"""Errors of the network layer."""

from mpbroker.base.errors import MpbrokerError


class NetworkError(MpbrokerError):
    """A connection cannot go on."""


class FrameLengthError(NetworkError):
    """A size field that no request can have: close without answering."""


class SegmentGoneError(NetworkError):
    """A log segment that an answer names cannot be opened any more."""
