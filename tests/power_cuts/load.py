"""Clients that know what was acknowledged, and hold a broker to it after a power cut.

Each of them is a thread while there is load. ``check`` is called when the broker runs
again, on the disk that had no power for a moment.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.add_offsets_to_txn import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
)
from mpbroker.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
)
from mpbroker.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from mpbroker.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataResponse,
)
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
)
from mpbroker.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)
from tests.bench import wire
from tests.faults.producers import Ledger, Producer
from tests.faults.transaction_checker import complaints_about, read_all
from tests.faults.transaction_writers import Outcome, Written

Address = tuple[str, int]
Answer = TypeVar("Answer", bound=Message)
T = TypeVar("T")

RETRIABLE: Final = frozenset({14, 15, 16, 51})  # the coordinator loads, or is not there
TOPIC_RESOURCE: Final = 2
_TIMEOUT_S: Final = 60.0
_TRANSACTIONAL: Final = 0x10


class RefusedError(OSError):
    """An answer with an error code."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what}: error {code}")
        self.code = code


def expect(what: str, *codes: int) -> None:
    """Raise RefusedError for the first code that is an error."""
    for code in codes:
        if code:
            raise RefusedError(what, code)


class Client(threading.Thread):
    """One connection that does something again and again until the power is cut.

    Attributes:
        acknowledged: how many answers it got that promise something.
        troubles: errors, each with the time at which it came.
    """

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.acknowledged = 0
        self.troubles: list[tuple[float, str]] = []
        self.chance = random.Random(seed)
        self._connection: wire.Connection | None = None
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, address: Address) -> None:
        """Do it from now on."""
        self._halt.clear()
        self.troubles.clear()
        self._thread = threading.Thread(
            target=self._live, args=(address,), name=self.name, daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Stop; to be called when the broker is dead, or answers."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _live(self, address: Address) -> None:
        try:
            with wire.Connection(address, _TIMEOUT_S) as connection:
                self._connection = connection
                self.prepare()
                while not self._halt.is_set():
                    self.step()
        except (OSError, wire.AnswerError) as error:
            self.troubles.append((time.monotonic(), f"{self.name}: {error!r}"))

    def prepare(self) -> None:
        """Do what a client does once per connection."""

    def step(self) -> None:
        """Do one thing."""
        raise NotImplementedError

    def resume(self, address: Address) -> None:
        """End what the cut has left open; all clients do, before the first check."""

    def check(self, address: Address) -> list[str]:
        """Return what the broker does not keep of what it has acknowledged."""
        raise NotImplementedError

    def ask(self, version: int, request: Message, answer: type[Answer]) -> Answer:
        assert self._connection is not None
        return ask(self._connection, version, request, answer)


def ask(
    connection: wire.Connection, version: int, request: Message, answer: type[Answer]
) -> Answer:
    """Send a request of a flexible version and return the answer."""
    api = (int(type(request).api_key), version)
    payload = connection.ask(wire.request(api, request.encode(version)))
    reader = wire.Reader(payload, 4)
    reader.skip_tags()
    return answer.decode(version, payload, reader.position)


def until_loaded(run: Callable[[], T]) -> T:
    """Call again what the coordinator refuses while it loads its logs."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return run()
        except RefusedError as error:
            if error.code not in RETRIABLE or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def until_open(run: Callable[[], T]) -> T:
    """Call again what partitions refuse until all transactions are loaded."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return run()
        except wire.AnswerError as error:
            if not str(error).endswith("error 6") or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


# -- records ---------------------------------------------------------------------------


class _CutProducer(Producer):
    """A producer that takes an error for a broken connection."""

    refused_at: float | None = None

    def _ask(self, numbers: range) -> int:
        try:
            return super()._ask(numbers)
        except wire.AnswerError as error:
            if self.refused_at is None:
                self.refused_at = time.monotonic()
            raise ConnectionError(str(error)) from error


class Records(Client):
    """Producers of one topic, idempotent and plain, and its whole content so far.

    Attributes:
        acks: of the producers; 1 if the topic forces each batch to disk by itself.
    """

    def __init__(
        self, topic: str, partitions: int, config: dict[str, str], acks: int = -1
    ) -> None:
        super().__init__(topic, 0)
        self.topic, self.partitions, self._config = topic, partitions, config
        self.producers = [
            _CutProducer(
                ("", 0),
                topic,
                partition,
                f"{'idempotent' if idempotent else 'plain'}-{partition}",
                idempotent=idempotent,
                acks=acks,
            )
            for partition in range(partitions)
            for idempotent in (True, False)
        ]
        self._recovered: dict[int, list[tuple[int, bytes | None]]] = {}

    def set_up(self, address: Address) -> None:
        with wire.Connection(address, _TIMEOUT_S) as connection:
            connection.create_topic(self.topic, self.partitions, self._config)

    def begin(self, address: Address) -> None:
        self.troubles.clear()
        for producer in self.producers:
            producer.refused_at = None
            producer.start(address)

    def end(self) -> None:
        for producer in self.producers:
            producer.stop(broker_is_dead=True)
            if producer.refused_at is not None:
                what = f"{self.topic} {producer.name} was refused"
                self.troubles.append((producer.refused_at, what))
        self.acknowledged = sum(len(each.acknowledged) for each in self.producers)

    def check(self, address: Address) -> list[str]:
        try:
            until_open(lambda: Ledger(self.topic, self.producers).check(address))
        except AssertionError as error:
            return [f"{self.topic}: {error}"]
        found = []
        with wire.Connection(address, _TIMEOUT_S) as connection:
            for partition in range(self.partitions):
                records = connection.read_all(self.topic, partition)
                now = [(each.offset, each.value) for each in records]
                before = self._recovered.get(partition, [])
                # Readers were shown these after the last cut.
                if now[: len(before)] != before:
                    place = f"{self.topic}-{partition}"
                    found.append(f"{place}: {len(before)} records, once read, changed")
                self._recovered[partition] = now
        return found


# -- topics ----------------------------------------------------------------------------


class _Topic:
    """A topic as its owner knows it."""

    def __init__(self) -> None:
        self.is_there: bool | None = None  # None: it was not told
        self.retention_ms = -1
        self.wanted_ms = -1  # asked for, and not answered
        self.records = 0


class Topics(Client):
    """Makes topics, writes a record to each, changes configs, deletes topics."""

    def __init__(self, seed: int) -> None:
        super().__init__("topics", seed)
        self._known: dict[str, _Topic] = {}

    def step(self) -> None:
        there = [name for name, topic in self._known.items() if topic.is_there]
        if len(there) < 3 or self.chance.random() < 0.4:
            self._create()
        elif self.chance.random() < 0.5:
            self._alter(self.chance.choice(there))
        else:
            self._delete(self.chance.choice(there))
        self.acknowledged += 1

    def _create(self) -> None:
        assert self._connection is not None
        name = f"made-{len(self._known)}"
        topic = self._known[name] = _Topic()
        self._connection.create_topic(name, self.chance.randint(1, 3))
        topic.is_there = True
        if self.chance.random() < 0.7:
            batch = wire.record_batch([wire.RecordSpec(name.encode())])
            request = wire.produce(name, 0, batch, acks=-1)
            answer = wire.parse_produce(self._connection.ask(request))
            expect(f"produce to {name}", answer.error_code)
            topic.records = 1

    def _alter(self, name: str) -> None:
        topic = self._known[name]
        topic.wanted_ms = self.chance.randint(10**9, 2 * 10**9)
        entry = AlterableConfig(
            name="retention.ms", config_operation=0, value=str(topic.wanted_ms)
        )
        resource = AlterConfigsResource(
            resource_type=TOPIC_RESOURCE, resource_name=name, configs=[entry]
        )
        request = IncrementalAlterConfigsRequest(
            resources=[resource], validate_only=False
        )
        answer = self.ask(1, request, IncrementalAlterConfigsResponse)
        expect("alter", *(each.error_code for each in answer.responses))
        topic.retention_ms = topic.wanted_ms

    def _delete(self, name: str) -> None:
        assert self._connection is not None
        topic = self._known[name]
        topic.is_there = None
        self._connection.delete_topic(name)
        topic.is_there = False

    def check(self, address: Address) -> list[str]:
        found = []
        with wire.Connection(address, _TIMEOUT_S) as connection:
            request = MetadataRequest(topics=None, allow_auto_topic_creation=False)
            answer = ask(connection, 9, request, MetadataResponse)
            there = {topic.name for topic in answer.topics if not topic.error_code}
            for name, topic in self._known.items():
                if topic.is_there is None:
                    topic.is_there = name in there  # either is right, from now on
                if topic.is_there is not (name in there):
                    found.append(f"topic {name} is {'not ' * topic.is_there}there")
                elif topic.is_there:
                    found += self._check_one(connection, name, topic)
        return found

    @staticmethod
    def _check_one(connection: wire.Connection, name: str, topic: _Topic) -> list[str]:
        found = []
        records = until_open(lambda: connection.read_all(name, 0))
        values = [record.value for record in records]
        if values != [name.encode()] * len(values) or not topic.records <= len(values):
            found.append(f"{name} holds {values}")
        topic.records = len(values)
        resource = DescribeConfigsResource(
            resource_type=TOPIC_RESOURCE,
            resource_name=name,
            configuration_keys=["retention.ms"],
        )
        request = DescribeConfigsRequest(
            resources=[resource], include_synonyms=False, include_documentation=False
        )
        (result,) = ask(connection, 4, request, DescribeConfigsResponse).results
        value = int(result.configs[0].value or 0)
        if topic.wanted_ms < 0:
            return found
        if value == topic.wanted_ms or topic.retention_ms < 0:
            topic.retention_ms = value
        elif value != topic.retention_ms:
            found.append(f"{name}: retention.ms is {value}, not {topic.retention_ms}")
        topic.wanted_ms = topic.retention_ms
        return found


# -- offsets of groups -----------------------------------------------------------------


class Offsets(Client):
    """Commits offsets of some groups without members, each higher than the last."""

    GROUPS: Final = 3

    def __init__(self, topic: str, seed: int) -> None:
        super().__init__("offsets", seed)
        self._topic = topic
        self._told = dict.fromkeys((f"g-{n}" for n in range(self.GROUPS)), -1)
        self._asked = dict(self._told)

    def step(self) -> None:
        group = self.chance.choice(list(self._told))
        self._asked[group] += 1
        until_loaded(lambda: self._commit(group, self._asked[group]))
        self._told[group] = self._asked[group]
        self.acknowledged += 1

    def _commit(self, group: str, offset: int) -> None:
        partition = OffsetCommitRequestPartition(
            partition_index=0, committed_offset=offset, committed_metadata=f"m{offset}"
        )
        topic = OffsetCommitRequestTopic(name=self._topic, partitions=[partition])
        request = OffsetCommitRequest(group_id=group, member_id="", topics=[topic])
        answer = self.ask(8, request, OffsetCommitResponse)
        expect("commit", answer.topics[0].partitions[0].error_code)

    def check(self, address: Address) -> list[str]:
        found = []
        with wire.Connection(address, _TIMEOUT_S) as connection:
            for group, told in self._told.items():
                now, metadata = offset_of(connection, group, self._topic)
                if now not in (told, self._asked[group]):
                    found.append(f"{group}: offset {now}, acknowledged {told}")
                elif now >= 0 and metadata != f"m{now}":
                    found.append(f"{group}: offset {now} with metadata {metadata!r}")
                self._told[group] = self._asked[group] = now
        return found


def offset_of(
    connection: wire.Connection, group: str, topic: str
) -> tuple[int, str | None]:
    """Return the committed offset of a group and its metadata, (-1, "") if none."""
    topics = [OffsetFetchRequestTopics(name=topic, partition_indexes=[0])]
    groups = [OffsetFetchRequestGroup(group_id=group, topics=topics)]
    request = OffsetFetchRequest(groups=groups, require_stable=True)

    def once() -> tuple[int, str | None]:
        (answer,) = ask(connection, 8, request, OffsetFetchResponse).groups
        expect("fetch offsets", answer.error_code)
        if not answer.topics:
            return -1, ""
        partition = answer.topics[0].partitions[0]
        # UNSTABLE_OFFSET_COMMIT while a decided transaction is completed.
        if partition.error_code == 88:
            raise RefusedError("unstable", 14)
        expect("fetch offsets", partition.error_code)
        return partition.committed_offset, partition.metadata

    return until_loaded(once)


# -- transactions ----------------------------------------------------------------------


class Transactions(Client):
    """Writes transactions to two partitions, with an offset of a group in each."""

    PARTITIONS: Final = 2

    def __init__(self, name: str, topic: str, seed: int) -> None:
        super().__init__(name, seed)
        self._topic, self._group = topic, f"group-of-{name}"
        self._history: list[Written] = []
        self._number = 0
        self._offset, self._asked = -1, -1
        self._producer = (-1, -1)
        self._sequences = [0] * self.PARTITIONS

    def prepare(self) -> None:
        request = InitProducerIdRequest(
            transactional_id=self.name, transaction_timeout_ms=60_000
        )

        def once() -> tuple[int, int]:
            answer = self.ask(4, request, InitProducerIdResponse)
            expect("init", answer.error_code)
            return answer.producer_id, answer.producer_epoch

        self._producer = until_loaded(once)
        self._sequences = [0] * self.PARTITIONS

    def step(self) -> None:
        self._number += 1
        parts = self.chance.randint(2, 4)
        values = tuple(
            f"{self.name}/{self._number:06}/{part:02}".encode() for part in range(parts)
        )
        commits = self.chance.random() < 0.75
        asked = False
        try:
            self._write(values)
            self._asked = self._number
            asked = True
            self._end(commits)
        except OSError:
            unknown = asked and commits
            outcome = Outcome.UNKNOWN if unknown else Outcome.ABORTED
            self._history.append(Written(values, outcome))
            if not unknown:
                self._asked = self._offset
            raise
        outcome = Outcome.COMMITTED if commits else Outcome.ABORTED
        self._history.append(Written(values, outcome))
        self.acknowledged += 1
        if commits:
            self._offset = self._number
        self._asked = self._offset

    def _write(self, values: tuple[bytes, ...]) -> None:
        producer_id, epoch = self._producer
        request = AddPartitionsToTxnRequest(
            transactions=[],
            v3_and_below_transactional_id=self.name,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnTopic(
                    name=self._topic, partitions=list(range(self.PARTITIONS))
                )
            ],
        )

        def add() -> None:
            answer = self.ask(3, request, AddPartitionsToTxnResponse)
            (topic,) = answer.results_by_topic_v3_and_below
            results = topic.results_by_partition
            expect("add partitions", *(each.partition_error_code for each in results))

        until_loaded(add)
        for number, value in enumerate(values):
            self._produce(number % self.PARTITIONS, value)
        offsets = AddOffsetsToTxnRequest(
            transactional_id=self.name,
            producer_id=producer_id,
            producer_epoch=epoch,
            group_id=self._group,
        )
        until_loaded(
            lambda: expect(
                "add offsets", self.ask(3, offsets, AddOffsetsToTxnResponse).error_code
            )
        )
        until_loaded(self._send_offset)

    def _produce(self, partition: int, value: bytes) -> None:
        assert self._connection is not None
        batch = wire.record_batch(
            [wire.RecordSpec(value)],
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            base_sequence=self._sequences[partition],
            attributes=_TRANSACTIONAL,
        )
        request = wire.produce(
            self._topic, partition, batch, acks=-1, transactional_id=self.name
        )
        answer = wire.parse_produce(self._connection.ask(request))
        expect("produce", answer.error_code)
        self._sequences[partition] += 1

    def _send_offset(self) -> None:
        partition = TxnOffsetCommitRequestPartition(
            partition_index=0, committed_offset=self._number, committed_metadata=""
        )
        request = TxnOffsetCommitRequest(
            transactional_id=self.name,
            group_id=self._group,
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            member_id="",
            topics=[
                TxnOffsetCommitRequestTopic(name=self._topic, partitions=[partition])
            ],
        )
        answer = self.ask(3, request, TxnOffsetCommitResponse)
        expect("send offsets", answer.topics[0].partitions[0].error_code)

    def _end(self, commits: bool) -> None:
        request = EndTxnRequest(
            transactional_id=self.name,
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            committed=commits,
        )
        until_loaded(
            lambda: expect("end", self.ask(3, request, EndTxnResponse).error_code)
        )

    def resume(self, address: Address) -> None:
        with wire.Connection(address, _TIMEOUT_S) as connection:
            self._connection = connection
            self.prepare()  # what is open is aborted, what is decided is completed

    def check(self, address: Address) -> list[str]:
        with wire.Connection(address, _TIMEOUT_S) as connection:
            now, _ = offset_of(connection, self._group, self._topic)
        found = []
        if now not in (self._offset, self._asked):
            found.append(f"{self._group}: offset {now}, committed {self._offset}")
        # Known from here on, and the same for ever.
        self._history = [
            _resolved(each, committed=now == self._asked) for each in self._history
        ]
        self._offset = self._asked = now
        places = [(self._topic, n) for n in range(self.PARTITIONS)]
        seen, _ = read_all(f"{address[0]}:{address[1]}", places)
        mine = f"{self.name}/".encode()
        own = {
            place: {at: value for at, value in values.items() if value.startswith(mine)}
            for place, values in seen.items()
        }
        return found + complaints_about(self._history, own)


def _resolved(written: Written, *, committed: bool) -> Written:
    if written.outcome is not Outcome.UNKNOWN:
        return written
    return written._replace(outcome=Outcome.COMMITTED if committed else Outcome.ABORTED)
