"""Faults that ``ctl inject`` turns on in a broker started with --enable-inject.

Each class takes the place of its base class. A broker without --enable-inject uses none
of them, and pays nothing. The process's black box in shared memory says which fault to
simulate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mpbroker.ipc.black_box import Fault, own_box
from mpbroker.ipc.ring import RequestRing
from mpbroker.server.dispatcher import RequestDispatcher
from mpbroker.server.request import Answer, Request
from mpbroker.storage.log.disk_sync import DiskSync, SyncDone


class SlowDispatcher(RequestDispatcher):
    """Delays every request of a handler, as a slow disk would."""

    def dispatch(self, request: Request) -> Answer:
        delay_ns = own_box().fault(Fault.SLOW_NS)
        if delay_ns:
            time.sleep(delay_ns / 1e9)
        return super().dispatch(request)


class FailingSync(DiskSync):
    """Syncs files as usual, and reports the injected error of the disk."""

    def finished(self) -> list[SyncDone]:
        error = own_box().fault(Fault.SYNC_ERRNO)
        done = super().finished()
        return [each._replace(error=error) for each in done] if error else done

    def sync_now(self, fds: Sequence[int]) -> int:
        return super().sync_now(fds) or own_box().fault(Fault.SYNC_ERRNO)

    def sync_side_by_side(self, files: Sequence[Sequence[int]]) -> list[int]:
        failing = own_box().fault(Fault.SYNC_ERRNO)
        return [error or failing for error in super().sync_side_by_side(files)]


class FullRing(RequestRing):
    """A queue of requests that says, while the fault is on, that it has no room."""

    def put(self, slots: Sequence[int]) -> int:
        return 0 if own_box().fault(Fault.FULL_RING) else super().put(slots)
