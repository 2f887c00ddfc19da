"""Writers of transactions, and what each of them knows of how they ended."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from mpbroker.producer import AbortableError, ProducerError
from mpbroker.producer import Producer as OwnProducer
from tests.compat.adapters import Outgoing
from tests.compat.adapters.franz_go_adapter import FranzGoAdapter
from tests.compat.adapters.line_client import (
    ForeignClientError,
    LineClient,
    to_json,
)
from tests.support.apache_kafka import java_command

PARTITIONS: Final = 3
JAVA_CLIENT: Final = "TransactionalClient"
_CALL_S: Final = 20


class Outcome(Enum):
    """How a transaction ended, as its writer knows."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"  # it asked for a commit, and was not told


class Written(NamedTuple):
    """A transaction: its records' values, of the form writer/number/part."""

    values: tuple[bytes, ...]
    outcome: Outcome


class Writer(threading.Thread):
    """Begins, writes, ends; again and again, whatever happens to the broker."""

    def __init__(self, name: str, bootstrap: str, topics: Sequence[str]) -> None:
        super().__init__(name=name, daemon=True)
        self.bootstrap = bootstrap
        self.topics = topics
        self.history: list[Written] = []
        self.trouble: BaseException | None = None
        self._random = random.Random(name)
        self._number = 0
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    @property
    def commits(self) -> int:
        return sum(each.outcome is Outcome.COMMITTED for each in self.history)

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.one()
        except BaseException as error:
            self.trouble = error
            raise
        finally:
            self.close()

    def one(self) -> None:
        """Write one transaction, and note how it ended."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave nothing running."""

    def records(self) -> list[tuple[str, int, bytes]]:
        """What the next transaction writes where: at least to two partitions."""
        self._number += 1
        count = self._random.randint(2, 8)
        places = [
            (self._random.choice(self.topics), self._random.randrange(PARTITIONS))
            for _ in range(count)
        ]
        return [
            (topic, partition, f"{self.name}/{self._number:06}/{part:02}".encode())
            for part, (topic, partition) in enumerate(places)
        ]

    def note(self, records: list[tuple[str, int, bytes]], outcome: Outcome) -> None:
        values = tuple(value for _, _, value in records)
        self.history.append(Written(values, outcome))


class ConfluentWriter(Writer):
    """librdkafka: partitions are added by request, the epoch stays.

    Now and then it fences itself, or falls asleep until its transaction is aborted.
    """

    timeout_ms = 3_000
    kinds: Mapping[str, int] = MappingProxyType(
        {"commit": 70, "abort": 20, "forget": 5, "sleep": 2}
    )

    def __init__(self, name: str, bootstrap: str, topics: Sequence[str]) -> None:
        super().__init__(name, bootstrap, topics)
        self._producer: Producer | None = None

    def note_error(self, error: KafkaError) -> None:
        """Hear of each error that the library could not hide."""

    def _new_producer(self) -> Producer | None:
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "transactional.id": self.name,
                "transaction.timeout.ms": self.timeout_ms,
                "linger.ms": 0,
                "log_level": 0,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
            }
        )
        try:
            producer.init_transactions(_CALL_S)
        except KafkaException as error:
            self.note_error(error.args[0])
            if not error.args[0].retriable():
                raise
            return None
        return producer

    def end_what_is_open(self) -> None:
        """Be the last producer of this name: what others left open is aborted."""
        while self._new_producer() is None:
            pass

    def one(self) -> None:
        if self._producer is None:
            self._producer = self._new_producer()
            if self._producer is None:
                return
        producer, records = self._producer, self.records()
        [kind] = self._random.choices(list(self.kinds), list(self.kinds.values()))
        asked = False
        try:
            producer.begin_transaction()
            for topic, partition, value in records:
                producer.produce(topic, value, partition=partition)
            producer.flush(_CALL_S)
            if kind == "sleep":
                self._stopping.wait(self.timeout_ms / 1e3 + 2)
            if kind == "forget":
                self._producer = None
                self.note(records, Outcome.ABORTED)
                return
            if kind == "abort":
                producer.abort_transaction(_CALL_S)
                self.note(records, Outcome.ABORTED)
                return
            asked = True
            producer.commit_transaction(_CALL_S)
            self.note(records, Outcome.COMMITTED)
        except KafkaException as raised:
            self._recover(producer, records, raised.args[0], asked=asked)

    def _recover(
        self,
        producer: Producer,
        records: list[tuple[str, int, bytes]],
        error: KafkaError,
        *,
        asked: bool,
    ) -> None:
        """Abort if it can be, else begin as a new producer; note what is known."""
        self.note_error(error)
        if asked and error.retriable():
            try:  # the same commit, until it is said how it ended
                producer.commit_transaction(2 * _CALL_S)
            except KafkaException as again:
                error = again.args[0]
            else:
                self.note(records, Outcome.COMMITTED)
                return
        if error.txn_requires_abort():
            try:
                producer.abort_transaction(_CALL_S)
            except KafkaException:
                self._producer = None
            # The coordinator has not committed what it wants to be aborted.
            self.note(records, Outcome.ABORTED)
            return
        self._producer = None
        self.note(records, Outcome.UNKNOWN if asked else Outcome.ABORTED)


class OwnWriter(Writer):
    """mpbroker's own producer."""

    def __init__(self, name: str, bootstrap: str, topics: Sequence[str]) -> None:
        super().__init__(name, bootstrap, topics)
        self._producer: OwnProducer | None = None

    def _new_producer(self) -> OwnProducer | None:
        producer = OwnProducer(
            bootstrap_servers=self.bootstrap,
            transactional_id=self.name,
            transaction_timeout_ms=30_000,
            max_block_ms=_CALL_S * 1000,
        )
        try:
            producer.init_transactions()
        except ProducerError:
            producer.close(0)
            return None
        return producer

    def one(self) -> None:
        if self._producer is None:
            self._producer = self._new_producer()
            if self._producer is None:
                return
        producer, records = self._producer, self.records()
        commits = self._random.random() < 0.8
        asked = False
        try:
            producer.begin_transaction()
            for topic, partition, value in records:
                producer.send(topic, value, partition=partition)
            if commits:
                asked = True
                producer.commit_transaction()
            else:
                producer.abort_transaction()
            self.note(records, Outcome.COMMITTED if commits else Outcome.ABORTED)
        except AbortableError:  # nothing was committed, it says
            self.note(records, Outcome.ABORTED)
            try:
                producer.abort_transaction()
            except ProducerError:
                self.close()
        except ProducerError:
            self.note(records, Outcome.UNKNOWN if asked else Outcome.ABORTED)
            self.close()

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close(0)
            self._producer = None


class FranzGoWriter(Writer):
    """franz-go: partitions are added by writing, each end brings a new epoch."""

    def __init__(self, name: str, bootstrap: str, topics: Sequence[str]) -> None:
        super().__init__(name, bootstrap, topics)
        self._client = FranzGoAdapter(bootstrap)

    def one(self) -> None:
        topic = self._random.choice(self.topics)
        records = [(topic, *place) for _, *place in self.records()]
        commit = self._random.random() < 0.8
        try:
            self._client.ask(
                "transact",
                topic=topic,
                records=[
                    to_json(Outgoing(value=value, partition=partition))
                    for _, partition, value in records
                ],
                transactional_id=self.name,
                commit=commit,
                timeout_s=_CALL_S,
            )
        except ForeignClientError:
            # Perhaps it was in the end that it failed, perhaps long before.
            self.note(records, Outcome.UNKNOWN if commit else Outcome.ABORTED)
            time.sleep(0.05)
        else:
            self.note(records, Outcome.COMMITTED if commit else Outcome.ABORTED)

    def close(self) -> None:
        self._client.close()


class JavaWriter(Writer):
    """Kafka's own producer: franz-go's way, and it is fenced and falls asleep too."""

    timeout_ms = 3_000

    def __init__(self, name: str, bootstrap: str, topics: Sequence[str]) -> None:
        super().__init__(name, bootstrap, topics)
        self._client = LineClient(java_command(JAVA_CLIENT), os.environ)

    def one(self) -> None:
        records = self.records()
        kinds = ("commit", "abort", "forget", "zombie", "sleep")
        outcome = self._client.ask(
            "transact",
            bootstrap=self.bootstrap,
            transactional_id=self.name,
            transaction_timeout_ms=self.timeout_ms,
            timeout_s=_CALL_S,
            kind=self._random.choices(kinds, (70, 20, 4, 4, 2))[0],
            sleep_ms=self.timeout_ms + 2_000,
            records=[
                {"topic": topic, **to_json(Outgoing(value, partition=partition))}
                for topic, partition, value in records
            ],
        )
        if outcome != "none":  # it could not begin
            self.note(records, Outcome(outcome))

    def close(self) -> None:
        self._client.close()


class KilledWriter(Writer):
    """librdkafka in a process, which is killed in every third transaction or so."""

    def __init__(self, name: str, bootstrap: str, topics: Sequence[str]) -> None:
        super().__init__(name, bootstrap, topics)
        self.kills = 0
        self._process: subprocess.Popen[str] | None = None
        self._mean_s = 0.05  # how long a transaction takes, more or less

    def one(self) -> None:
        if self._process is None:
            module = "tests.faults.transaction_process"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, self.bootstrap, self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process, records = self._process, self.records()
        assert process.stdin is not None
        assert process.stdout is not None
        commits = self._random.random() < 0.8
        told = [
            (topic, partition, value.decode()) for topic, partition, value in records
        ]
        killer = threading.Timer(
            self._random.expovariate(1 / self._mean_s), self._kill, [process]
        )
        began = time.monotonic()
        said = ""
        try:
            process.stdin.write(json.dumps({"records": told, "commits": commits}))
            process.stdin.write("\n")
            process.stdin.flush()
            if self._random.random() < 0.35:
                killer.start()
            said = process.stdout.readline().strip()
            if said == "asked":
                self._mean_s = (self._mean_s + time.monotonic() - began) / 2
                said = process.stdout.readline().strip() or said
        except BrokenPipeError:
            said = ""  # it was killed before it had read anything
        killer.cancel()
        if said in ("committed", "aborted"):
            self.note(records, Outcome(said))
            return
        # Killed, or refused: it had asked for the end, perhaps without having said so.
        self.note(records, Outcome.UNKNOWN if commits else Outcome.ABORTED)
        self.close()

    def _kill(self, process: subprocess.Popen[str]) -> None:
        self.kills += 1
        process.kill()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
