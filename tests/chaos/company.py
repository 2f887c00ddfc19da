"""Consumer groups and transactions beside the clients of a campaign, in one process.

    python -m tests.chaos.company BOOTSTRAP NAME SESSION_MS

A writer commits or aborts transactions, and two groups read what is committed: a
classic one, of which a member leaves and comes back all the time, and one of KIP-848.
Each group commits what it has got. The process reads a word a line from its standard
input and answers each with a line of JSON:

    report  what there was since the last report; waits until all of them have gone on
    end     ends all, and holds what readers and groups got against what was committed
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.chaos.clients import STUCK_S
from tests.faults.transaction_checker import complaints_about, read_all
from tests.faults.transaction_writers import PARTITIONS, ConfluentWriter, Outcome

_PAUSE_S: Final = 0.02  # between transactions, so that the machine has time for others
_STAYS_S: Final = 2.0  # a member that comes and goes
_COMMITS_EVERY_S: Final = 0.2
_LOOK_S: Final = 0.02
_TOLD: Final = 20
# A group that waits for a session to end, although nobody has died, is silent longer
# than MAX_SILENCE_S: the broker has forgotten that a member left, for example. Both
# grow with the machine's load (stalls.crowd): a group is not silent for so long because
# the machine is slow, and one that waits for a session still is.
SESSION_MS: Final = 60_000
MAX_SILENCE_S: Final = 45.0
Place = tuple[str, int]


@dataclass
class Told:
    """What happened since the last report.

    Attributes:
        transactions: how many were committed.
        delivered: how many records the groups got.
        errors: what clients were told, and how often.
        wrong: what must not be; the first few.
        stuck: the groups and writers that do not go on.
        longest_s: the longest time in which nothing was delivered to a group.
    """

    transactions: int = 0
    delivered: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    longest_s: float = 0.0


class Notes:
    """Errors and complaints of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._wrong: list[str] = []

    def error(self, who: str, error: KafkaError) -> None:
        with self._lock:
            self._errors[f"{who}: {error.name()}"] += 1

    def complain(self, text: str) -> None:
        with self._lock:
            if len(self._wrong) < _TOLD:
                self._wrong.append(text)

    def take(self) -> Told:
        """Return what was noted since the last time."""
        with self._lock:
            taken = Told(errors=dict(self._errors), wrong=self._wrong)
            self._errors, self._wrong = Counter(), []
        return taken


class _Writer(ConfluentWriter):
    """Writes transactions, and counts what it is told meanwhile."""

    timeout_ms = 120_000
    kinds: Final = {"commit": 75, "abort": 20, "forget": 5}

    def __init__(
        self, name: str, bootstrap: str, topics: list[str], notes: Notes
    ) -> None:
        super().__init__(name, bootstrap, topics)
        self._notes = notes

    def one(self) -> None:
        super().one()
        time.sleep(_PAUSE_S)

    def note_error(self, error: KafkaError) -> None:
        self._notes.error("writer", error)


class Group:
    """The members of one group, and what it has got and committed.

    Attributes:
        delivered: how often each value was delivered.
    """

    def __init__(
        self,
        name: str,
        bootstrap: str,
        topic: str,
        protocol: str,
        notes: Notes,
        session_ms: int = SESSION_MS,
    ) -> None:
        self.name = name
        self.delivered: Counter[bytes] = Counter()
        self.last_at = time.monotonic()
        self.longest_s = 0.0
        self._bootstrap = bootstrap
        self._topic = topic
        self._protocol = protocol
        self._session_ms = session_ms
        self._notes = notes
        self._committed: dict[Place, int] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        lives = (None, None, _STAYS_S) if protocol == "classic" else (None, None)
        self._threads = [
            threading.Thread(target=self._keep_member, args=(stays_s,), daemon=True)
            for stays_s in lives
        ]

    @property
    def committed(self) -> dict[int, int]:
        """The committed offsets, by partition."""
        with self._lock:
            return {number: offset for (_, number), offset in self._committed.items()}

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * STUCK_S)
            if thread.is_alive():
                self._notes.complain(f"{self.name}: a member does not end")

    def _keep_member(self, stays_s: float | None) -> None:
        while not self._stopping.is_set():
            try:
                self._be_member(stays_s)
            except KafkaException as raised:
                self._notes.error(self.name, raised.args[0])

    def _be_member(self, stays_s: float | None) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": self.name,
                "group.protocol": self._protocol,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "log_level": 0,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
                "error_cb": lambda error: self._notes.error(self.name, error),
                # Of the others it is a setting of the broker's.
                **(
                    {
                        "session.timeout.ms": self._session_ms,
                        # At least that; 5 min are its default.
                        "max.poll.interval.ms": max(300_000, self._session_ms),
                    }
                    if self._protocol == "classic"
                    else {}
                ),
            }
        )
        begins: dict[Place, int] = {}
        got: dict[Place, int] = {}  # where to go on, of what is not committed yet

        def assigned(_: Consumer, places: list[TopicPartition]) -> None:
            with self._lock:
                for each in places:
                    place = each.topic, each.partition
                    begins[place] = self._committed.get(place, 0)

        def revoked(_: Consumer, places: list[TopicPartition]) -> None:
            self._commit(consumer, got)

        def lost(_: Consumer, places: list[TopicPartition]) -> None:
            got.clear()

        consumer.subscribe(
            [self._topic], on_assign=assigned, on_revoke=revoked, on_lost=lost
        )
        ends = None if stays_s is None else time.monotonic() + stays_s
        commits_at = 0.0
        try:
            while not self._stopping.is_set() and (
                ends is None or time.monotonic() < ends
            ):
                message = consumer.poll(0.1)
                if message is not None:
                    self.take(message, begins, got)
                if time.monotonic() >= commits_at:
                    commits_at = time.monotonic() + _COMMITS_EVERY_S
                    self._commit(consumer, got)
            self._commit(consumer, got)
        finally:
            consumer.close()

    def take(
        self, message: Any, begins: dict[Place, int], got: dict[Place, int]
    ) -> None:
        """Note what a member was given, and see whether it may be."""
        if message.error() is not None:
            self._notes.error(self.name, message.error())
            return
        place, offset = (message.topic(), message.partition()), message.offset()
        if offset < begins.get(place, 0):
            self._notes.complain(
                f"{self.name}: {place} {offset} is below {begins[place]}, committed"
                " before the member had the partition"
            )
        if offset < got.get(place, 0):
            self._notes.complain(f"{self.name}: {place} {offset} after {got[place]}")
        got[place] = offset + 1
        with self._lock:
            now = time.monotonic()
            self.delivered[message.value()] += 1
            self.longest_s = max(self.longest_s, now - self.last_at)
            self.last_at = now

    def compare(self, committed: set[bytes], there: set[bytes]) -> None:
        """Hold what the group was given against what is committed, and in the log."""
        missing = committed - self.delivered.keys()
        if missing:
            self._notes.complain(
                f"{self.name} was not given {len(missing)} committed records:"
                f" {sorted(missing)[:5]}"
            )
        strange = self.delivered.keys() - there
        if strange:
            self._notes.complain(
                f"{self.name} got what no log has: {sorted(strange)[:5]}"
            )

    def _commit(self, consumer: Consumer, got: dict[Place, int]) -> None:
        """Commit what a member has got; a rebalance may refuse it."""
        if not got:
            return
        offsets = [TopicPartition(*place, offset) for place, offset in got.items()]
        try:
            done = consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as raised:
            error = raised.args[0]
            if error.name() not in _REBALANCED:
                self._notes.error(f"{self.name} commit", error)
            return
        with self._lock:
            for each in done:
                if each.error is not None:
                    self._notes.error(f"{self.name} commit", each.error)
                    continue
                place = each.topic, each.partition
                self._committed[place] = max(self._committed.get(place, 0), each.offset)
        got.clear()


# The member's partitions are others' meanwhile, who get the records once more.
_REBALANCED: Final = {
    *("ILLEGAL_GENERATION", "REBALANCE_IN_PROGRESS", "UNKNOWN_MEMBER_ID"),
    *("STALE_MEMBER_EPOCH", "FENCED_MEMBER_EPOCH", "_ASSIGNMENT_LOST"),
}


class _Company:
    """All of them."""

    def __init__(self, bootstrap: str, name: str, session_ms: int) -> None:
        self._bootstrap = bootstrap
        self._notes = Notes()
        self._topic = f"transactions-{name}"
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        new = NewTopic(self._topic, PARTITIONS, 1)
        for made in self._admin.create_topics([new]).values():
            made.result(STUCK_S)
        self._writer = _Writer(f"writer-{name}", bootstrap, [self._topic], self._notes)
        self._groups = [
            Group(
                f"{kind}-{name}", bootstrap, self._topic, kind, self._notes, session_ms
            )
            for kind in ("classic", "consumer")
        ]
        self._told = 0, 0
        self._writer.start()
        for group in self._groups:
            group.start()

    def report(self) -> Told:
        """Wait until all have gone on; return what there was since the last time."""
        stuck = self._wait_until_all_go_on()
        commits = self._writer.commits
        delivered = sum(group.delivered.total() for group in self._groups)
        told = self._notes.take()
        told.transactions = commits - self._told[0]
        told.delivered = delivered - self._told[1]
        told.stuck = stuck
        told.longest_s = max(group.longest_s for group in self._groups)
        self._told = commits, delivered
        for group in self._groups:
            group.longest_s = 0.0
        return told

    def _wait_until_all_go_on(self) -> list[str]:
        """Wait for another commit, and then for more of it in each group."""
        before = self._writer.commits
        if not self._wait(lambda: self._writer.commits > before + 1):
            return [f"the writer, after {before} commits: {self._writer.trouble}"]
        counts = [group.delivered.total() for group in self._groups]
        return [
            f"{group.name}: {self._describe(group)}"
            for group, count in zip(self._groups, counts, strict=True)
            if not self._wait(
                lambda group=group, count=count: group.delivered.total() > count
            )
        ]

    def _describe(self, group: Group) -> str:
        """Tell what the coordinator knows of a group, and how far it has committed."""
        try:
            futures = self._admin.describe_consumer_groups([group.name])
            found = futures[group.name].result(STUCK_S)
        except KafkaException as raised:
            return str(raised)
        members = (
            f"{member.member_id} has"
            f" {sorted(each.partition for each in member.assignment.topic_partitions)}"
            for member in found.members
        )
        return (
            f"{found.state.name}, {'; '.join(members)};"
            f" silent for {time.monotonic() - group.last_at:.1f} s,"
            f" committed {group.committed}"
        )

    def _wait(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + STUCK_S
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def end(self) -> Told:
        """End all; compare what there is."""
        told = self.report()
        self._writer.stop()
        self._writer.join(2 * STUCK_S)
        if self._writer.is_alive():
            told.stuck.append("the writer")
            return told
        self._writer.end_what_is_open()
        committed = {
            value
            for each in self._writer.history
            if each.outcome is Outcome.COMMITTED
            for value in each.values
        }
        for group in self._groups:
            self._wait(lambda group=group: committed <= group.delivered.keys())
            group.stop()
        places = [(self._topic, number) for number in range(PARTITIONS)]
        seen, _ = read_all(self._bootstrap, places)
        for text in complaints_about(self._writer.history, seen):
            self._notes.complain(text)
        there = {value for values in seen.values() for value in values.values()}
        for group in self._groups:
            group.compare(committed, there)
        last = self._notes.take()
        told.errors = dict(Counter(told.errors) + Counter(last.errors))
        told.wrong += last.wrong
        return told


class Company:
    """The process, seen by the campaign.

    Args:
        bootstrap: addresses of the broker.
        name: of topics, groups and transactional ids.
        session_ms: a classic group waits so long for a member that has died.
    """

    def __init__(self, bootstrap: str, name: str, session_ms: int = SESSION_MS) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, bootstrap, name, str(session_ms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask("")

    def report(self) -> Told:
        """What there was since the last report, once all have gone on."""
        return self._ask("report\n")

    def end(self) -> Told:
        """What there was, and what is wrong with all of it."""
        told = self._ask("end\n")
        self._process.wait()
        return told

    def _ask(self, word: str) -> Told:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word)
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "groups and transactions ended, see their traceback"
        return Told(**json.loads(line))

    def close(self) -> None:
        """End the process if it is still there."""
        self._process.kill()
        self._process.communicate()


def _main(bootstrap: str, name: str, session_ms: str) -> None:
    def tell(told: Told) -> None:
        print(json.dumps(asdict(told)), flush=True)

    company = _Company(bootstrap, name, int(session_ms))
    tell(company.report())
    for line in sys.stdin:
        if line == "end\n":
            tell(company.end())
            return
        tell(company.report())


if __name__ == "__main__":
    _main(*sys.argv[1:])
