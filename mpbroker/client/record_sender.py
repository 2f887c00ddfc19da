"""Write records to one topic in large batches, one being built while one is on its way.

Every record is written once and each partition's in the order given: with acks=all the
broker is asked for a producer id, so that a batch sent twice (its answer was lost with
the connection) is recognised by its sequence number.

Source: KIP-98 for producer ids and sequences.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from mpbroker.client.cluster import Cluster
from mpbroker.client.errors import (
    BrokerUnavailableError,
    RecordsNotWrittenError,
    UnsupportedVersionError,
    check_error,
    describe_error,
    error_code_of,
)
from mpbroker.client.transport import Transport
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.record_batch import (
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    Codec,
    RecordBatchBuilder,
    increment_sequence,
)

ACKS_ALL: Final = -1

_NAMED_TOPICS_MAX_VERSION: Final = 12  # from 13 on, topics go by id
_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms

# Length, timestamp and offset deltas, key and value lengths, header count: varints of
# at most 5, 10, 5, 5, 5 and 5 bytes, and a byte of attributes.
_RECORD_OVERHEAD_BYTES: Final = 36

Header = tuple[str, bytes | None]


class _Batch(NamedTuple):
    """A built batch; it stays as it is when it is sent again."""

    data: bytes
    record_count: int
    first_number: int  # among the records appended, from 1
    last_number: int


class _Sent(NamedTuple):
    transport: Transport
    correlation_id: int
    batches: dict[int, _Batch]


class RecordSender:
    """Collects records by partition and sends them; see the module.

    Attributes:
        written: records that the broker said are written (with acks=0: sent).
        partition_count: of the topic, when this began.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        *,
        acks: int = ACKS_ALL,
        codec: Codec = Codec.NONE,
        level: int | None = None,
        batch_bytes: int = 1_000_000,
    ) -> None:
        """Learn the topic, letting the broker create it if it does.

        Args:
            cluster: where to; its timeout also limits how long a batch is retried.
            topic: the topic.
            acks: -1, 1 or 0.
            codec: of every batch.
            level: the codec's level; None is its default.
            batch_bytes: uncompressed; only a record that alone is larger exceeds it.

        Raises:
            ApiError: no such topic, and none is created.
            BrokerUnavailableError: no broker answers.
        """
        self.written = 0
        self._cluster = cluster
        self._topic = topic
        self._acks = acks
        self._codec = codec
        self._level = level
        self._batch_bytes = batch_bytes
        self._appended = 0
        self._builders: dict[int, RecordBatchBuilder] = {}
        self._numbers: dict[int, tuple[int, int]] = {}
        self._sequences: dict[int, int] = {}
        self._sent: list[_Sent] = []
        self._again: dict[int, _Batch] = {}
        self._give_up_at: float | None = None  # set by the first failure of a series
        self._leaders: dict[int, int] = {}
        self._learn_leaders(auto_create=True)
        self.partition_count = len(self._leaders)
        self._any_partition = random.randrange(self.partition_count)
        self._producer_id, self._producer_epoch = NO_PRODUCER_ID, NO_PRODUCER_EPOCH
        if acks == ACKS_ALL:
            self._init_producer_id()

    def _learn_leaders(self, *, auto_create: bool = False) -> None:
        topic = self._cluster.topic(self._topic, auto_create=auto_create)
        self._leaders = {
            partition.partition_index: partition.leader_id
            for partition in topic.partitions
        }

    def _init_producer_id(self) -> None:
        request = InitProducerIdRequest(
            transactional_id=None, transaction_timeout_ms=60000
        )
        try:
            response = self._cluster.request(request, InitProducerIdResponse)
        except UnsupportedVersionError:
            return  # an old broker: a lost answer then ends in an error, not a retry
        check_error(response.error_code, "producer id")
        self._producer_id = response.producer_id
        self._producer_epoch = response.producer_epoch

    def append(
        self,
        partition: int | None,
        timestamp: int,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[Header] = (),
    ) -> None:
        """Add a record; if its batch has no room for it, send all batches first.

        Args:
            partition: None for any: the same until it is sent, then another, so that
                batches get full (KIP-480).
            timestamp: in ms.
            key: None is null.
            value: None is null.
            headers: names and values.

        Raises:
            As `flush`.
        """
        index = self._any_partition if partition is None else partition
        builder = self._builders.get(index)
        if builder is not None:
            size = builder.size_in_bytes + _size_bound(key, value, headers)
            if size > self._batch_bytes:
                self.send()
                builder = None
                index = self._any_partition if partition is None else partition
        self._appended += 1
        if builder is None:
            builder = self._builders[index] = self._new_builder(index)
            self._numbers[index] = self._appended, self._appended
        else:
            self._numbers[index] = self._numbers[index][0], self._appended
        builder.append(timestamp, key, value, headers)

    def _new_builder(self, partition: int) -> RecordBatchBuilder:
        idempotent = self._producer_id != NO_PRODUCER_ID
        return RecordBatchBuilder(
            self._codec,
            self._level,
            producer_id=self._producer_id,
            producer_epoch=self._producer_epoch,
            base_sequence=(
                self._sequences.get(partition, 0) if idempotent else NO_SEQUENCE
            ),
        )

    def send(self) -> None:
        """Send what was appended, after the answers to what was sent before.

        Raises:
            RecordsNotWrittenError: names each batch that was refused, and why.
            BrokerUnavailableError: the fate of the records sent last is not known.
        """
        batches = {}
        for partition, builder in self._builders.items():
            count = builder.record_count
            batches[partition] = _Batch(
                builder.build(), count, *self._numbers[partition]
            )
            sequence = self._sequences.get(partition, 0)
            self._sequences[partition] = increment_sequence(sequence, count)
        self._builders.clear()
        self._any_partition = (self._any_partition + 1) % self.partition_count
        self.wait()
        if batches:
            self._send(batches)

    def flush(self) -> None:
        """Send what was appended and wait until all of it is written.

        Raises:
            As `send`.
        """
        self.send()
        self.wait()

    def _send(self, batches: dict[int, _Batch]) -> None:
        by_leader: dict[int, dict[int, _Batch]] = {}
        for partition, batch in batches.items():
            by_leader.setdefault(self._leaders[partition], {})[partition] = batch
        for leader, group in by_leader.items():
            transport: Transport | None = None
            try:
                transport = self._cluster.broker(leader)
                sent = transport.send(
                    self._request(group),
                    ProduceResponse,
                    max_version=_NAMED_TOPICS_MAX_VERSION,
                    expect_answer=self._acks != 0,
                )
            except BrokerUnavailableError as error:
                self._lost(transport, group, error)
                continue
            if self._acks == 0:
                self.written += sum(batch.record_count for batch in group.values())
            else:
                self._sent.append(_Sent(transport, sent, group))

    def _lost(
        self,
        transport: Transport | None,
        batches: dict[int, _Batch],
        error: BrokerUnavailableError,
    ) -> None:
        """Keep batches to be sent again, if that cannot write them twice."""
        if transport is not None:
            self._cluster.drop(transport)
        if self._producer_id == NO_PRODUCER_ID or self._is_too_late():
            count = sum(batch.record_count for batch in batches.values())
            which = (
                f"{count} records sent last were" if count > 1 else "last record was"
            )
            raise BrokerUnavailableError(
                f"{error}; it is not known whether the {which} written"
            ) from error
        self._again.update(batches)

    def _is_too_late(self) -> bool:
        now = time.monotonic()
        if self._give_up_at is None:
            self._give_up_at = now + self._cluster.timeout_s
        return now >= self._give_up_at

    def _request(self, batches: dict[int, _Batch]) -> ProduceRequest:
        return ProduceRequest(
            acks=self._acks,
            timeout_ms=int(self._cluster.timeout_s * 1000),
            topic_data=[
                TopicProduceData(
                    name=self._topic,
                    partition_data=[
                        PartitionProduceData(index=partition, records=batch.data)
                        for partition, batch in batches.items()
                    ],
                )
            ],
        )

    def wait(self) -> None:
        """Wait for the answers to what was sent, sending again what may be.

        Raises:
            As `send`.
        """
        refused: list[str] = []
        while self._sent or self._again:
            if self._again:
                self._send_again()
            sent, self._sent = self._sent, []
            for request in sent:
                refused += self._take_answer(request)
            if refused:
                raise RecordsNotWrittenError("\n".join(refused))
        self._give_up_at = None

    def _take_answer(self, request: _Sent) -> list[str]:
        """Wait for one answer; return a line for each batch that was refused."""
        try:
            response = request.transport.wait(request.correlation_id, ProduceResponse)
        except BrokerUnavailableError as error:
            self._lost(request.transport, request.batches, error)
            return []
        refused = []
        for topic in response.responses:
            for answer in topic.partition_responses:
                batch = request.batches[answer.index]
                code = error_code_of(answer.error_code)
                if code in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
                    self.written += batch.record_count
                elif code in _SEND_AGAIN and not self._is_too_late():
                    self._again[answer.index] = batch
                else:
                    refused.append(self._describe_refusal(answer, batch))
        return refused

    def _send_again(self) -> None:
        batches, self._again = self._again, {}
        time.sleep(_RETRY_INTERVAL_S)
        try:
            self._learn_leaders()
        except BrokerUnavailableError as error:
            self._lost(None, batches, error)
        else:
            self._send(batches)

    def _describe_refusal(self, answer: PartitionProduceResponse, batch: _Batch) -> str:
        line = (
            f"{self._topic} partition {answer.index}: {_records(batch)} not written: "
            + describe_error(answer.error_code, answer.error_message)
        )
        for entry in answer.record_errors:
            line += f"\n  record {entry.batch_index + 1} of the batch"
            if entry.batch_index_error_message:
                line += f": {entry.batch_index_error_message}"
        return line


def _size_bound(
    key: bytes | None, value: bytes | None, headers: Sequence[Header]
) -> int:
    """Return what a record takes in a batch, or a little more."""
    size = _RECORD_OVERHEAD_BYTES + len(key or b"") + len(value or b"")
    for name, header_value in headers:
        # UTF-8 has up to four bytes a character.
        size += 10 + 4 * len(name) + len(header_value or b"")
    return size


def _records(batch: _Batch) -> str:
    if batch.record_count == 1:
        return f"1 record (number {batch.first_number} of the input)"
    return (
        f"{batch.record_count} records (of numbers {batch.first_number}-"
        f"{batch.last_number} of the input)"
    )


_SEND_AGAIN: Final = frozenset(
    {
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
    }
)
