"""Errors of shared memory: the other process of ours is gone, or lying."""

from mpbroker.base.errors import MpbrokerError


class IpcError(MpbrokerError):
    """A shared structure is unusable; the role that meets it ends."""


class LayoutError(IpcError):
    """A segment has another magic or layout version than this code."""


class DamagedSegmentError(IpcError):
    """A value in shared memory is outside what any writer may store there."""
