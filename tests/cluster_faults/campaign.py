"""A cluster of three nodes under load, while its nodes and its database die.

Producers write to a topic that the nodes share, and groups of both protocols read it. A
ledger judges all that they are told. At the end everything works again, and the whole
topic is read from each node and compared.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.cluster_faults.harm import Cluster, cluster
from tests.cluster_faults.ledger import Ledger, Walk
from tests.cluster_faults.load import (
    PATIENCE_S,
    TOPIC,
    Client,
    IdempotentWriter,
    Member,
    Onlooker,
    Pauses,
    PlainWriter,
    consumer_settings,
    read_on,
)

PARTITIONS: Final = 4
IDEMPOTENT: Final = ("one", "two", "three")
PLAIN: Final = "plain"
MEMBERS: Final = 3
_CLASSIC: Final = {"group.protocol": "classic", "heartbeat.interval.ms": 2000}
GROUPS: Final[dict[str, dict[str, object]]] = {
    # Its members give themselves up during a takeover, those of the next one do not.
    "classic": {**_CLASSIC, "session.timeout.ms": 10_000},
    "cooperative": {
        **_CLASSIC,
        "session.timeout.ms": 30_000,
        "partition.assignment.strategy": "cooperative-sticky",
    },
    "consumer": {"group.protocol": "consumer"},
}
_PLAIN_RATE: Final = 20
_LONG_S: Final = 5.0  # a pause that is told of while it lasts
_REPLACED: Final = 0.3  # how often a death is followed by a member that leaves


class Campaign:
    """One run.

    Args:
        folder: for all files; it must exist.
        seed: of all that is random.
        rate: records a second of the idempotent producers.
        say: called with a line for each death.

    Attributes:
        ledger: what was written, read and committed, and complaints.
        pauses: the longest ones, by the name of a producer or group.
        answers: how often a node told of the offsets of a group.
        replaced: how many members left, and others joined.
        cluster: what was harmed; there while run() runs, and afterwards.
    """

    def __init__(
        self, folder: Path, seed: int, rate: int, say: Callable[[str], object]
    ) -> None:
        self._folder = folder
        self._draw = random.Random(seed)
        self._rate = rate
        self._say = say
        self._began = time.monotonic()
        self.ledger = Ledger(PARTITIONS, IDEMPOTENT, [PLAIN], GROUPS)
        self.pauses: dict[str, Pauses] = {}
        self.answers = self.replaced = 0
        self._members: list[Member] = []
        self.cluster: Cluster

    def run(self, deaths: int, calm_s: float) -> None:
        """Let nodes die, then look whether all is there.

        Args:
            deaths: how many nodes are to be killed or stopped.
            calm_s: the longest time between one harm and the next.
        """
        with cluster(self._folder, self._draw, self.ledger) as self.cluster:
            self._prepare()
            writers, readers = self._writers(), self._members
            self._onlooker = Onlooker(
                *(self.ledger, self.cluster.addresses, list(GROUPS)),
                self._draw.randrange(1 << 30),
            )
            for group in GROUPS:
                for _ in range(MEMBERS):
                    self._add_member(group)
            for each in (*writers, self._onlooker):
                each.start()
            try:
                while self.cluster.node_deaths < deaths and not self.ledger.complaints:
                    time.sleep(self._draw.uniform(0.2, calm_s))
                    self._tell(self.cluster.do_harm())
                    if self._draw.random() < _REPLACED:
                        self._replace_a_member()
                    if self.cluster.has_done_all:
                        self._breathe()
                self._breathe()
                _join(writers, self.ledger)
                self._tell("all records were acknowledged")
                self._wait_for_groups()
                self._tell("the groups have read them")
            finally:
                _join([*writers, *readers, self._onlooker], self.ledger)
            self._compare_nodes()
            self._tell("the nodes were compared")

    def _tell(self, what: str) -> None:
        now = time.monotonic()
        waiting = "".join(
            f", {name} waits for {now - each.last:.0f} s"
            for name, each in self.pauses.items()
            if now - each.last > _LONG_S
        )
        self._say(
            f"{time.monotonic() - self._began:7.1f} s  {what}"
            f" - {self.ledger.records()} records{waiting}"
        )

    def _prepare(self) -> None:
        """Make the topic, and let each group begin at offset 0."""
        bootstrap = self.cluster.bootstrap
        topic = NewTopic(TOPIC, PARTITIONS, config={"diskless.enable": "true"})
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([topic])[TOPIC].result(PATIENCE_S)
        places = [TopicPartition(TOPIC, each, 0) for each in range(PARTITIONS)]
        until = time.monotonic() + PATIENCE_S
        for group in GROUPS:
            consumer = Consumer(consumer_settings(group, bootstrap))
            while True:
                try:
                    done = consumer.commit(offsets=places, asynchronous=False)
                    if all(each.error is None for each in done):
                        break
                except KafkaException:
                    if time.monotonic() > until:
                        raise
                time.sleep(0.1)
            consumer.close()

    def _writers(self) -> list[Client]:
        ledger, bootstrap = self.ledger, self.cluster.bootstrap
        rate = self._rate // len(IDEMPOTENT)
        writers: list[Client] = [
            IdempotentWriter(name, ledger, bootstrap, rate) for name in IDEMPOTENT
        ]
        writers.append(PlainWriter(PLAIN, ledger, self.cluster.addresses, _PLAIN_RATE))
        self.pauses |= {each.name: each.pauses for each in writers}
        self.pauses |= {f"group {name}": Pauses() for name in GROUPS}
        return writers

    def _add_member(self, group: str) -> None:
        member = Member(
            *(group, len(self._members), self.ledger, self.cluster.bootstrap),
            *(GROUPS[group], self.pauses[f"group {group}"]),
        )
        self._members.append(member)
        member.start()

    def _replace_a_member(self) -> None:
        """Let a member leave, and another one join, which is a rebalance or two."""
        gone = self._draw.choice([each for each in self._members if not each.is_ending])
        gone.end()
        self._add_member(gone.group)
        self.replaced += 1

    def _breathe(self) -> None:
        """Wait until all nodes are back, and all clients go on."""
        self.cluster.heal()
        self._tell("all nodes are back")
        began = time.monotonic()
        while any(each.last < began for each in self.pauses.values()):
            if self.ledger.complaints:
                return
            if time.monotonic() > began + PATIENCE_S:
                self._tell("they wait")
                self.ledger.complain("a producer or a group goes on no more")
            time.sleep(0.1)

    def _wait_for_groups(self) -> None:
        """Wait until each group has committed all that there is."""
        ends = [self.ledger.end(each) for each in range(PARTITIONS)]
        until = time.monotonic() + PATIENCE_S
        for group in GROUPS:
            while (committed := self.ledger.floor(group)) != ends:
                if self.ledger.complaints:
                    return
                if time.monotonic() > until:
                    self.ledger.complain(
                        f"group {group} stays at {committed}, of {ends}"
                    )
                    return
                time.sleep(0.1)

    def _compare_nodes(self) -> None:
        """Read all from each node: records by the ledger, and the bytes of batches."""
        for partition in range(PARTITIONS):
            end = self.ledger.end(partition)
            digests = set()
            for number, address in enumerate(self.cluster.addresses, 1):
                walk = Walk(self.ledger, f"node {number}", partition)
                digest = hashlib.sha256()
                until = time.monotonic() + PATIENCE_S
                while walk.next < end and time.monotonic() < until:
                    read_on(walk, address, self.ledger, digest.update)
                    time.sleep(0.05)
                walk.end()
                if walk.next != end:
                    self.ledger.complain(
                        f"node {number} has {walk.next} records of partition"
                        f" {partition}, of {end}"
                    )
                digests.add(digest.digest())
            if len(digests) > 1:
                self.ledger.complain(f"partition {partition} has other bytes at a node")
        self.answers = self._onlooker.answers


def _join(clients: list[Client], ledger: Ledger) -> None:
    for each in clients:
        each.end()
    for each in clients:
        each.join(2 * PATIENCE_S)
        if each.is_alive():
            ledger.complain(f"{each.name} waits for ever")
