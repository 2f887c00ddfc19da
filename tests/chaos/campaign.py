"""Stages of chaos over one broker after another, and what each must not cost."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mpbroker.ipc.named_segment import remove_leftovers
from mpbroker.protocol.error_code import ErrorCode
from tests.bench import wire
from tests.chaos.census import (
    CLEANER,
    census,
    differences,
    excess_files,
    settled_census,
)
from tests.chaos.clients import STUCK_S, Fleet
from tests.chaos.company import MAX_SILENCE_S, SESSION_MS, Company, Told
from tests.chaos.events import (
    Event,
    Generations,
    Kills,
    Nothing,
    OwnDeaths,
    Resizes,
    SupervisorKills,
    Upgrades,
    curtail,
    median_ms,
)
from tests.chaos.peek import Peek
from tests.chaos.stalls import Stalls, crowd
from tests.chaos.witness import Witness
from tests.support.broker import Broker
from tests.support.patience import LONGEST_S
from tests.support.ports import reusable_port

PARTITIONS: Final = 4
HANDLERS: Final = 4
PROCESSORS: Final = 2  # of each listener, of which there are two
_ROUND_S: Final = (
    45.0  # after so long a stage turns to a new topic and verifies the old
)
_WARM_UP_S: Final = 1.0
_PEACE_S: Final = 3
_OPEN_LOOK_S: Final = 0.02


@dataclass(frozen=True)
class Promises:
    """What clients may notice of a stage; None: anything."""

    disconnects: int | None = 0
    errors: int | None = 0
    pause_ms: float | None = None


@dataclass
class Result:
    """What a stage did and cost."""

    stage: str
    promises: Promises
    events: int = 0
    wanted: int = 0  # more than there were: the time was over
    seconds: float = 0.0
    answers: int = 0
    records: int = 0
    transactions: int = 0
    delivered: int = 0  # records of transactions, to groups
    silence_s: float = 0.0  # the longest in which a group was given nothing
    errors: int = 0
    wrong: int = 0
    disconnects: int = 0
    refused: int = 0
    stuck: int = 0
    worst_pause_ms: float = 0.0
    worst_what: str = ""
    # The longest one, each without the time in which the machine, or we, stood still.
    worst_net_ms: float = 0.0
    story: str = ""  # what became of that one
    peace_ms: float = 0.0  # the same while nobody is killed, just before and after
    peace_story: str = ""
    own_stall_ms: float = 0.0
    respawn_ms: float = 0.0
    slowest_respawn_ms: float = 0.0
    complaints: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        """The promises that were not kept."""
        promises = self.promises
        found = []
        if self.wrong:
            found.append(f"{self.wrong} wrong answers")
        if self.stuck:
            found.append(f"{self.stuck} clients stuck")
        if promises.errors is not None and self.errors > promises.errors:
            found.append(f"{self.errors} errors; promised {promises.errors}")
        if promises.disconnects is not None and self.disconnects > promises.disconnects:
            found.append(
                f"{self.disconnects} disconnects; promised {promises.disconnects}"
            )
        pause_ms = self.worst_net_ms
        if promises.pause_ms is not None and pause_ms > promises.pause_ms:
            found.append(
                f"a pause of {pause_ms:.0f} ms net; promised {promises.pause_ms:.0f}"
            )
        return found

    @property
    def stories(self) -> list[str]:
        """What became of the longest pauses, where they were long."""
        told = {"longest pause": self.story, "in peace": self.peace_story}
        return [f"{when}: {story}" for when, story in told.items() if story]

    @property
    def ok(self) -> bool:
        return not self.broken and not self.complaints


class Campaign:
    """One broker, its clients, and stages one after another.

    Args:
        folder: where the broker's data goes.
        connections: how many clients.
        seed: of all that is random.
        config: the broker's, on top of what the campaign wants.
        command: what to run instead of mpbroker.
        stuck_s: who waits longer for an answer waits for ever.
        stalls: who sees when the machine stands still, if pauses are looked at.
        compares: look at pauses in peace, too, before and after each stage.

    Attributes:
        time_s: how long the next stage may go on to new events; None: to the last.
    """

    def __init__(
        self,
        folder: Path,
        connections: int = 64,
        seed: int = 1,
        config: dict[str, object] | None = None,
        command: list[str] | None = None,
        stuck_s: float = STUCK_S,
        acks_1_share: float = 0.3,
        stalls: Stalls | None = None,
        *,
        compares: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.broker = Broker(
            folder / "data",
            {
                # So that a restarted broker is found where it was.
                "listeners": ",".join(
                    f"{name}://127.0.0.1:{reusable_port()}" for name in "AB"
                ),
                "listener.security.protocol.map": "A:PLAINTEXT,B:PLAINTEXT",
                "inter.broker.listener.name": "A",
                "num.network.threads": PROCESSORS,
                "num.io.threads": HANDLERS,
                # Memory for large requests runs out at once if any of it is lost.
                "socket.request.max.bytes": 1 << 20,
                "queued.max.request.bytes": 16 << 20,
                **(config or {}),
            },
            command=command,
        )
        self.broker.start()
        self.witness = Witness(lambda: self.broker.pid)
        self._start_cleaner()
        self._fresh = settled_census(self.broker)
        self.fleet = Fleet(
            [_split(address) for address in self.broker.listeners.values()],
            connections,
            seed,
            stuck_s,
            acks_1_share,
            stalls,
            witness=self.witness,
        )
        self._topics = 0
        self._suffix = ""
        self._compares = compares
        self._company: Company | None = None
        self._companies = 0
        self._crowd = 1.0  # the most there was since groups were looked at last
        self.time_s: float | None = None
        self.results: list[Result] = []

    # -- stages --------------------------------------------------------------------

    def kills(self, role: str, count: int, promises: Promises) -> Result:
        """Kill processes of one role."""
        event = Kills(self.broker, role, count, self.rng, self.witness.note)
        return self.stage(event.name, [event], promises)

    def pace(self, rate: float) -> None:
        """Have the clients of the stages to come ask so often a second, all together.

        A pause is then what the broker made of it, and not what stood in a queue: see
        pacing.py. 0: as fast as they are answered.
        """
        self.fleet.set_pace(rate)
        self._suffix = f" at {rate:.0f}/s" if rate else ""

    def peace(self, seconds: int) -> Result:
        """Kill nobody, to know what the machine itself costs."""
        return self.stage("nobody is killed (seconds)", [Nothing(seconds)], Promises())

    def supervisor_kills(self, count: int) -> Result:
        """Kill the supervisor; what was acknowledged stays, all else may be lost."""
        fleet = self.fleet
        event = SupervisorKills(
            self.broker, count, self.rng, fleet.was_away, lambda: fleet.answers
        )
        fleet.may_be_closed = True
        try:
            return self.stage(event.name, [event], Promises(disconnects=None))
        finally:
            fleet.may_be_closed = False

    def resizes(self, count: int, promises: Promises) -> Result:
        """Give it other numbers of handlers and processors, and back."""
        event = Resizes(self.broker, count, self.rng, self.witness.note)
        result = self.stage(event.name, [event], promises)
        # Whatever was broken: the stages after it, and the census, know these sizes.
        event.back_to(HANDLERS, PROCESSORS)
        return result

    def upgrades(self, count: int, promises: Promises) -> Result:
        """Replace the whole broker in place."""
        event = Upgrades(self.broker, count)
        result = self.stage(event.name, [event], promises)
        result.complaints += event.failed
        return result

    def generations(self, count: int, promises: Promises) -> Result:
        """Replace it by programs with other layouts of shared memory."""
        event = Generations(self.broker, count)
        result = self.stage(event.name, [event], promises)
        result.complaints += event.failed
        return result

    def own_deaths(self, name: str, count: int, promises: Promises, go: Path) -> Result:
        """Let the processes kill themselves, from now on."""
        go.touch()
        return self.stage(name, [OwnDeaths(self.broker, count)], promises)

    def stage(
        self,
        name: str,
        events: list[Event],
        promises: Promises,
        also: Callable[[float], None] = lambda now: None,
    ) -> Result:
        """Run the clients until all has happened; verify what they were told."""
        result = Result(name + self._suffix, promises)
        result.wanted = sum(event.wanted for event in events)
        if self._compares:
            self._compare(result)
        began = time.monotonic()
        ends = None if self.time_s is None else began + self.time_s
        fleet = self.fleet
        before = (fleet.answers, fleet.disconnects, fleet.refused)
        errors_before = fleet.errors.total()
        fleet.own_stall_s = 0.0

        def each_turn(now: float) -> None:
            also(now)
            if ends is not None and now > ends:
                for event in events:
                    curtail(event)

        with _undisturbed():
            while self._round(events, result, each_turn):
                gc.collect()
        result.seconds = time.monotonic() - began
        result.events = sum(event.done for event in events)
        result.answers = fleet.answers - before[0]
        result.disconnects = fleet.disconnects - before[1]
        result.refused = fleet.refused - before[2]
        result.errors = fleet.errors.total() - errors_before
        if result.errors:
            result.complaints += [f"{n} x {what}" for what, n in fleet.errors.items()]
        result.stuck = fleet.stuck
        if result.stuck:
            result.complaints += self._why_stuck()
        result.own_stall_ms = fleet.own_stall_s * 1000
        times = [each for event in events for each in getattr(event, "respawn_s", [])]
        result.respawn_ms = median_ms(times)
        result.slowest_respawn_ms = max(times, default=0.0) * 1000
        for event in events:
            getattr(event, "close", lambda: None)()
        if self._compares and not result.stuck:
            self._compare(result)
        if self._company is not None and not result.stuck:
            self._add(result, self._company.report(), self._max_silence_s())
        self.results.append(result)
        return result

    def accompany(self, session_ms: int | None = None) -> None:
        """Have groups and transactions beside the clients from now on.

        Args:
            session_ms: so long a classic group waits for a member whose LeaveGroup was
                lost with the whole broker; None: longer than a group may be silent.
        """
        self._companies += 1
        self._crowd = crowd()
        if session_ms is None:
            session_ms = round(SESSION_MS * self._crowd)
        bootstrap = ",".join(self.broker.listeners.values())
        self._company = Company(bootstrap, str(self._companies), session_ms)

    def part(self) -> Result:
        """End groups and transactions; hold what was read to what was committed."""
        assert self._company is not None
        told = self._company.end()
        most_s = self._max_silence_s()
        # They may hear only now that the last stage has ended their connections.
        promised = Promises(disconnects=self.results[-1].promises.disconnects)
        result = self.with_told("groups and transactions", promised, told, most_s)
        self._company.close()
        self._company = None
        self.results.append(result)
        return result

    def _max_silence_s(self) -> float:
        """Return how long a group may have been silent since the last call."""
        busiest, self._crowd = max(self._crowd, crowd()), crowd()
        return MAX_SILENCE_S * busiest

    @staticmethod
    def with_told(
        stage: str, promises: Promises, told: Told, max_silence_s: float
    ) -> Result:
        """Return what groups and transactions alone have seen of a stage."""
        result = Result(stage, promises)
        Campaign._add(result, told, max_silence_s)
        return result

    @staticmethod
    def _add(result: Result, told: Told, max_silence_s: float) -> None:
        """Add what groups and transactions have seen of a stage.

        Where no connection is promised to last, any error may come of that.
        """
        result.transactions += told.transactions
        result.delivered += told.delivered
        if result.promises.disconnects is not None:
            result.errors += sum(told.errors.values())
            result.complaints += [f"{n} x {what}" for what, n in told.errors.items()]
            if told.longest_s > max_silence_s:
                told.stuck.append(f"a group was silent for {told.longest_s:.0f} s")
        result.silence_s = max(result.silence_s, told.longest_s)
        result.wrong += len(told.wrong)
        result.stuck += len(told.stuck)
        result.complaints += told.wrong + [f"stuck: {who}" for who in told.stuck]

    def _compare(self, result: Result) -> None:
        """Note the longest pause while nothing is done to the broker, just now."""
        self.fleet.own_stall_s = 0.0
        peace = Result("peace", Promises())
        with _undisturbed():
            self._round([Nothing(_PEACE_S)], peace, lambda now: None)
        if peace.worst_net_ms > result.peace_ms:
            result.peace_ms, result.peace_story = peace.worst_net_ms, peace.story
        result.wrong += peace.wrong
        result.complaints += peace.complaints

    def _round(
        self, events: list[Event], result: Result, also: Callable[[float], None]
    ) -> bool:
        """One topic's worth of a stage; False when the stage is over."""
        fleet = self.fleet
        self._crowd = max(self._crowd, crowd())
        self._topics += 1
        ledger = self._begin(f"chaos-{self._topics}")
        until = time.monotonic() + _ROUND_S
        warm_at = time.monotonic() + _WARM_UP_S
        go_on, warm = True, False
        while go_on and not fleet.stuck and time.monotonic() < until:
            fleet.turn()
            now = time.monotonic()
            if now < warm_at:
                continue
            if not warm:
                warm = True
                fleet.forget_pauses()  # of the first touch of each log
            also(now)
            for event in events:
                if event.done < event.wanted:
                    event.turn(now)
            go_on = any(event.done < event.wanted for event in events)
        end = time.monotonic() + _WARM_UP_S / 2
        while not fleet.stuck and time.monotonic() < end:
            fleet.turn()  # the last of the deaths is worth a look too
            for event in events:
                event.turn(time.monotonic())
        if fleet.settle():
            result.records += self._verify(ledger)
        result.wrong += ledger.wrong_count
        result.complaints += ledger.wrong
        worst = fleet.worst
        if worst.worst_pause_s * 1000 > result.worst_pause_ms:
            result.worst_pause_ms = worst.worst_pause_s * 1000
            result.worst_what = worst.worst_what
        if fleet.worst_net_s * 1000 > result.worst_net_ms:
            result.worst_net_ms = fleet.worst_net_s * 1000
            result.story = fleet.worst_story() if fleet.worst_story else ""
        fleet.was_away()
        return go_on and not fleet.stuck and not ledger.wrong_count

    def _why_stuck(self) -> list[str]:
        """What can be said of clients that wait for ever, for whoever looks into it."""
        peek = Peek(self.broker.pid)
        try:
            held = [f"{count} {what}" for what, count in peek.in_use().items()]
        finally:
            peek.close()
        waiting = [client.describe() for client in self.fleet.clients if client.stuck]
        log = self.broker.log_tail().splitlines()[-20:]
        return waiting[:5] + held + [f"broker: {line}" for line in log]

    def _begin(self, topic: str):
        while True:
            try:
                return self.fleet.begin(topic, PARTITIONS)
            except OSError:
                continue  # that connection's processor was killed, or killed itself

    def _verify(self, ledger) -> int:
        while True:
            try:
                if self.fleet.may_be_closed:
                    self._wait_until_open(ledger)
                return ledger.verify(self.fleet.addresses[0])
            except OSError:
                continue

    def _wait_until_open(self, ledger) -> None:
        """Wait until transactions are loaded, or for as long as for any answer."""
        deadline = time.monotonic() + STUCK_S
        with wire.Connection(self.fleet.addresses[0]) as connection:
            asked = wire.fetch(ledger.topic, 0, 0, max_bytes=1)
            while (
                wire.parse_fetch(connection.ask(asked)).error_code
                == ErrorCode.NOT_LEADER_OR_FOLLOWER
                and time.monotonic() < deadline
            ):
                time.sleep(_OPEN_LOOK_S)

    def _start_cleaner(self) -> None:
        """Wait for the log cleaner, which comes with the first compacted topic."""
        with wire.Connection(_split(self.broker.bootstrap)) as connection:
            connection.create_topic("compacted", 1, {"cleanup.policy": "compact"})
        while CLEANER not in census(self.broker):
            time.sleep(_OPEN_LOOK_S)

    # -- what is left ----------------------------------------------------------------

    def leftovers(self) -> Result:
        """After all of it: exactly what a fresh broker holds."""
        result = Result("what is left", Promises())
        self.fleet.hang_up()
        self.results.append(result)
        deadline = time.monotonic() + LONGEST_S
        while True:
            held = self._held()
            if not held or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        result.complaints = held
        return result

    def _held(self) -> list[str]:
        peek = Peek(self.broker.pid)
        try:
            held = [f"{count} {what}" for what, count in peek.in_use().items()]
        finally:
            peek.close()
        held += differences(self._fresh, census(self.broker))
        return held + excess_files(self.broker)

    def close(self) -> None:
        """End all; the broker must stop in order, unless a promise was broken."""
        self.fleet.close()
        if self._company is not None:
            self._company.close()
        if all(result.ok for result in self.results):
            self.broker.close()
        else:
            self.broker.kill()
            remove_leftovers()  # its name, which only the next broker would remove


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Collect no garbage now: to look at all that a ledger holds takes 0.1 s."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


_COLUMNS: Final = (
    ("stage", 30),
    ("events", 6),
    ("s", 6),
    ("answers", 9),
    ("records", 8),
    ("txns", 5),
    ("to groups", 9),
    ("silence", 7),
    ("wrong", 5),
    ("errors", 6),
    ("lost", 5),
    ("stuck", 5),
    ("longest pause", 22),
    ("net", 6),
    ("own", 6),
    ("peace", 6),
    ("respawn", 15),
    ("", 6),
)


def table(results: list[Result]) -> str:
    """All stages, a line each, and what went wrong."""
    lines = [
        "  ".join(
            name.ljust(width) if not i else name.rjust(width)
            for i, (name, width) in enumerate(_COLUMNS)
        )
    ]
    for result in results:
        respawn = f"{result.respawn_ms:.1f} / {result.slowest_respawn_ms:.0f}"
        cells = (
            result.stage,
            str(result.events),
            f"{result.seconds:.1f}",
            str(result.answers),
            str(result.records),
            str(result.transactions or ""),
            str(result.delivered or ""),
            f"{result.silence_s:.1f} s" if result.delivered else "",
            str(result.wrong),
            str(result.errors),
            str(result.disconnects),
            str(result.stuck),
            f"{result.worst_what} {result.worst_pause_ms:.0f} ms",
            f"{result.worst_net_ms:.0f}",
            f"{result.own_stall_ms:.0f}",
            f"{result.peace_ms:.0f}" if result.peace_ms else "",
            f"{respawn} ms" if result.respawn_ms else "",
            "ok" if result.ok else "BROKEN",
        )
        lines.append(
            "  ".join(
                cell.ljust(width) if not i else cell.rjust(width)
                for i, (cell, (_, width)) in enumerate(
                    zip(cells, _COLUMNS, strict=True)
                )
            )
        )
    for result in results:
        if result.events < result.wanted:
            lines.append(
                f"  {result.stage}: {result.wanted} were wanted; this machine is too"
                " slow for more in the time there was"
            )
        for text in result.broken + result.complaints:
            lines.append(f"  {result.stage}: {text}")
    return "\n".join(lines)


def dying_command(
    go: Path, fault: str, role: str, mean: int, points: str = "lines"
) -> list[str]:
    """Return the command of a broker whose processes die at random points.

    Args:
        go: only once this file is there.
        fault: what is wrong with the broker; see dying.py.
        role: the processes that die.
        mean: how many points a process lives for, on average.
        points: the source lines of the Python twins, or the steps of the compiled core.
    """
    module = [sys.executable, "-m", "tests.chaos.dying"]
    return [*module, str(go), fault, role, points, str(mean)]
