"""Pools: start and retire handlers, processors and acceptors.

A resize is not a sequence of steps that a death could interrupt. There are the wanted
sizes and the existing children; ``step`` compares the two and does what can be done at
once:

    too few    start children on the lowest spare ids, a few at a time
    too many   retire those with the highest ids, as long as enough others serve
    replaced   (``restart``) retire it, whatever its id, when a successor serves

So the last of two resizes wins, however far the first has come, and a death in between
only makes it take longer. To retire is to end in order: a handler finishes its batch
and puts its parked requests back, a processor gives its connections to the others, an
acceptor leaves the backlog to its successor. An id is spare when its process has been
reaped and, if it was killed, shared memory has been repaired after its death.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HANDLER_ACTIVE_CONTROL,
    HANDLER_ACTIVE_DATA,
    HANDLER_COUNTERS,
    HANDLER_INCARNATION,
    HANDLER_PID,
    HANDLER_READY,
    HANDLER_STARVED,
    HEADER,
    HEADER_ACTIVE_HANDLERS,
    HEADER_RETIRING,
    MAX_HANDLERS,
    MAX_PROCESSORS,
    PROCESSOR_INCARNATION,
    PROCESSOR_LISTENER,
    PROCESSOR_PID,
    PROCESSOR_READY,
    PROCESSOR_SERVES,
    SLOT_EXTENT,
    SLOT_STATE,
    SLOTS_PER_PROCESSOR,
    STATE_MASK,
    HandlerCounter,
    SlotState,
    handler_row,
    processor_row,
    slot_row,
    slots_in_use,
)
from mpbroker.ipc.tables import row_users
from mpbroker.supervisor.child import (
    Child,
    ChildEvent,
    ChildRecord,
    ChildState,
    Role,
)
from mpbroker.supervisor.connection_moves import (
    forget_orders,
    move_connections,
    owned_connections,
    rebalance,
    rescue_connections,
    stop_accepting,
)
from mpbroker.supervisor.listen_sockets import Listener
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.role_bodies import RoleBodies

_LOG = get_logger(__name__)

# A batch takes milliseconds, a slow disk perhaps seconds. A process that takes longer
# to retire is killed; the repair then puts back the requests that it had.
_RETIRE_S: Final = 30.0
_POLL_S: Final = 0.002
_SLOW_POLL_S: Final = 0.1
_SLOW_AFTER_S: Final = 1.0
# So many processes start at a time: each takes CPU time for which clients wait.
AT_ONCE: Final = max(1, len(os.sched_getaffinity(0)) // 2)


class PoolSizes(NamedTuple):
    """The wanted numbers of handlers and of each listener's processors."""

    handlers: int
    processors: tuple[int, ...]  # of each listener, by its number


class ChildWords(NamedTuple):
    """Where shared memory says a child's process id, and whether it is ready."""

    pid: int
    incarnation: int
    ready: int


def child_words(child: Child) -> ChildWords | None:
    """Return where in shared memory a child's process id and readiness are.

    None: only handlers and processors have such words.
    """
    if child.role is Role.HANDLER:
        row = handler_row(child.number)
        return ChildWords(
            row + HANDLER_PID, row + HANDLER_INCARNATION, row + HANDLER_READY
        )
    if child.role is Role.PROCESSOR:
        row = processor_row(child.number)
        return ChildWords(
            row + PROCESSOR_PID, row + PROCESSOR_INCARNATION, row + PROCESSOR_READY
        )
    return None


class _Pool(NamedTuple):
    """Children with the same role and listener, which can do each other's work."""

    role: Role
    listener: int  # -1: none; handlers have one if it is the control plane's

    def has(self, child: Child) -> bool:
        return child.role is self.role and child.listener == self.listener


class Pools:
    """Starts and retires children until their numbers are as wanted.

    Args:
        children: the children of all roles; a list shared with the supervisor, which
            forks and reaps them.
        spawn: forks a child's process.
        adopted: the running children of the previous program, after an upgrade.
    """

    def __init__(
        self,
        roles: RoleBodies,
        memory: BrokerMemory,
        listeners: Sequence[Listener],
        sizes: PoolSizes,
        children: list[Child],
        spawn: Callable[[Child], None],
        adopted: Sequence[ChildRecord] = (),
    ) -> None:
        self._roles = roles
        self._memory = memory
        self._words = memory.control.words
        self._children = children
        self._spawn = spawn
        self._has_control_plane = memory.control_plane >= 0
        self._pools = [
            _Pool(Role.HANDLER, -1),
            *([_Pool(Role.HANDLER, memory.control_plane)] * self._has_control_plane),
            *(_Pool(Role.PROCESSOR, listener.number) for listener in listeners),
            *(_Pool(Role.ACCEPTOR, listener.number) for listener in listeners),
        ]
        # The processors among which connections were balanced last.
        self._balanced: dict[_Pool, frozenset[int]] = {}
        self._untidy: set[int] = set()  # retired handlers whose region is in use
        self.sizes = sizes
        self.accepts = True  # whether acceptors are wanted
        for pool in self._pools:
            for record in adopted:
                if pool == (Role(record.role), record.listener):
                    child = self._make(pool, record.number)
                    child.adopt(record)
            for _ in range(0 if adopted else self._wanted(pool)):
                self._add(pool)
            if pool.role is Role.PROCESSOR:
                for child in self._members(pool):
                    if _stays(child):
                        row = processor_row(child.number)
                        self._words[row + PROCESSOR_LISTENER] = pool.listener + 1

    # -- what is wanted ----------------------------------------------------------------

    def want(self, sizes: PoolSizes) -> None:
        """Change the wanted numbers of processes; ``step`` starts and retires some."""
        if sizes != self.sizes:
            _LOG.info("resizing: %s", _change(self.sizes, sizes))
            self.sizes = sizes

    def replace(self, role: Role, number: int) -> None:
        """Start a successor for a child; when it is ready, the child retires.

        Raises:
            MpbrokerError: there is no such child.
        """
        of_role = [child for child in self._children if child.role is role]
        for child in of_role:
            if child.number == number and _stays(child):
                child.replaced = True
                return
        there_are = ", ".join(str(child.number) for child in of_role)
        raise MpbrokerError(f"there is no {role.value} {number}; there are {there_are}")

    def _wanted(self, pool: _Pool) -> int:
        if pool.role is Role.ACCEPTOR:
            return int(self.accepts)
        if self._has_control_plane and pool.listener == self._memory.control_plane:
            return 1  # no resize applies to it
        if pool.role is Role.HANDLER:
            return self.sizes.handlers
        return self.sizes.processors[pool.listener]

    @property
    def settled(self) -> bool:
        """Whether each pool has the wanted number of children and all are ready."""
        return all(self._is_settled(pool) for pool in self._pools)

    def _numbers(self, pool: _Pool) -> frozenset[int] | None:
        """Return the ids of the processors in a pool; None: it has other children."""
        if pool.role is not Role.PROCESSOR:
            return None
        return frozenset(child.number for child in self._members(pool))

    def _is_settled(self, pool: _Pool) -> bool:
        members = list(self._members(pool))
        return len(members) == self._wanted(pool) and all(
            child.state is ChildState.READY and not child.replaced for child in members
        )

    def _members(self, pool: _Pool) -> Iterator[Child]:
        return filter(pool.has, self._children)

    # -- the way there -----------------------------------------------------------------

    def step(self) -> bool:
        """Start and retire children towards the wanted numbers, as far as possible now.

        Returns:
            Whether a child was added or removed, or its state has changed.
        """
        before = self._states()
        for pool in self._pools:
            is_new = self._balanced.get(pool) != self._numbers(pool)
            if not self._is_settled(pool) or is_new:
                self._step(pool)
        return self._states() != before

    def _states(self) -> list[tuple[Role, int, ChildState]]:
        return [(child.role, child.number, child.state) for child in self._children]

    def next_step_s(self) -> float | None:
        """Return the seconds until children that start or retire must be looked at.

        None: not before another event.
        """
        now = time.monotonic()
        waits = [
            _POLL_S if now - child.started_at < _SLOW_AFTER_S else _SLOW_POLL_S
            for child in self._children
            if child.state is ChildState.STARTING
        ]
        waits.extend(
            max(0.0, child.killed_at - now)
            for child in self._children
            if child.state is ChildState.DRAINING and child.killed_at > 0
        )
        return min(waits, default=None)

    def _step(self, pool: _Pool) -> None:
        self._kill_late(pool)
        staying = [child for child in self._members(pool) if _stays(child)]
        lasting = sorted(
            (child for child in staying if not child.replaced),
            key=lambda child: child.number,
        )
        wanted = self._wanted(pool)
        has_room = True
        while len(lasting) < wanted and has_room and self._may_start():
            child = self._add(pool)
            if child is None:
                has_room = False
            else:
                lasting.append(child)
                self._spawn(child)
        leaving = [child for child in staying if child.replaced] + lasting[wanted:]
        serving = sum(child.state is ChildState.READY for child in staying)
        for child in leaving:
            # As many children as wanted serve all the time. Only if no id is spare for
            # a successor, one of them retires first.
            if child.state is not ChildState.READY:
                self._retire(child)
            elif serving > wanted or (
                not has_room and all(_stays(other) for other in self._members(pool))
            ):
                serving -= 1
                self._retire(child)
        if pool.role is Role.PROCESSOR:
            self._open_and_move(pool)

    def _may_start(self) -> bool:
        """Whether another child may start now: fewer than AT_ONCE are starting.

        A child that has been starting for more than a second does not count.
        """
        now = time.monotonic()
        starting = sum(
            child.state is ChildState.STARTING
            and now - child.started_at < _SLOW_AFTER_S
            for child in self._children
        )
        return starting < AT_ONCE

    def _open_and_move(self, pool: _Pool) -> None:
        """Have retiring processors give their connections to those that serve.

        New processors get some, too. This is repeated after each change: a processor
        follows only the last order.
        """
        serving = frozenset(
            child.number
            for child in self._members(pool)
            if child.state is ChildState.READY
        )
        for number in serving:
            self._words[processor_row(number) + PROCESSOR_LISTENER] = pool.listener + 1
        for child in self._members(pool):
            if child.state is ChildState.DRAINING and child.targets != serving:
                child.targets = serving
                move_connections(self._memory, child.number, serving)
        if self._is_settled(pool) and serving != self._balanced.get(pool):
            self._balanced[pool] = serving
            moved = rebalance(self._memory, serving)
            if moved:
                _LOG.info("%d connections move to even processors out", moved)

    def _add(self, pool: _Pool) -> Child | None:
        """Return a new child, not forked yet, with the lowest spare id.

        None: all ids are in use.
        """
        if pool.role is Role.ACCEPTOR:  # all have the same id, their listener's
            return self._make(pool, pool.listener)
        used = {child.number for child in self._children if child.role is pool.role}
        limit = MAX_HANDLERS if pool.role is Role.HANDLER else MAX_PROCESSORS
        number = next((each for each in range(limit) if each not in used), None)
        return None if number is None else self._make(pool, number)

    def _make(self, pool: _Pool, number: int) -> Child:
        role, roles = pool.role, self._roles
        if role is Role.HANDLER:
            is_control = pool.listener >= 0
            run = partial(roles.run_handler, number)
            if is_control:
                run = partial(roles.run_handler, number, is_control=True)
            self._untidy.discard(number)
            active = HANDLER_ACTIVE_CONTROL if is_control else HANDLER_ACTIVE_DATA
            self._words[handler_row(number) + HANDLER_ACTIVE] = active
        elif role is Role.PROCESSOR:
            run = partial(roles.run_processor, number, pool.listener)
            self._words[processor_row(number) + PROCESSOR_SERVES] = pool.listener + 1
        else:
            run = partial(roles.run_acceptor, number)
        child = Child(role, number, run, pool.listener)
        words = child_words(child)
        if words is not None:
            # From the row: READY holds the incarnation of the process that stored it,
            # and that of an earlier owner of the id must not be taken for this child's.
            child.incarnation = self._words[words.incarnation]
        self._children.append(child)
        self._count_handlers()
        return child

    def _retire(self, child: Child) -> None:
        if (
            child.role is Role.PROCESSOR
            and child.state is ChildState.BACKOFF
            and owned_connections(self._memory, child.number)
        ):
            return  # first its successor has to give those connections away
        child.happens(ChildEvent.STOP_REQUESTED)
        if child.state is ChildState.ENDED:  # it was dead, and waited for a successor
            if child.role is Role.PROCESSOR:
                stop_accepting(self._memory, child.number)  # it may have been ready
            self.forget(child)
            return
        if child.role is Role.PROCESSOR:
            # Its connections move as they are answered, without a deadline; if it
            # hangs, its lease runs out. ``_open_and_move`` gives the order after this
            # store: no acceptor passes it new connections while it gives its own away.
            stop_accepting(self._memory, child.number)
            return
        child.killed_at = time.monotonic() + _RETIRE_S
        # Each order is one store, and then a bell: it is read when the process wakes.
        if child.role is Role.HANDLER:
            self._words[handler_row(child.number) + HANDLER_ACTIVE] = 0
            self._count_handlers()
            self._memory.handler_bells[child.number].ring()
        else:
            self._words[HEADER + HEADER_RETIRING + child.listener] = child.pid
            self._memory.acceptor_bell.ring()

    def _kill_late(self, pool: _Pool) -> None:
        now = time.monotonic()
        for child in self._members(pool):
            late = child.state is ChildState.DRAINING and now >= child.killed_at > 0
            if late and child.is_alive:
                _LOG.warning(
                    "%s %d (pid %d) did not retire within %d s: killed",
                    child.role.value,
                    child.number,
                    child.pid,
                    _RETIRE_S,
                )
                child.killed_at = 0.0
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def forget(self, child: Child, *, was_killed: bool = False) -> None:
        """Remove a child that has retired, after any repair; its id becomes spare.

        But a processor that was killed while it still had connections gets a successor
        with the same id, which moves them.
        """
        self._children.remove(child)
        if (
            child.role is Role.PROCESSOR
            and was_killed
            and owned_connections(self._memory, child.number)
        ):
            self._go_on_moving(child)
            return
        words = child_words(child)
        if words is not None:
            self._words[words.pid] = self._words[words.ready] = 0
        if child.role is Role.HANDLER:
            row = handler_row(child.number)
            self._words[row + HANDLER_ACTIVE] = 0
            for each in (HandlerCounter.PARKED, HandlerCounter.PARKED_FETCHES):
                self._words[row + HANDLER_COUNTERS + each] = 0
            self._words[row + HANDLER_STARVED] = 0
            row_users.is_gone(self._words, child.number)
            self._count_handlers()
            self._untidy.add(child.number)
        elif child.role is Role.PROCESSOR:
            forget_orders(self._memory, child.number)
            if not was_killed:  # else handlers may still work on what it has received
                self._give_back_processor(child.number)
            others = {
                other.number
                for other in self._children
                if other.role is Role.PROCESSOR and _stays(other)
            }
            # Last: it finds the connections of retired processors by the process id and
            # the listener in their rows, which are 0 only now.
            rescue_connections(self._memory, others)
        _LOG.info("%s %d has retired", child.role.value, child.number)

    def _give_back_processor(self, processor: int) -> None:
        """Free the memory of a retired processor's requests.

        It is a part of the arena: the shared memory for the bytes of requests.
        """
        layout = self._memory.arena_layout
        first = layout.block(processor * SLOTS_PER_PROCESSOR)
        self._memory.arena.give_back(first, layout.processor_region_bytes)

    def tidy(self) -> None:
        """Free the memory of retired handlers' responses, once it is unused.

        It is in the arena, the shared memory for the bytes of requests and responses.

        A part is in use until all responses in it have been sent.
        """
        busy = (SlotState.CLAIMED, SlotState.RESPONDING)
        for handler in list(self._untidy):
            region = self._memory.arena_layout.response_extents(handler)
            rows = (
                slot_row(slot)
                for processor in range(MAX_PROCESSORS)
                for slot in slots_in_use(self._words, processor)
            )
            if not any(
                0 <= self._words[row + SLOT_EXTENT] - region.start < region.size_bytes
                and self._words[row + SLOT_STATE] & STATE_MASK in busy
                for row in rows
            ):
                self._memory.arena.give_back(region.start, region.size_bytes)
                self._untidy.discard(handler)

    def _go_on_moving(self, child: Child) -> None:
        """Make a successor for a processor that was killed while it was retiring.

        The successor gives the remaining connections away, and then retires.
        """
        pool = _Pool(child.role, child.listener)
        successor = self._make(pool, child.number)
        successor.restarts, successor.failures = child.restarts, child.failures
        successor.crashes = child.crashes
        # Not forked here: other processes may have died with it, and their repair comes
        # first.
        successor.restart_at = child.restart_at
        successor.replaced = True

    def _count_handlers(self) -> None:
        """Store in shared memory how many handlers take requests of ordinary clients.

        Handlers of the control plane are not counted.
        """
        active = sum(
            self._words[handler_row(handler) + HANDLER_ACTIVE] == HANDLER_ACTIVE_DATA
            for handler in range(MAX_HANDLERS)
        )
        self._words[HEADER + HEADER_ACTIVE_HANDLERS] = active


def _stays(child: Child) -> bool:
    """Whether a child has not been told to retire."""
    return child.state is not ChildState.DRAINING


def _change(old: PoolSizes, new: PoolSizes) -> str:
    """Return the change of pools' sizes as text: "handlers 2 to 4"."""
    parts = []
    if old.handlers != new.handlers:
        parts.append(f"handlers {old.handlers} to {new.handlers}")
    for listener, (before, after) in enumerate(
        zip(old.processors, new.processors, strict=True)
    ):
        if before != after:
            parts.append(f"processors of listener {listener} {before} to {after}")
    return ", ".join(parts)
