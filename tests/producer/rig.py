"""A sender turn by turn: no threads, no sockets, a clock that a test moves."""

from __future__ import annotations

import random
import time

from mpbroker.client.addresses import Address
from mpbroker.client.metadata import Metadata
from mpbroker.client.network_client import NetworkClient
from mpbroker.producer.accumulator import GATHER_MS, RecordAccumulator
from mpbroker.producer.batch import RecordFuture, record_size
from mpbroker.producer.buffer_pool import BufferPool
from mpbroker.producer.config import ProducerSettings
from mpbroker.producer.idempotence import Idempotence
from mpbroker.producer.metrics import ProducerMetrics
from mpbroker.producer.sender import Sender
from mpbroker.producer.transactions import TransactionManager
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.find_coordinator import FindCoordinatorResponse
from mpbroker.protocol.messages.init_producer_id import InitProducerIdResponse
from mpbroker.protocol.messages.produce import (
    BatchIndexAndErrorMessage,
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionProduceResponse,
    ProduceResponse,
    TopicProduceResponse,
)
from mpbroker.protocol.records.batch_header import BatchHeader, parse_batch_header
from mpbroker.protocol.records.record_batch import iter_records
from tests.client.fake_wire import FakeWire, Sent

PRODUCER_ID = 4000


class SenderRig:
    """Everything below `Producer`, with topic "t" of two partitions on node 0."""

    def __init__(self, topics: dict[str, list[int]] | None = None, **settings: object):
        self.wire = FakeWire(topics or {"t": [0, 0]})
        self.settings = ProducerSettings.parse(
            {"bootstrap_servers": "boot:9092", "linger_ms": 0, **settings}
        )
        self.metadata = Metadata(rng=random.Random(1))
        for name in self.wire.topics:
            self.metadata.add_topic(name, self.wire.now_ms)
        self.client = NetworkClient(
            self.wire,
            self.metadata,
            self.settings.client,
            lambda host, port: [Address("10.0.0.1", port)],
            self.wire.clock,
            random.Random(2),
        )
        self.state: Idempotence | None = None
        if self.settings.transactional_id:
            self.state = TransactionManager(self.settings.transactional_id, 60_000)
        elif self.settings.idempotent:
            self.state = Idempotence()
        self.pool = BufferPool(self.settings.buffer_memory)
        self.accumulator = RecordAccumulator(
            self.settings, self.pool, self.state, random.Random(3)
        )
        self.metrics = ProducerMetrics()
        self.sender = Sender(
            self.client,
            self.metadata,
            self.accumulator,
            self.settings,
            self.state,
            self.metrics,
            self.wire.clock,
        )
        self.next_offset = 0
        self.epoch = 0

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            self.sender.run_once()
            for asked in self.wire.waiting(ApiKey.INIT_PRODUCER_ID):
                if ApiKey.INIT_PRODUCER_ID not in self.wire.silent:
                    self.wire.answer(
                        InitProducerIdResponse(
                            producer_id=PRODUCER_ID, producer_epoch=self.epoch
                        ),
                        asked,
                    )
            for asked in self.wire.waiting(ApiKey.FIND_COORDINATOR):
                if ApiKey.FIND_COORDINATOR not in self.wire.silent:
                    self.wire.answer(FindCoordinatorResponse(node_id=1), asked)

    def ready(self) -> SenderRig:
        """Connect, and get a producer id."""
        self.turns(8)
        for node in (0, 1):
            self.client.ready(node, self.wire.now_ms)
            self.turns(2)
        assert self.state is None or self.state.has_producer_id
        return self

    def append(
        self,
        value: bytes = b"value",
        partition: int = 0,
        topic: str = "t",
        callback: object = None,
        key: bytes | None = None,
    ) -> RecordFuture:
        """Append as `Producer.send` does."""
        record = int(time.time() * 1000), key, value, ()
        size = record_size(record)
        queue = self.accumulator.topic(topic).queue(partition)
        number = 0
        if isinstance(self.state, TransactionManager):
            number = self.state.number
            self.state.append(number, (topic, partition), lambda: None)
        future = self.accumulator.try_append(queue, record, size, callback, number)
        if future is not None:
            return future
        self.accumulator.seal_full(queue, size)
        charge = max(self.settings.batch_size, size + 100)
        with self.pool.grant(charge) as grant:
            grant.take(0)
            return self.accumulator.append_new(
                queue, record, size, grant, callback, self.wire.now_ms, number
            )

    def send(self, value: bytes = b"value", **where: object) -> RecordFuture:
        """Append a record and send it in a batch of its own."""
        self.pass_ms(
            GATHER_MS
        )  # or it would wait for others, if something is in flight
        future = self.append(value, **where)
        self.turns()
        return future

    def introduce(self) -> SenderRig:
        """Have a record of each partition acknowledged, so that more may be in flight.

        Sequences and offsets go on at 1 then.
        """
        for partition in (0, 1):
            self.append(b"first", partition=partition)
        self.pass_ms(self.settings.linger_ms)
        self.turns()
        self.reply()
        self.next_offset = 1
        return self

    @property
    def produces(self) -> list[Sent]:
        """Produce requests that wait for an answer, oldest first."""
        return self.wire.waiting(ApiKey.PRODUCE)

    def batches(self, sent: Sent) -> dict[tuple[str, int], bytes]:
        return {
            (topic.name, data.index): bytes(data.records)
            for topic in sent.request.topic_data
            for data in topic.partition_data
        }

    def header(self, sent: Sent, partition: int = 0) -> BatchHeader:
        return parse_batch_header(self.batches(sent)["t", partition])

    def values(self, sent: Sent, partition: int = 0) -> list[bytes | None]:
        return [r.value for r in iter_records(self.batches(sent)["t", partition])]

    def reply(
        self,
        sent: Sent | None = None,
        code: int = 0,
        base_offset: int | None = None,
        message: str | None = None,
        record_errors: dict[int, str | None] | None = None,
        leader: tuple[int, int] | None = None,
        log_start_offset: int = -1,
        throttle_ms: int = 0,
        codes: dict[int, int] | None = None,
        turn: bool = True,
    ) -> None:
        """Answer a Produce, the oldest if none is named, and let it be taken."""
        sent = sent or self.produces[0]
        topics: dict[str, list[PartitionProduceResponse]] = {}
        for (topic, partition), batch in self.batches(sent).items():
            number = code if codes is None else codes.get(partition, 0)
            offset = base_offset
            if offset is None:
                offset = -1 if number else self.next_offset
                self.next_offset += 0 if number else len(list(iter_records(batch)))
            entry = PartitionProduceResponse(
                index=partition,
                error_code=number,
                base_offset=offset,
                error_message=message,
                log_start_offset=log_start_offset,
                record_errors=[
                    BatchIndexAndErrorMessage(
                        batch_index=index, batch_index_error_message=text
                    )
                    for index, text in (record_errors or {}).items()
                ],
            )
            if leader is not None:
                entry.current_leader = LeaderIdAndEpoch(
                    leader_id=leader[0], leader_epoch=leader[1]
                )
            topics.setdefault(topic, []).append(entry)
        response = ProduceResponse(
            responses=[
                TopicProduceResponse(name=name, partition_responses=entries)
                for name, entries in topics.items()
            ],
            throttle_time_ms=throttle_ms,
        )
        if leader is not None:
            response.node_endpoints = [
                NodeEndpoint(node_id=leader[0], host=f"b{leader[0]}", port=9092)
            ]
        self.wire.answer(response, sent)
        if turn:
            self.turns()

    def answer(self, response: Message) -> None:
        self.wire.answer(response)
        self.turns(2)

    def pass_ms(self, ms: float) -> None:
        self.wire.now_ms += ms
