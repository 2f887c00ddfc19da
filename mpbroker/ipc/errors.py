"""Errors of shared memory: another process of the broker has died or damaged it."""

from mpbroker.base.errors import MpbrokerError


class IpcError(MpbrokerError):
    """A structure in shared memory is unusable; the process that finds this ends."""


class LayoutError(IpcError):
    """A segment has another magic or layout version than this code."""


class DamagedSegmentError(IpcError):
    """A value in shared memory is outside the range that any writer may store."""
