"""Supervisor: spawn, reap, repair, restart with backoff, drain, stop.

It owns the listen sockets, the segments of shared memory and the children, and serves
no client. The order of a stop is Kafka's: acceptors and processors first (requests in
flight are answered), then handlers, then the logs.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.ipc.black_box import BlackBox, EventKind, box_number, open_own_box
from mpbroker.ipc.layout import (
    COORDINATOR,
    HOUSEKEEPER,
    METRICS_DEATHS,
    METRICS_STARTS,
    Phase,
)
from mpbroker.ipc.tables import row_users
from mpbroker.supervisor.child import (
    KEEPER_FILLS_S,
    Child,
    ChildEvent,
    ChildRecord,
    ChildState,
    Role,
    count_of_role,
)
from mpbroker.supervisor.listen_sockets import Listener, Origin
from mpbroker.supervisor.loop import TICK_S, Loop, fork
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.pool_settings import PoolSettings
from mpbroker.supervisor.pools import Pools, child_words
from mpbroker.supervisor.repair.recovery import Death, Repair
from mpbroker.supervisor.role_bodies import RoleBodies
from mpbroker.supervisor.signals import SignalSocket

if TYPE_CHECKING:
    from mpbroker.ipc.named_segment import Telemetry
    from mpbroker.supervisor.upgrade.connection_export import KeptSocket
    from mpbroker.supervisor.upgrade.renewal import Renewal
    from mpbroker.supervisor.upgrade.upgrade import Upgrade

_LOG = get_logger(__name__)

_READY_POLL_S: Final = 0.002
_READY_TIMEOUT_S: Final = 60.0
# At a stop, requests in flight may take this long; then their connections are closed.
_DRAIN_S: Final = 10.0
_STOP_S: Final = 20.0
# After _DRAIN_S, requests that handlers still execute have no client left to be
# answered. So a handler that hangs must not hold up the stop: it is killed.
_UNHEARD_S: Final = 2.0
# After this many deaths in a row, each before the process was ready, the broker stops:
# another restart would not help.
_MAX_CRASHES: Final = 10
_FORK_RETRY_S: Final = 1.0
_IN_POOLS: Final = (Role.HANDLER, Role.PROCESSOR, Role.ACCEPTOR)
# Roles that are started with the first response, or after _LATER_S if there is none.
_LATER: Final = (Role.COORDINATOR, Role.HOUSEKEEPER, Role.EXPORTER, Role.CONSOLE)
_LATER_S: Final = 1.0


class Supervisor(Loop):
    """The parent of one broker's processes, which it starts, restarts and stops."""

    def __init__(
        self,
        roles: RoleBodies,
        memory: BrokerMemory,
        listeners: Sequence[Listener],
        settings: PoolSettings,
        partition_rows: Callable[[], int],
        identity: dict[str, Any],
        adopted: Sequence[ChildRecord] = (),
    ) -> None:
        super().__init__()
        self._roles = roles
        self._memory = memory
        self._settings = settings
        self._words = memory.control.words
        self._listeners = listeners
        self._partition_rows = partition_rows
        self._identity = identity
        self.repair = Repair(memory)
        self._signals = SignalSocket()
        self.watch(self._signals.fileno(), select.EPOLLIN, self._signalled)
        # Rung when a dynamic config has changed.
        bell = memory.supervisor_bell.fd
        self.watch(bell, select.EPOLLIN | select.EPOLLET, _look_in_the_next_turn)
        self._stopping = False
        self._ending = False
        self.is_running = False
        self.has_started_all = False
        self.failed = False
        # Called after every end of a child, before shared memory is believed: if that
        # is damaged, it does not return.
        self.check_memory: Callable[[], None] = _nothing_to_do
        # Called with each child that died unasked, before the repair.
        self.on_death: Callable[[Child], None] = _nothing_more
        # Called before every repair, also after a death that was asked for.
        self.before_repair: Callable[[], None] = _nothing_to_do
        self.on_hangup: Callable[[], None] = _ignore_hangup
        self.children: list[Child] = []
        # Clients' sockets by cookie, while a new generation of children is proved.
        self.sockets_kept: dict[int, KeptSocket] = {}
        self._upgrade: Upgrade | None = None
        self._renewal: Renewal | None = None  # after a takeover
        self.make_upgrade: Callable[[], Upgrade] | None = None
        self._telemetry: Telemetry | None = None
        self._pools = Pools(
            roles,
            memory,
            listeners,
            settings.sizes(),
            self.children,
            self._spawn,
            adopted,
        )
        self._add(Role.COORDINATOR, 0, roles.run_coordinator)
        self._add(Role.HOUSEKEEPER, 0, roles.run_housekeeper)
        self._add(Role.KEEPER, 0, roles.run_keeper)
        if roles.has_exporter:
            self._add(Role.EXPORTER, 0, roles.run_exporter)
        else:  # the program before this one may have had one
            row_users.is_gone(self._words, row_users.EXPORTER)
        if roles.has_console:
            self._add(Role.CONSOLE, 0, roles.run_console)
        self._adopt(adopted)
        self.every(TICK_S, self._pools.tidy)
        self.each_turn(self.repair.look_at_held)

    def _add(self, role: Role, number: int, run: Callable[[], None]) -> None:
        self.children.append(Child(role, number, run))

    def _adopt(self, records: Sequence[ChildRecord]) -> None:
        """Take over the child processes of the previous program, after an upgrade."""
        for child in self.children:
            of_child = (child.role.value, child.number, child.listener)
            for record in records:
                if record[:3] == of_child and not child.is_alive and record.pid:
                    child.adopt(record)
            if child.is_alive:
                self._watch_child(child)

    def _watch_child(self, child: Child) -> None:
        self.only_ours.add(child.pidfd)
        self.watch(child.pidfd, select.EPOLLIN, lambda _: self._reap(child))

    # -- start -----------------------------------------------------------------------

    def fork_pools(self) -> None:
        """Fork the processes that serve clients' requests; do not wait for them.

        They are the acceptors, processors and handlers.
        """
        for child in self.children:
            if child.role in _IN_POOLS and not child.is_alive:
                self._spawn(child)

    def close_ours(self) -> None:
        """Close, in a forked child, what only the supervisor may have open."""
        super().close_ours()
        if self._telemetry is not None:
            # The first children were forked before it existed, so they do not have it;
            # the later ones are not to have it either.
            self._telemetry.unmap()

    def start(self) -> bool:
        """Fork the other children; return whether all of them serve within a minute.

        The coordinator, housekeeper, exporter and console (_LATER) are forked later, so
        that the first response does not wait for their imports. Until then requests of
        consumer groups wait in the coordinator's queue.
        """
        from mpbroker.ipc.named_segment import Telemetry, remove_leftovers

        remove_leftovers()
        self._telemetry = Telemetry()
        # The keeper first: the processors of a new generation wait for its sockets.
        for child in sorted(self.children, key=lambda c: c.role is not Role.KEEPER):
            if child.is_alive:
                continue
            if child.role in _LATER:
                child.restart_at = time.monotonic() + _LATER_S
            else:
                self._spawn(child)
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not self._all_ready():
            self._turn(_READY_POLL_S)
            if time.monotonic() > deadline:
                _LOG.critical(
                    "not all processes serve after %d s; the broker stops",
                    _READY_TIMEOUT_S,
                )
                self.failed = True
            if self.failed or self._stopping:
                return False
        self._memory.phase = Phase.SERVING
        self._publish()
        return True

    def start_rest(self) -> None:
        """Fork the coordinator, housekeeper, exporter and console, if they do not run.

        ``start`` leaves them for later.
        """
        for child in self.children:
            if child.role in _LATER and child.incarnation == 0 and not child.is_alive:
                self._spawn(child)
        self.has_started_all = True
        self._publish()

    def _spawn(self, child: Child) -> None:
        row = child_words(child)
        child.incarnation += 1
        user = _row_user(child)
        if user is not None:
            row_users.begins(self._words, user)
        if row is not None:
            self._words[row.incarnation] = child.incarnation
        try:
            pid = fork(partial(self._run, child))
        except OSError as error:
            _LOG.error(
                "%s %d cannot be started: fork: %s; tried again in %d s",
                child.role.value,
                child.number,
                error.strerror,
                _FORK_RETRY_S,
            )
            child.restart_at = time.monotonic() + _FORK_RETRY_S
            return
        child.started(pid)
        count_of_role(self._words, METRICS_STARTS, child.role)
        self._watch_child(child)
        if row is not None:
            self._words[row.pid] = pid
        else:
            child.happens(ChildEvent.REPORTED_READY)  # no request waits for its start

    def _run(self, child: Child) -> None:
        """Run a child's role; called in the child's own process, after the fork."""
        self.close_ours()
        box = box_number(child.role.value, child.number)
        open_own_box(self._memory.boxes, box).note(EventKind.SPAWNED, os.getpid())
        child.run()

    def _box(self, child: Child) -> BlackBox:
        """Return the black box (the log of events in shared memory) of a dead child.

        The supervisor may write to it: its only other writer has ended.
        """
        number = box_number(child.role.value, child.number)
        return BlackBox(self._memory.boxes.words, number)

    def _all_ready(self) -> bool:
        changed = False
        for child in self.children:
            row = child_words(child)
            if (
                child.state is ChildState.STARTING
                and row is not None
                and self._words[row.ready] == child.incarnation
            ):
                child.happens(ChildEvent.REPORTED_READY)
                changed = True
        if changed:
            self._publish()
        serving = (ChildState.READY, ChildState.DRAINING)
        return all(
            child.state in serving
            for child in self.children
            if child.role not in _LATER or child.incarnation or child.is_alive
        )

    # -- the loop ----------------------------------------------------------------------

    def run(self) -> None:
        """Supervise the children until a stop is requested or the broker fails."""
        self.is_running = True
        while not self._stopping and not self.failed:
            self._all_ready()
            self._pools.want(self._settings.sizes())
            if self._pools.step():
                self._publish()
            self._turn(min(self.run_turns(), self._until_due()))

    def _until_due(self) -> float:
        """Return the seconds until a child is to be restarted, or a resize goes on."""
        now = time.monotonic()
        waits = [
            max(0.0, child.restart_at - now)
            for child in self.children
            if child.state is ChildState.BACKOFF
        ]
        step = self._pools.next_step_s()
        if step is not None:
            waits.append(step)
        return min(waits, default=TICK_S)

    def _turn(self, timeout_s: float) -> None:
        self.dispatch(timeout_s)
        # A death meanwhile is repaired first: processes wait for the locks that the
        # dead one held, and clients for the requests that it had.
        while (child := self._next_due()) is not None:
            self._spawn(child)
            self._publish()  # a child without a row is ready at once
            self.dispatch(0.0)

    def _next_due(self) -> Child | None:
        now = time.monotonic()
        for child in self.children:
            if child.state is ChildState.BACKOFF and child.restart_at <= now:
                return child
        return None

    def _signalled(self, _: int) -> None:
        for number in self._signals.take():
            if number in (signal.SIGTERM, signal.SIGINT):
                self.request_stop(signal.Signals(number).name)
            elif number == signal.SIGHUP:
                self.on_hangup()

    def _reap(self, child: Child) -> None:
        pidfd = child.pidfd
        _, status = os.waitpid(child.pid, 0)
        box = self._box(child)
        box.note(EventKind.DIED, status)
        # Before exited() closes it: its number may be another descriptor's at once.
        self.unwatch(pidfd)
        self.only_ours.discard(pidfd)
        child.exited(status)
        if child.state is ChildState.ENDED and self._ending:
            return
        was_dismissed = child.dismissed
        has_died = not was_dismissed and (
            status != 0 or child.state is not ChildState.ENDED
        )
        if has_died:
            _LOG.warning(
                "%s %d (pid %d) died: %s",
                child.role.value,
                child.number,
                child.pid,
                child.last_exit,
            )
            count_of_role(self._words, METRICS_DEATHS, child.role)
        # Also after an end that was asked for: the process may have damaged the memory
        # before, and the repair believes what it reads.
        self.check_memory()
        if was_dismissed:
            child.dismissed = False
            child.failures = child.crashes = 0
        elif has_died:
            # Before the repair, which gives the slots away that are the evidence.
            self.on_death(child)
        # A stopped process may hold a lock that the repair waits for: it is killed now.
        self.before_repair()
        death = Death.OVERRAN if child.overran else Death.of(status)
        child.overran = False
        rows = self._partition_rows()
        if child.role is Role.HANDLER:
            self.repair.after_handler(child.number, rows, death)
        elif child.role is Role.COORDINATOR:
            self.repair.after_coordinator(rows, death, was_dismissed=was_dismissed)
        elif child.role is Role.HOUSEKEEPER:
            self.repair.after_housekeeper(rows)
        elif child.role is Role.PROCESSOR:
            self.repair.after_processor(child.number)
        box.note(EventKind.REPAIRED)
        # The id is spare, and a successor forked, only now that nothing in memory is
        # the dead process's any more.
        if child.state is ChildState.ENDED:
            self._pools.forget(child, was_killed=status != 0)
        elif child.state is ChildState.FAILED or child.crashes >= _MAX_CRASHES:
            _LOG.critical(
                "%s %d cannot be kept running; the broker stops",
                child.role.value,
                child.number,
            )
            self.failed = True
        elif child.restart_at <= time.monotonic():
            return  # forked and published when all other deaths have been repaired
        self._publish()

    # -- resize ------------------------------------------------------------------------

    def resize(
        self, handlers: int | None = None, processors: int | None = None
    ) -> None:
        """Change the number of handlers, and of processors of each listener.

        None leaves a number as it is. The call returns at once; ``resizing`` says
        whether the change is still under way. It is the same as setting num.io.threads
        and num.network.threads of this broker with IncrementalAlterConfigs: the sizes
        stay until they are changed there, even if the broker restarts with other
        settings.

        Raises:
            MpbrokerError: a size is not possible, or the broker is stopping; nothing is
                changed.
        """
        if self._stopping or self._ending:
            raise MpbrokerError("the broker is stopping: nothing is resized any more")
        self._settings.ask(handlers, processors)
        self._write_configs()

    def _write_configs(self) -> None:
        """Write the sizes set by ``ctl resize`` to the metadata log."""
        texts = self._settings.to_write()
        if texts:
            self.fork_aside(
                partial(self._roles.write_broker_configs, texts), self._configs_written
            )

    def _configs_written(self, status: int) -> None:
        self._settings.written(has_worked=status == 0)
        self._write_configs()

    @property
    def resizing(self) -> bool:
        """Whether processes still start or retire, or will soon, to reach a size."""
        return (
            not self._pools.settled
            or self._settings.sizes() != self._pools.sizes
            or any(child.dismissed for child in self.children)
        )

    def restart(self, role: Role, number: int) -> None:
        """Replace a process by a successor, which serves before the process retires.

        The successor of a handler or a processor gets another id. The acceptor of a
        listener always has the listener's id.

        Raises:
            MpbrokerError: there is no such process, or its role cannot be restarted.
        """
        if role not in (Role.HANDLER, Role.PROCESSOR, Role.ACCEPTOR):
            raise MpbrokerError(
                f"a {role.value} cannot be restarted: there is no other that could"
                " serve in its place; a handler, processor or acceptor can"
            )
        self._pools.replace(role, number)

    def renew(self, child: Child) -> None:
        """Kill a process; its successor has the same id and resumes the work."""
        if not child.is_alive:
            return
        child.dismissed = True
        if child.role is Role.KEEPER:
            from mpbroker.supervisor.upgrade.keeper_sockets import leave_with_successor

            leave_with_successor(self._memory, child.pidfd)
        else:
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    # -- upgrade -----------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Whether all children serve, and no work of the supervisor's own is under way.

        Such work is a repair of shared memory after a death, or a process that does
        something for the supervisor aside.

        The keeper, which has a duplicate of every client's socket, must also have lived
        long enough to have received all (KEEPER_FILLS_S).
        """
        if any(
            child.role is Role.KEEPER and child.age_s < KEEPER_FILLS_S
            for child in self.children
        ):
            return False
        return (
            self._pools.settled
            and not self.asides
            and self.repair.is_at_rest
            and all(child.state is ChildState.READY for child in self.children)
        )

    def upgrade(self, command: Sequence[str] | None = None) -> None:
        """Begin to replace the whole broker by another version; return at once.

        Args:
            command: the command line that starts the other version; None: the one that
                started this version.

        Raises:
            MpbrokerError: the upgrade cannot begin. If it fails later, ``ctl status``
                shows the reason.
        """
        if self.make_upgrade is None or self._stopping or self._ending:
            raise MpbrokerError("the broker is starting or stopping; try again later")
        if self._renewal is not None and not self._renewal.is_done:
            raise MpbrokerError("an upgrade is under way; wait for its end")
        if self._upgrade is None:
            self._upgrade = self.make_upgrade()
            self.each_turn(self._upgrade.turn)
        self._upgrade.begin(command)

    def say_of_upgrade(self, text: str) -> None:
        """Publish how far an upgrade is, or how the last one ended."""
        self._identity |= {"upgrade": text, "upgrade_at": time.time()}
        self._publish()

    def renew_all(self, done: Callable[[str], None], *, are_ours: bool) -> None:
        """Replace all children after a takeover.

        Args:
            done: called at the end, with the reason if it failed, else with "".
            are_ours: this program has forked the children itself (a new generation), so
                none is replaced; only the proof that they serve is made.
        """
        from mpbroker.network.connection_rows import is_held, live_rows
        from mpbroker.supervisor.upgrade.renewal import Renewal

        self._renewal = renewal = Renewal(
            self,
            self.children,
            self._listeners,
            self.renew,
            done,
            are_ours=are_ours,
            keeper_owes=lambda: (
                not all(is_held(self._words, row) for row in live_rows(self._words))
            ),
        )
        self.each_turn(renewal.turn)

    def request_stop(self, reason: str) -> None:
        """Stop the broker in order, as SIGTERM does, in the loop's next turn.

        Args:
            reason: the reason that is logged; "": nothing is logged.
        """
        if reason and not self._stopping:
            _LOG.info("stopping: %s", reason)
        self._stopping = True

    # -- stop --------------------------------------------------------------------------

    def is_accepting(self) -> bool:
        """Whether the broker accepts connections, also while an acceptor restarts."""
        return self._pools.accepts

    def stop_accepting(self) -> None:
        """Refuse new connections from now on; existing connections stay open."""
        self._pools.accepts = False
        if self._upgrade is not None:  # the next program would accept again
            self._upgrade.give_up("the broker drains")
        for child in list(self.children):
            if child.role is Role.ACCEPTOR and child.state is not ChildState.DRAINING:
                child.happens(ChildEvent.STOP_REQUESTED)
                if child.is_alive:
                    child.dismissed = True
                    signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for listener in self._listeners:
            # Not close(): every child has the socket, so it would go on listening, and
            # its backlog would fill up. A systemd socket unit's socket goes on
            # listening: its clients wait for the next broker.
            if listener.origin is not Origin.PASSED:
                listener.sock.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End all children in order, and close the supervisor's descriptors.

        Acceptors and processors end first, when the requests in flight have been
        answered; then all others. Children that take too long are killed.
        """
        self._ending = True
        self.repair.hold_no_more()
        for listener in self._listeners:
            listener.sock.close()
        limits = dict.fromkeys(Role, _STOP_S)
        if not self._end(
            Phase.DRAINING, dict.fromkeys((Role.ACCEPTOR, Role.PROCESSOR), _DRAIN_S)
        ):
            limits[Role.HANDLER] = _UNHEARD_S
        self._end(Phase.STOPPED, limits)
        self.kill_asides()
        if self._upgrade is not None:
            self._upgrade.close()
        if self._telemetry is not None:
            self._telemetry.close()
        self._signals.close()

    def _end(self, phase: Phase, limits_s: Mapping[Role, float]) -> bool:
        """Publish a phase of the broker; wait until the children of some roles end.

        Args:
            limits_s: the roles to wait for, and the seconds after which a child of the
                role is killed.

        Returns:
            Whether all children ended without being killed.
        """
        ending = [child for child in self.children if child.role in limits_s]
        for child in ending:
            if child.state is not ChildState.DRAINING:
                child.happens(ChildEvent.STOP_REQUESTED)
        self._memory.phase = phase
        self._memory.wake_everybody()
        began = time.monotonic()
        deadlines = {role: began + limit for role, limit in limits_s.items()}
        all_ended = True
        while alive := [child for child in ending if child.is_alive]:
            now = time.monotonic()
            if late := [child for child in alive if deadlines[child.role] <= now]:
                all_ended = False
                self._kill(late)
                for child in late:
                    deadlines[child.role] = now + limits_s[child.role]
            left = min(deadlines[child.role] for child in alive) - now
            self._turn(max(0.0, min(left, TICK_S)))
        return all_ended

    def _kill(self, children: list[Child]) -> None:
        for child in children:
            _LOG.warning(
                "%s %d (pid %d) did not end in time: killed",
                child.role.value,
                child.number,
                child.pid,
            )
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def _publish(self) -> None:
        if self._telemetry is None:
            return
        self._telemetry.publish(
            self._identity
            | {
                "children": [
                    {
                        "role": child.role.value,
                        "id": child.number,
                        "pid": child.pid,
                        "state": child.state.name,
                        "restarts": child.restarts,
                        "last_exit": child.last_exit,
                    }
                    for child in self.children
                ]
            }
        )


def _nothing_more(child: Child) -> None:
    """Do nothing after a death, which has been logged: the default of a callback."""


def _nothing_to_do() -> None:
    """No part of the supervisor wants to know of an end before the repair."""


def _look_in_the_next_turn(_: int) -> None:
    """Do nothing when dynamic configs change: the next turn reads them anyway."""


def _ignore_hangup() -> None:
    """Do nothing at SIGHUP: the loss of a terminal does not end the broker."""


def _row_user(child: Child) -> int | None:
    """Return a child's number as a user of partition rows (see row_users.py).

    None: processes of its role use no rows of the partition table.
    """
    if child.role is Role.HANDLER:
        return child.number
    return {
        Role.COORDINATOR: COORDINATOR,
        Role.HOUSEKEEPER: HOUSEKEEPER,
        Role.EXPORTER: row_users.EXPORTER,
    }.get(child.role)
