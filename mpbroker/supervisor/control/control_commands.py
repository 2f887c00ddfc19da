"""ControlCommands: carry out the commands of the control socket.

Commands run in the supervisor's loop, so none of them waits: a command for something
that takes time only begins it. The client then asks for ``figures`` or ``status`` until
it is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.inspect.broker_view import BrokerView, NameOfRow
from mpbroker.inspect.deaths import DeathRecords, describe_events, executed_request
from mpbroker.ipc.layout import MAX_HANDLERS, MAX_PROCESSORS
from mpbroker.ipc.tables.transaction_table import Closed
from mpbroker.supervisor.child import Child, Role

_LOG = get_logger(__name__)

_MAX_CONNECTIONS_AN_ANSWER: Final = 2000
# One failed disk may take a hundred thousand partitions; an answer holds 4 MiB.
_MAX_OFFLINE_NAMED: Final = 1000
_LOOK_EVERY_S: Final = 1.0
_CLOCK_JUMP_S: Final = 0.5
_KEPT_JUMPS: Final = 100
# With more partitions than this look() takes milliseconds, and is made less often.
_MANY_ROWS: Final = 20_000
_LOOK_AT_MANY_S: Final = 10.0
_CLOSED_LONG_S: Final = 5.0
_CLOSED_AGAIN_S: Final = 60.0


class ControlError(MpbrokerError):
    """A command that cannot be carried out; the text gives the reason."""


class Sources(NamedTuple):
    """The objects and functions that supply the answers to commands.

    Attributes:
        view: reads the broker's shared memory.
        children: the supervisor's children.
        identity: the broker's published properties; see broker.py.
        deaths: the records of dead processes.
        rows: returns how many rows of the partition table (in shared memory) are in
            use.
        name_of_row: returns the topic and partition of a row.
        resizing: returns whether processes still start or retire, or will.
        closed: returns for how long all partitions have been closed to clients; None:
            they are open.
        arena: the shared memory that holds the bytes of requests.
        topics_of_page_cache: returns the names of topics with flush.acks.all=false,
            and whether that is the default of topics.
    """

    view: BrokerView
    children: list[Child]
    identity: Mapping[str, Any]
    deaths: DeathRecords
    rows: Callable[[], int]
    name_of_row: NameOfRow
    resizing: Callable[[], bool]
    closed: Callable[[], Closed | None]
    arena: memoryview
    topics_of_page_cache: Callable[[], tuple[list[str], bool]]


class ControlCommands:
    """Carries out the commands of ``ctl`` for one broker.

    Args:
        sources: the objects that supply the answers.
        actions: the functions for the commands that change something, by name.
    """

    def __init__(
        self,
        sources: Sources,
        actions: Mapping[str, Callable[[dict[str, Any]], Any]],
    ) -> None:
        self.deaths = sources.deaths
        self._sources = sources
        self._say_closed_s = _CLOSED_LONG_S
        self._unsynced_since: dict[int, tuple[int, int]] = {}
        self._next_look = 0.0
        self._clock_ahead_s = time.time() - time.monotonic()
        self._clock_jumps: deque[float] = deque(maxlen=_KEPT_JUMPS)
        self._commands: dict[str, Callable[[dict[str, Any]], Any]] = {
            "status": self._status,
            "figures": self._figures,
            "connections": self._connections,
            "blackbox": self._black_box,
            **actions,
        }

    def execute(self, name: str, arguments: dict[str, Any]) -> Any:
        """Carry out a command; return a result that msgpack can encode.

        Raises:
            MpbrokerError: the command cannot be carried out; the text is for the user.
        """
        command = self._commands.get(name)
        if command is None:
            there_are = ", ".join(sorted(self._commands))
            raise ControlError(f"{name!r:.60} is no command; there are {there_are}")
        return command(arguments)

    def look(self) -> None:
        """Note since when each partition has records that are not on disk.

        Also note jumps of the wall clock, and warn while partitions are closed. This is
        called every second; with very many partitions their records are looked at every
        10 s.
        """
        now = time.monotonic()
        self._watch_clock(time.time() - now)
        self._watch_closed()
        if now < self._next_look:
            return
        rows = self._sources.rows()
        self._next_look = now + (
            _LOOK_AT_MANY_S if rows > _MANY_ROWS else _LOOK_EVERY_S * 0.9
        )
        now_ns, before = time.monotonic_ns(), self._unsynced_since
        self._unsynced_since = {
            row: before[row]
            if row in before and before[row][0] == durable
            else (durable, now_ns)
            for row, (durable, _) in self._sources.view.unsynced_rows(rows).items()
        }

    def _watch_closed(self) -> None:
        """Warn while all partitions are closed, at growing intervals up to a minute."""
        closed = self._sources.closed()
        if closed is not None and closed.for_s >= self._say_closed_s:
            self._say_closed_s = closed.for_s + min(closed.for_s, _CLOSED_AGAIN_S)
            _LOG.warning(
                "%s; see above what it has read and met. If it hangs, on a disk for"
                " example, kill it (SIGKILL): after three attempts all partitions are"
                " opened without",
                closed,
            )

    def _watch_clock(self, ahead_s: float) -> None:
        """Note jumps of the wall clock against the monotonic clock."""
        jump = ahead_s - self._clock_ahead_s
        self._clock_ahead_s = ahead_s
        if abs(jump) > _CLOCK_JUMP_S:
            self._clock_jumps.append(round(jump, 3))

    # -- answers -----------------------------------------------------------------------

    def _figures(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return self._sources.view.figures() | {
            "pid": self._sources.identity["pid"],
            "processes": self._processes(),
            "limits": self._sources.identity["limits"],
            "resizing": self._sources.resizing(),
        }

    def _status(self, arguments: dict[str, Any]) -> dict[str, Any]:
        from mpbroker.inspect.cluster_figures import cluster_figures
        from mpbroker.inspect.remote_figures import remote_figures  # no start needs it
        from mpbroker.storage.full_directories import full_directories
        from mpbroker.storage.offline_directories import offline_directories

        rows = self._sources.rows()
        since = {row: at for row, (_, at) in self._unsynced_since.items()}
        in_memory, by_default = self._sources.topics_of_page_cache()
        offline, closed = self._sources.view.offline_rows(rows), self._sources.closed()
        named = map(self._sources.name_of_row, offline[:_MAX_OFFLINE_NAMED])
        shown = {
            k: v for k, v in self._sources.identity.items() if k not in ("deaths",)
        }
        return (
            shown
            | self._figures(arguments)
            | {
                "uptime_s": round(time.time() - self._sources.identity["started"], 3),
                "deaths": self.deaths.total,
                "clock_jumps": list(self._clock_jumps),
                "power_cut": self._sources.view.power_cut(
                    rows, self._sources.name_of_row, since
                ),
                "page_cache": {
                    "by_default": by_default,
                    "topics": in_memory[:_MAX_OFFLINE_NAMED],
                    "number": len(in_memory),
                },
                "offline": [list(name) for name in named if name is not None],
                "offline_partitions": len(offline),
                "offline_log_dirs": offline_directories(
                    self._sources.view.control, self._sources.identity
                ),
                "full": full_directories(
                    self._sources.view.control, self._sources.identity["log_dirs"]
                ),
                "remote": remote_figures(self._sources.identity),
                "cluster": cluster_figures(self._sources.identity),
                "closed": None if closed is None else closed._asdict(),
                "why_closed": "" if closed is None else str(closed),
            }
        )

    def _processes(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [describe_child(child, now) for child in self._sources.children]

    def _connections(self, arguments: dict[str, Any]) -> dict[str, Any]:
        first = integer(arguments, "from", 0, 1 << 31, 0)
        limit = integer(arguments, "limit", 1, _MAX_CONNECTIONS_AN_ANSWER, 1000)
        found, more_from = self._sources.view.connections(first, limit)
        return {"connections": found, "more_from": more_from}

    def _black_box(self, arguments: dict[str, Any]) -> dict[str, Any]:
        living = []
        for child in self._sources.children:
            role, number = child.role.value, child.number
            box = self._sources.view.box(role, number)
            living.append(
                {
                    "role": role,
                    "id": number,
                    "pid": child.pid,
                    "request": (
                        executed_request(
                            self._sources.view.control, self._sources.arena, number
                        )
                        if child.role is Role.HANDLER
                        else None
                    ),
                    "events": describe_events(box),
                }
            )
        return {"deaths": self.deaths.kept(), "living": living}


def describe_child(child: Child, now: float) -> dict[str, Any]:
    """Return the description of a process that ``ctl status`` shows.

    Args:
        now: the time of the monotonic clock, in seconds.
    """
    return {
        "role": child.role.value,
        "id": child.number,
        "pid": child.pid,
        "state": child.state.name,
        "restarts": child.restarts,
        "last_exit": child.last_exit,
        "uptime_s": round(now - child.started_at, 3) if child.is_alive else 0.0,
    }


# -- arguments -------------------------------------------------------------------------


def integer(
    arguments: Mapping[str, Any],
    name: str,
    low: int,
    high: int,
    default: int | None = None,
) -> int:
    """Return a whole number from the arguments of a command.

    Args:
        arguments: the command's arguments.
        name: the argument's name.
        low: the lowest value allowed.
        high: the highest value allowed.
        default: used if the argument is missing; None: it must be there.

    Raises:
        ControlError: the argument is missing, not a number, or out of bounds.
    """
    value = arguments.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ControlError(f"{name}: {value!r:.60} is not a whole number")
    if not low <= value <= high:
        raise ControlError(f"{name}: {value} is not in {low} to {high}")
    return value


def role_and_number(arguments: Mapping[str, Any]) -> tuple[Role, int]:
    """Return the role and the id of a process from the arguments of a command.

    Raises:
        ControlError: there is no such role, or no number.
    """
    try:
        role = Role(arguments.get("role"))
    except ValueError:
        roles = ", ".join(each.value for each in Role)
        raise ControlError(
            f"role: {arguments.get('role')!r:.60} is none; there are {roles}"
        ) from None
    return role, integer(arguments, "id", 0, max(MAX_HANDLERS, MAX_PROCESSORS), 0)
