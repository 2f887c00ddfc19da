"""Compute the load of a broker: rates between two readings, and the bottleneck.

`mpbroker ctl top` and the console use it. A `Look` is one reading of a broker's
figures. ``compare`` uses no clock or broker: it gets two looks and returns a `Page`,
the load between them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import MAX_HANDLERS, MAX_PROCESSORS

_BUSY: Final = 0.85
_FULL: Final = 0.5
_SPARE_CORES: Final = 0.3
_IDLE_RATE: Final = 1.0
_WAITING: Final = ("waits_for_slot", "waits_for_extent")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class Look(NamedTuple):
    """One reading of a broker's figures, at one moment."""

    figures: dict[str, Any]  # from the control socket
    cpu_s: Mapping[int, float]  # CPU time so far, by process id
    idle_s: float  # idle time of all cores of the machine, so far
    clients: Mapping[str, tuple[int, int, int]]  # address: connections, bytes in, out


class ProcessLoad(NamedTuple):
    """The load of a process between two readings; ``cpu`` is a share of one core."""

    role: str
    id: int
    pid: int
    state: str
    cpu: float
    busy: float | None  # share of the time in which it had something to do
    rate: float | None  # requests a second
    note: str


class ApiLoad(NamedTuple):
    """The load that requests of one API have caused between two readings."""

    name: str
    rate: float  # requests a second
    mean_ms: float  # mean time of a handler for one request
    share: float  # share of the handlers' time in requests


class ClientLoad(NamedTuple):
    """The load that clients at one address have caused between two readings."""

    address: str
    connections: int
    in_rate: float  # bytes a second
    out_rate: float


class Page(NamedTuple):
    """The load of a broker between two readings: rates and the bottleneck."""

    seconds: float  # between the readings
    requests: float  # a second
    in_rate: float  # bytes a second
    out_rate: float
    queue: int
    queue_limit: int
    parked: int
    connections: int
    spare_cores: float
    processes: list[ProcessLoad]
    apis: list[ApiLoad]
    clients: list[ClientLoad]
    verdict: str
    advice: str


def compare(before: Look, after: Look) -> Page:
    """Return the load between two readings: rates, bottleneck and advice.

    Gauges, such as the number of connections, are those of the second reading.
    """
    old, new = before.figures, after.figures
    seconds = max(1e-3, (new["at_ns"] - old["at_ns"]) / 1e9)
    processes = _processes(before, after, seconds)
    processors = _growth(old["processors"], new["processors"], "requests")
    page = Page(
        seconds=seconds,
        requests=sum(processors) / seconds,
        in_rate=sum(_growth(old["processors"], new["processors"], "bytes_in"))
        / seconds,
        out_rate=(
            sum(_growth(old["processors"], new["processors"], "bytes_out")) / seconds
        ),
        queue=new["ring_waiting"],
        queue_limit=new["limits"]["queued_max_requests"],
        parked=sum(each["parked"] for each in new["handlers"]),
        connections=sum(each["connections"] for each in new["processors"]),
        spare_cores=max(0.0, (after.idle_s - before.idle_s) / seconds),
        processes=processes,
        apis=_apis(old["handlers"], new["handlers"], seconds),
        clients=_clients(before.clients, after.clients, seconds),
        verdict="",
        advice="",
    )
    starved = any(
        sum(_growth(old["processors"], new["processors"], name)) > 0
        for name in _WAITING
    )
    verdict, advice = diagnose(page, starved=starved)
    return page._replace(verdict=verdict, advice=advice)


def diagnose(page: Page, *, starved: bool = False) -> tuple[str, str]:
    """Return the broker's bottleneck and a suggestion against it, as texts.

    The suggestion is "" if there is none.

    Args:
        page: the load between two readings.
        starved: whether connections waited for memory between the two readings.
    """
    if page.requests < _IDLE_RATE:
        return "none: the broker is idle", ""
    handlers = [each for each in page.processes if each.role == "handler"]
    processors = [each for each in page.processes if each.role == "processor"]
    handling, networking = _mean_busy(handlers), _mean_busy(processors)
    queue_full = page.queue >= page.queue_limit * _FULL
    no_cpu = page.spare_cores < _SPARE_CORES
    if starved:
        return (
            "memory for requests: connections waited for a slot or an extent",
            "raise queued.max.request.bytes, or send smaller requests",
        )
    busy = handling >= _BUSY or networking >= _BUSY or queue_full
    if busy and no_cpu:
        return (
            "the machine's CPU: no core is left",
            "more processes would only take turns; use more cores, or reduce the load",
        )
    if (handling >= _BUSY or queue_full) and handling >= networking:
        more = min(MAX_HANDLERS, len(handlers) + max(1, len(handlers) // 2))
        return (
            f"the handlers: busy {handling:.0%} of the time, {page.queue} requests"
            " wait",
            f"mpbroker ctl resize --handlers {more}",
        )
    if networking >= _BUSY:
        more = min(MAX_PROCESSORS, len(processors) + 1)
        return (
            f"the processors: busy {networking:.0%} of the time",
            f"mpbroker ctl resize --processors {more}",
        )
    # The mean of many idle processors hides one that is busy.
    hottest = max(processors, key=lambda each: each.busy or 0.0, default=None)
    if hottest is not None and (hottest.busy or 0.0) >= _BUSY:
        return (
            f"processor {hottest.id}: busy {hottest.busy:.0%} of the time, the others"
            " are not",
            f"mpbroker ctl restart processor {hottest.id} spreads its connections",
        )
    if page.parked > page.queue and page.parked and handling < _BUSY / 2:
        return (
            f"none of its processes: {page.parked} requests wait for data, or for the"
            " disk",
            "",
        )
    if no_cpu:
        used = sum(each.cpu for each in page.processes)
        return (
            f"the machine's CPU: no core is idle; the broker uses {used:.1f} of them",
            "look for other programs that use the machine",
        )
    return "none of its processes: clients send no more requests", ""


def _mean_busy(processes: list[ProcessLoad]) -> float:
    shares = [each.busy for each in processes if each.busy is not None]
    return sum(shares) / len(shares) if shares else 0.0


def _growth(
    old: list[dict[str, Any]], new: list[dict[str, Any]], name: str
) -> list[int]:
    """Return by how much a counter has grown in each process between two readings.

    A process that is not in ``old`` began at 0.

    Args:
        old: the processes' counters at the first reading.
        new: those at the second.
        name: the counter's name.
    """
    before = {each["id"]: each[name] for each in old}
    return [max(0, each[name] - before.get(each["id"], 0)) for each in new]


def _processes(before: Look, after: Look, seconds: float) -> list[ProcessLoad]:
    old = _rows(before.figures)
    new = _rows(after.figures)
    loads = []
    for child in after.figures["processes"]:
        key, pid = (child["role"], child["id"]), child["pid"]
        row, was = new.get(key), old.get(key)
        cpu = after.cpu_s.get(pid, 0.0) - before.cpu_s.get(
            pid, after.cpu_s.get(pid, 0.0)
        )
        busy = rate = None
        if row is not None and was is not None and row["pid"] == was["pid"]:
            idle_s = (row["idle_ns"] - was["idle_ns"]) / 1e9
            # A wait is counted when it ends, so the idle time may be too short, and CPU
            # time shows the work better. The rest is waiting for a disk, lock or core.
            busy = min(1.0, max(cpu / seconds, 1 - idle_s / seconds))
            if idle_s == 0:
                busy = min(1.0, cpu / seconds)
            rate = max(0.0, (row["requests"] - was["requests"]) / seconds)
        loads.append(
            ProcessLoad(
                *key,
                pid,
                child["state"],
                max(0.0, cpu / seconds),
                busy,
                rate,
                _note(row, child),
            )
        )
    return sorted(loads, key=lambda each: (-round(each.cpu, 2), each.role, each.id))


def _rows(figures: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    rows = {("processor", each["id"]): each for each in figures["processors"]}
    for each in figures["handlers"]:
        # There is one coordinator, which has number 0, and another row.
        number = each["id"] if each["role"] == "handler" else 0
        rows[each["role"], number] = each
    return rows


def _note(row: dict[str, Any] | None, child: dict[str, Any]) -> str:
    if child["state"] != "READY":
        return str(child["last_exit"])
    if row is None:
        return ""
    if "connections" in row:
        return (
            f"{row['connections']} connections, {row['response_queue']} answers queued"
        )
    return f"{row['parked']} parked" if row["parked"] else ""


def _apis(
    old: list[dict[str, Any]], new: list[dict[str, Any]], seconds: float
) -> list[ApiLoad]:
    counts: dict[str, list[int]] = {}
    before = {each["id"]: each["apis"] for each in old}
    for handler in new:
        was = before.get(handler["id"], {})
        for name, (count, spent) in handler["apis"].items():
            old_count, old_spent = was.get(name, (0, 0))
            total = counts.setdefault(name, [0, 0])
            total[0] += max(0, count - old_count)
            total[1] += max(0, spent - old_spent)
    spent_in_all = sum(spent for _, spent in counts.values()) or 1
    loads = [
        ApiLoad(name, count / seconds, spent / count / 1e6, spent / spent_in_all)
        for name, (count, spent) in counts.items()
        if count
    ]
    return sorted(loads, key=lambda each: -each.share)


def _clients(
    old: Mapping[str, tuple[int, int, int]],
    new: Mapping[str, tuple[int, int, int]],
    seconds: float,
) -> list[ClientLoad]:
    loads = []
    for address, (connections, bytes_in, bytes_out) in new.items():
        _, in_before, out_before = old.get(address, (0, bytes_in, bytes_out))
        loads.append(
            ClientLoad(
                address,
                connections,
                max(0, bytes_in - in_before) / seconds,
                max(0, bytes_out - out_before) / seconds,
            )
        )
    return sorted(loads, key=lambda each: (-each.in_rate - each.out_rate, each.address))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds; 0 if there is no such process.

    Source: proc_pid_stat(5), fields 14 and 15.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def idle_seconds() -> float:
    """Return the idle time of all cores together since the boot, in seconds."""
    # Fields: user nice system idle iowait; a core that waits for a disk is idle.
    with open("/proc/stat", "rb") as file:
        fields = file.readline().split()
    return (int(fields[4]) + int(fields[5])) / _TICKS_PER_S
