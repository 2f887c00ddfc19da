"""Clients of a cluster that report to a ledger whatever they are told.

Each is a thread. It goes on through all faults, until it is stopped.
"""

from __future__ import annotations

import contextlib
import random
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Final

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import response_header_version
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchResponse,
)
from tests.bench import wire
from tests.broker.load import frame
from tests.cluster_faults.ledger import Ledger, Walk, value

TOPIC: Final = "load"
PATIENCE_S: Final = 120.0
# Of a request to one node, which may be stopped.
_ANSWER_S: Final = 3.0
_OFFSET_FETCH: Final = 8  # its version: the first one with several groups
_COMMIT_EVERY_S: Final = 0.2
_MOST_UNANSWERED: Final = 2000
_TRY_AGAIN: Final = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,  # the node has just started
    ErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.KAFKA_STORAGE_ERROR,
}
_SETTINGS: Final = {
    "log_level": 0,
    # A node that is stopped answers no more, and closes nothing.
    "socket.timeout.ms": 10_000,
    "socket.connection.setup.timeout.ms": 3000,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 500,
    "topic.metadata.refresh.interval.ms": 2000,
}
Address = tuple[str, int]


class Pauses:
    """The longest time in which something stood still.

    Attributes:
        last: when it went on.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.last = time.monotonic()

    def begin(self) -> None:
        self.last = time.monotonic()

    def note(self) -> None:
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self.last)
        self.last = now


class Client(Thread):
    """A thread that works until it is stopped.

    Attributes:
        pauses: between two successes.
    """

    def __init__(self, name: str, ledger: Ledger) -> None:
        super().__init__(name=name, daemon=True)
        self._ledger = ledger
        self._over = Event()
        self.pauses = Pauses()

    def end(self) -> None:
        """Tell it to stop; join() waits for that."""
        self._over.set()

    @property
    def is_ending(self) -> bool:
        return self._over.is_set()

    def run(self) -> None:
        self.pauses.begin()
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - or the campaign would not notice
            self._ledger.complain(f"{self.name}: {error!r}")

    def _work(self) -> None:
        raise NotImplementedError


class IdempotentWriter(Client):
    """Writes to all partitions with librdkafka, acks=all, until each is acknowledged.

    Args:
        name: the producer's name in the ledger.
        ledger: told of each answer.
        bootstrap: of the cluster.
        rate: records a second.
    """

    def __init__(self, name: str, ledger: Ledger, bootstrap: str, rate: int) -> None:
        super().__init__(name, ledger)
        self._rate = rate
        self._servers = bootstrap

    def _work(self) -> None:
        producer = Producer(
            {
                **_SETTINGS,
                "bootstrap.servers": self._servers,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 10,
                "batch.size": 8000,
                "request.timeout.ms": 8000,
                "message.timeout.ms": 0,  # try for ever
            }
        )
        unanswered = 0

        def answered(partition: int, number: int) -> Callable[..., None]:
            def note(error: KafkaError | None, message: Message) -> None:
                nonlocal unanswered
                unanswered -= 1
                self.pauses.note()
                if error is not None:
                    self._ledger.complain(f"{self.name}: refused: {error}")
                    return
                self._ledger.acknowledge(self.name, partition, number, message.offset())

            return note

        began, count = time.monotonic(), 0
        while not self._over.is_set():
            producer.poll(0.02)
            due = int((time.monotonic() - began) * self._rate)
            while count < due and unanswered < _MOST_UNANSWERED:
                partition = count % self._ledger.partitions
                number = count // self._ledger.partitions
                unanswered += 1
                producer.produce(
                    TOPIC,
                    value(self.name, partition, number),
                    partition=partition,
                    on_delivery=answered(partition, number),
                )
                count += 1
            if count < due:  # what is late is not made up for
                began = time.monotonic() - count / self._rate
        if left := producer.flush(PATIENCE_S):
            self._ledger.complain(f"{self.name}: {left} records have no answer")


class PlainWriter(Client):
    """Writes one record after the other without a producer id, each until it succeeds.

    So it knows how often it has sent each.
    """

    def __init__(
        self, name: str, ledger: Ledger, nodes: Sequence[Address], rate: int
    ) -> None:
        super().__init__(name, ledger)
        self._nodes = deque(nodes)
        self._pause_s = 1 / rate
        self._connection: wire.Connection | None = None

    def _work(self) -> None:
        count = 0
        while not self._over.wait(self._pause_s):
            partition = count % self._ledger.partitions
            number = count // self._ledger.partitions
            batch = wire.record_batch(
                [wire.RecordSpec(value(self.name, partition, number))]
            )
            until = time.monotonic() + PATIENCE_S
            while (offset := self._send(partition, batch)) is None:
                if time.monotonic() > until:
                    self._ledger.complain(f"{self.name} gets no answer")
                    return
                self._ledger.sent_again(self.name, partition, number)
                time.sleep(0.05)
            self.pauses.note()
            self._ledger.acknowledge(self.name, partition, number, offset)
            count += 1
        self._disconnect()

    def _send(self, partition: int, batch: bytes) -> int | None:
        """Return the offset; None if it may be or may not be written."""
        try:
            if self._connection is None:
                self._connection = wire.Connection(self._nodes[0], 10)
            request = wire.produce(TOPIC, partition, batch, acks=-1)
            answer = wire.parse_produce(self._connection.ask(request))
        except OSError:
            self._disconnect()
            return None
        if answer.error_code == 0:
            return answer.base_offset
        if answer.error_code not in _TRY_AGAIN:
            code = ErrorCode(answer.error_code).name
            self._ledger.complain(f"{self.name}: refused: {code}")
        self._disconnect()
        return None

    def _disconnect(self) -> None:
        """Go on at the next node."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._nodes.rotate(-1)


class Member(Client):
    """A member of a group, which commits what it has read.

    Args:
        group: the group's id, and its name in the ledger.
        number: which of its members this is.
        ledger: told of each record, before its offset is committed.
        bootstrap: of the cluster.
        settings: of the consumer: the group's protocol.
        pauses: between two records of the group; shared by its members.
    """

    def __init__(
        self,
        group: str,
        number: int,
        ledger: Ledger,
        bootstrap: str,
        settings: dict[str, object],
        pauses: Pauses,
    ) -> None:
        super().__init__(f"{group}-{number}", ledger)
        self.group = group
        self._settings = {**consumer_settings(group, bootstrap), **settings}
        self.pauses = pauses
        self.records = 0
        # By partition: what comes next, what is to be committed, and what was
        # committed when the partition was given to this member.
        self._next: dict[int, int] = {}
        self._pending: dict[int, int] = {}
        self._floors: dict[int, int] = {}

    def _work(self) -> None:
        consumer = Consumer(self._settings)
        consumer.subscribe(
            [TOPIC],
            on_assign=self._take,
            on_revoke=self._give_back,
            on_lost=self._lose,
        )
        commit_at = 0.0
        while not self._over.is_set():
            message = consumer.poll(0.1)
            if message is not None:
                if message.error() is None:
                    self._read(message)
                else:
                    self._judge(message.error())
            if self._pending and time.monotonic() > commit_at:
                self._commit(consumer)
                commit_at = time.monotonic() + _COMMIT_EVERY_S
        consumer.close()

    def _judge(self, error: KafkaError) -> None:
        # Others say that a node or a coordinator is not there: it looks for another.
        if error.fatal() or error.code() in (
            KafkaError._AUTO_OFFSET_RESET,
            KafkaError._NO_OFFSET,
        ):
            self._ledger.complain(f"{self.name}: {error}")

    def _take(self, _: Consumer, places: Sequence[TopicPartition]) -> None:
        floor = self._ledger.floor(self.group)
        for each in places:
            self._floors[each.partition] = floor[each.partition]
            self._forget(each.partition)

    def _give_back(self, consumer: Consumer, places: Sequence[TopicPartition]) -> None:
        if self._pending:
            self._commit(consumer)
        self._lose(consumer, places)

    def _lose(self, _: Consumer, places: Sequence[TopicPartition]) -> None:
        for each in places:
            self._forget(each.partition)

    def _forget(self, partition: int) -> None:
        self._next.pop(partition, None)
        self._pending.pop(partition, None)

    def _read(self, message: Message) -> None:
        partition, offset = message.partition(), message.offset()
        expected = self._next.get(partition)
        if expected is None:
            if offset < self._floors[partition]:
                self._ledger.complain(
                    f"{self.name} begins at {partition}@{offset}, and the group has"
                    f" committed {self._floors[partition]}"
                )
        elif offset != expected:
            self._ledger.complain(
                f"{self.name}: {partition}@{offset} follows {expected - 1}"
            )
        self._ledger.show(self.name, partition, offset, message.value())
        self._ledger.read(self.group, partition, offset)
        self._next[partition] = self._pending[partition] = offset + 1
        self.records += 1
        self.pauses.note()

    def _commit(self, consumer: Consumer) -> None:
        floor = self._ledger.floor(self.group)
        wanted = dict(self._pending)
        self._pending.clear()
        places = [TopicPartition(TOPIC, *each) for each in wanted.items()]
        # A commit that fails says that another member has the partitions, or that there
        # is no coordinator: then their next records are read again, or committed.
        with contextlib.suppress(KafkaException):
            done = consumer.commit(offsets=places, asynchronous=False)
            self._ledger.commit(
                self.group,
                floor,
                {each.partition: each.offset for each in done if each.error is None},
            )


def consumer_settings(group: str, bootstrap: str) -> dict[str, object]:
    return {
        **_SETTINGS,
        "bootstrap.servers": bootstrap,
        "group.id": group,
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "fetch.wait.max.ms": 100,
        "fetch.error.backoff.ms": 50,
        "fetch.queue.backoff.ms": 50,
        "queued.max.messages.kbytes": 1024,
    }


class Onlooker(Client):
    """Reads along, and asks for committed offsets: each time any node, drawn by chance.

    Args:
        ledger: told of what it sees.
        nodes: their addresses.
        groups: whose offsets are asked for.
        seed: of its choices.

    Attributes:
        answers: how often it was told the offsets of a group.
    """

    def __init__(
        self, ledger: Ledger, nodes: Sequence[Address], groups: Sequence[str], seed: int
    ) -> None:
        super().__init__("onlooker", ledger)
        self._nodes = nodes
        self._groups = groups
        self._draw = random.Random(seed)
        self.answers = 0
        self._walks = [
            Walk(ledger, "along the way", each) for each in range(ledger.partitions)
        ]

    def _work(self) -> None:
        while not self._over.wait(0.05):
            node = self._draw.choice(self._nodes)
            with contextlib.suppress(OSError):
                read_on(self._draw.choice(self._walks), node, self._ledger)
                self._ask_for_offsets(node)

    def _ask_for_offsets(self, node: Address) -> None:
        floors = {group: self._ledger.floor(group) for group in self._groups}
        asked = [
            OffsetFetchRequestGroup(group_id=each, topics=None) for each in self._groups
        ]
        request = OffsetFetchRequest(groups=asked).encode(_OFFSET_FETCH)
        with wire.Connection(node, _ANSWER_S) as connection:
            payload = connection.ask(frame(ApiKey.OFFSET_FETCH, _OFFSET_FETCH, request))
        at = 4 + response_header_version(ApiKey.OFFSET_FETCH, _OFFSET_FETCH)
        answer = OffsetFetchResponse.decode(_OFFSET_FETCH, memoryview(payload)[at:])
        for group in answer.groups:
            if group.error_code != ErrorCode.NONE:
                continue  # another node has the group
            self.answers += 1
            told = dict.fromkeys(range(self._ledger.partitions), -1)
            for topic in group.topics:
                for each in topic.partitions:
                    told[each.partition_index] = each.committed_offset
            self._ledger.observe(group.group_id, floors[group.group_id], told)


def read_on(
    walk: Walk,
    node: Address,
    ledger: Ledger,
    note: Callable[[bytes], object] = lambda _: None,
) -> int:
    """Read from a node what it shows of a walk's partition.

    Args:
        walk: where to go on.
        node: the address of the node that is asked.
        ledger: told of what contradicts itself.
        note: called with the whole batches of each answer.

    Returns:
        The node's high watermark.

    Raises:
        OSError: the node answers no more.
    """
    with wire.Connection(node, _ANSWER_S) as connection:
        while True:
            asked = wire.fetch(TOPIC, walk.partition, walk.next, max_bytes=1 << 20)
            answer = wire.parse_fetch(connection.ask(asked))
            if answer.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                ledger.complain(f"{node}: {walk.partition}@{walk.next} is out of range")
            if answer.error_code or not answer.records:
                return answer.high_watermark
            before = walk.next
            for record in wire.iter_records(answer.records):
                if record.offset >= before:
                    walk.take(record.offset, record.value)
            note(_whole_batches(answer.records))
            if walk.next == before:
                return answer.high_watermark


def _whole_batches(records: bytes) -> bytes:
    """Return a Fetch answer's batches without the last one if it is cut."""
    end = 0
    while end + 12 <= len(records):
        (length,) = struct.unpack_from(">i", records, end + 8)
        if end + 12 + length > len(records):
            break
        end += 12 + length
    return records[:end]
