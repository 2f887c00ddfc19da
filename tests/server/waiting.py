"""Parked operations that only count what happens to them."""

from __future__ import annotations

from types import SimpleNamespace

from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.server.purgatory import Purgatory
from mpbroker.supervisor.memory import BrokerMemory


class Waiting:
    """Waits until a row's log ends at an offset."""

    may_end_early = True

    def __init__(
        self, memory, *rows: int, offset: int = 1, deadline_ns: int = 1 << 60, slot=0
    ):
        self._table = memory.table
        self.keys = rows
        self.offset = offset
        self.deadline_ns = deadline_ns
        self.done = False
        self.looked = 0
        self.completed = 0
        self.expired = 0
        self.slot = slot
        self.request = SimpleNamespace(slot=slot)

    def try_complete(self, row: int) -> bool:
        self.looked += 1
        if self._table.row(row).log_end_offset < self.offset:
            return False
        self.completed += 1
        return True

    def expire(self) -> None:
        self.expired += 1


def purgatory(memory: BrokerMemory, handler: int = 0) -> Purgatory:
    return Purgatory(handler, memory.table, memory.notices)


def append(memory: BrokerMemory, row: int, end: int, by: Purgatory) -> None:
    """Grow a row's log and tell who waits, as a handler does after a produce."""
    with memory.table.row(row).locked():
        memory.table.row(row).publish(LogState(log_end_offset=end))
    by.notify_waiters(memory.table.row(row))
