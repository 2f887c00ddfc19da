"""Transactions while handlers, the coordinator and the whole broker are killed.

MPBROKER_TRANSACTION_FAULTS_S sets how long; an hour is 3600. Every fault comes when the
last one has been got over, so that there is something to be broken.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.bench.processes import title_of
from tests.faults.transaction_checker import (
    Reader,
    complaints_about,
    complaints_about_early,
    complaints_about_markers,
    read_all,
)
from tests.faults.transaction_writers import (
    PARTITIONS,
    ConfluentWriter,
    FranzGoWriter,
    JavaWriter,
    Outcome,
    OwnWriter,
    Writer,
)
from tests.support.broker import Broker
from tests.support.fetch_clients import FRANZ_GO, have_java_client
from tests.support.ports import reusable_port
from tests.support.promises import promised

DURATION_S: Final = float(os.environ.get("MPBROKER_TRANSACTION_FAULTS_S", "10"))
TOPICS: Final = ("debits", "credits")
PLACES: Final = [(topic, number) for topic in TOPICS for number in range(PARTITIONS)]
# A client that lost an answer may wait for a call of 20 s and then for the 40 s after
# which its transaction is aborted, before it begins another.
PROGRESS_WITHIN_S: Final = 150.0
CONFIG: Final = {
    "num.io.threads": 2,
    "transaction.state.log.num.partitions": 3,
    "offsets.topic.num.partitions": 3,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
    "log.segment.bytes": 65_536,  # markers and records in different segments
}


def wait_for_commits(writers: list[Writer], *, each: bool = False) -> None:
    """Wait for some commits, by each of the writers or by any."""
    before = [writer.commits for writer in writers]

    def are_enough() -> bool:
        more = [w.commits - n for w, n in zip(writers, before, strict=True)]
        return min(more) > 1 if each else sum(more) > 2 * len(more)

    deadline = time.monotonic() + PROGRESS_WITHIN_S
    while not are_enough():
        for writer in writers:
            assert writer.trouble is None, writer.trouble
        assert time.monotonic() < deadline, [
            f"{writer.name}: {writer.commits} commits after {commits},"
            f" {[str(each.outcome) for each in writer.history[-5:]]}"
            for writer, commits in zip(writers, before, strict=True)
        ]
        time.sleep(0.01)


def has_aborted(writers: list[Writer]) -> bool:
    return any(each.outcome is Outcome.ABORTED for w in writers for each in w.history)


def kill_one(broker: Broker, role: str) -> None:
    pids = [pid for pid in broker.processes() if role in title_of(pid)]
    if pids:
        os.kill(random.choice(pids), signal.SIGKILL)


def kill_all(broker: Broker) -> None:
    broker.kill()
    broker.start()


FAULTS: Final[dict[str, tuple[int, Callable[[Broker], None]]]] = {
    "coordinator": (4, lambda broker: kill_one(broker, "group-coordinator")),
    "handler": (4, lambda broker: kill_one(broker, "request-handler")),
    "processor": (1, lambda broker: kill_one(broker, "network-thread")),
    "whole broker": (2, kill_all),
}


@pytest.mark.timeout(int(3 * DURATION_S) + 600)
def test_nothing_aborted_torn_lost_or_twice_is_ever_seen(tmp_path: Path) -> None:
    bootstrap = f"127.0.0.1:{reusable_port()}"  # each time it is started
    config = {**CONFIG, "listeners": f"PLAINTEXT://{bootstrap}"}
    with Broker(tmp_path / "data", config) as broker:
        admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        for made in admin.create_topics(
            [NewTopic(topic, PARTITIONS, 1) for topic in TOPICS]
        ).values():
            made.result(30)
        writers: list[Writer] = [
            ConfluentWriter("rdkafka", bootstrap, TOPICS),
            OwnWriter("own", bootstrap, TOPICS),
        ]
        if FRANZ_GO.exists():
            writers.append(FranzGoWriter("franz", bootstrap, TOPICS))
        else:
            print("\nwithout franz-go: no client in .downloads/franz-go")
        if have_java_client():
            writers.append(JavaWriter("java", bootstrap, TOPICS))
        else:
            print("\nwithout Java: no client of Kafka's own in .downloads/java")
        reader = Reader(bootstrap, PLACES)
        for thread in (reader, *writers):
            thread.start()
        end = time.monotonic() + DURATION_S
        faults: Counter[str] = Counter()
        weights = [weight for weight, _ in FAULTS.values()]
        while time.monotonic() < end or not has_aborted(writers):
            wait_for_commits(writers)
            [what] = random.choices(list(FAULTS), weights)
            FAULTS[what][1](broker)
            faults[what] += 1
        wait_for_commits(writers, each=True)
        for writer in writers:
            writer.stop()
        for writer in writers:
            writer.join(PROGRESS_WITHIN_S)
            assert not writer.is_alive(), writer.name
        for writer in writers:  # end what they left open
            ConfluentWriter(writer.name, bootstrap, TOPICS).end_what_is_open()
        final, stable_ends = read_all(bootstrap, PLACES)
        _, ends = read_all(bootstrap, PLACES, "read_uncommitted")
        reader.stop()
    history = [each for writer in writers for each in writer.history]
    assert stable_ends == ends
    with promised("each transaction is seen whole or not at all, once, in its order"):
        assert reader.complaints == []
        assert complaints_about(history, final) == []
        assert complaints_about_early(reader.seen, final) == []
        assert complaints_about_markers(broker.data_dir, PLACES) == []
    kinds = Counter(each.outcome for each in history)
    print(f"\n{faults.total()} killed: {dict(faults)}")
    for writer in writers:
        ends = Counter(each.outcome.value for each in writer.history)
        print(f"{writer.name}: {dict(ends)}")
    assert faults
    assert kinds[Outcome.COMMITTED]
    assert kinds[Outcome.ABORTED]
