"""Add partitions to transactions: AddPartitionsToTxn, AddOffsetsToTxn and Produce.

If a handler gets a transactional Produce for a partition that is not open to its
producer, it forwards the request to the coordinator. From version 12 on the request
itself adds the partition to the transaction; in older versions the client must have
added it before. Then the request goes back to the handlers.

Source: Kafka protocol guide; KIP-890; Kafka's AddPartitionsToTxnManager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.outbox import NOW, Call
from mpbroker.coordinator.transactions.transaction_coordinator import (
    TransactionCoordinator,
    fenced_as_of,
)
from mpbroker.coordinator.transactions.transaction_metadata import (
    EPOCH_BUMPS_SINCE,
    TransactionMetadata,
)
from mpbroker.metadata.topic_names import OFFSETS_TOPIC, TopicPartition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.add_offsets_to_txn import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
)
from mpbroker.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTopicResult,
    AddPartitionsToTxnTransaction,
)
from mpbroker.protocol.messages.produce import (
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from mpbroker.protocol.records.batch_header import RecordBatchError
from mpbroker.protocol.transactional_produce import producer_of

_BATCHED_SINCE: Final = 4
_FENCED_SINCE: Final = 2
_ABORTABLE_IN_ADD_SINCE: Final = 5
_ABORTABLE_IN_PRODUCE_SINCE: Final = 11
_IMPLICIT_ADD_SINCE: Final = 12
_TOPIC_IDS_SINCE: Final = 13
# A producer would not retry a Produce with one of these. It gets NOT_ENOUGH_REPLICAS.
_TRY_AGAIN: Final = frozenset(
    {
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
    }
)


class TransactionPartitions:
    """Adds partitions to transactions, and verifies that partitions are in one.

    Args:
        group_partition: returns the partition of __consumer_offsets that has the
            records of a group.
        put_back: returns a Produce to the handlers, which then execute it.

    Attributes:
        is_ending: returns whether a shard of groups, in a cluster, has still to write
            the end of a producer's transaction.
    """

    def __init__(
        self,
        coordinator: TransactionCoordinator,
        context: CoordinatorContext,
        group_partition: Callable[[str], int],
        put_back: Callable[[Call], None],
    ) -> None:
        self.is_ending: Callable[[int, int], bool] = lambda shard, producer_id: False
        self._coordinator = coordinator
        self._out = context.outbox
        self._topics = context.topics
        self._group_partition = group_partition
        self._put_back = put_back

    # -- AddPartitionsToTxn --------------------------------------------------------

    def add_partitions_to_txn(
        self,
        call: Call,
        request: AddPartitionsToTxnRequest,
        now_ms: int,
        *,
        patient: bool = True,
    ) -> None:
        batched = call.version >= _BATCHED_SINCE
        rows = request.transactions if batched else [_single(request)]
        if patient and len(rows) == 1 and self._waits(call, rows[0], request, now_ms):
            return
        after: tuple[int, ...] = NOW
        results = []
        for row in rows:
            topics, logs = self._add_row(call, row, now_ms)
            after += logs
            results.append(
                AddPartitionsToTxnResult(
                    transactional_id=row.transactional_id, topic_results=topics
                )
            )
        if batched:
            answer = AddPartitionsToTxnResponse(results_by_transaction=results)
        else:
            answer = AddPartitionsToTxnResponse(
                results_by_topic_v3_and_below=results[0].topic_results
            )
        self._out.answer(call, answer, after)

    def _waits(
        self,
        call: Call,
        row: AddPartitionsToTxnTransaction,
        request: AddPartitionsToTxnRequest,
        now_ms: int,
    ) -> bool:
        """Park a request while markers of the producer's last transaction are written.

        Return False if no markers are being written, so that the request goes on.
        """
        try:
            transaction = self._find(row)
        except ApiError:
            return False
        return self._coordinator.wait_for_end(
            transaction,
            lambda at_ms: self.add_partitions_to_txn(
                call, request, at_ms, patient=False
            ),
            now_ms,
        )

    def _find(self, row: AddPartitionsToTxnTransaction) -> TransactionMetadata:
        self._coordinator.check(row.transactional_id)
        return self._coordinator.find(
            row.transactional_id, row.producer_id, row.producer_epoch
        )

    def _add_row(
        self, call: Call, row: AddPartitionsToTxnTransaction, now_ms: int
    ) -> tuple[list[AddPartitionsToTxnTopicResult], tuple[int, ...]]:
        wanted = [
            (topic.name, partition)
            for topic in row.topics
            for partition in topic.partitions
        ]
        refused = {
            (topic, partition): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            for topic, partition in wanted
            if not 0 <= partition < self._topics.partition_count(topic)
        }
        for topic, partition in wanted:
            if not self._topics.has_transactions(topic):
                # This node cannot append the topic's markers: the nodes of a cluster
                # share the topic, or another node has it.
                refused[topic, partition] = ErrorCode.POLICY_VIOLATION
        try:
            if refused:
                # All partitions are added or none; the answer names those that cannot
                # be added.
                raise ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED)
            transaction = self._find(row)
            if row.verify_only:
                self._coordinator.verify(transaction, wanted)
                return _results(row.topics, ErrorCode.NONE, refused), NOW
            logs = self._coordinator.add(transaction, wanted, 0, now_ms)
            return _results(row.topics, ErrorCode.NONE, refused), logs
        except ApiError as error:
            code = fenced_as_of(error.error_code, call.version, _FENCED_SINCE)
            if (
                code is ErrorCode.INVALID_TXN_STATE
                and call.version >= _ABORTABLE_IN_ADD_SINCE
            ):
                code = ErrorCode.TRANSACTION_ABORTABLE
            return _results(row.topics, code, refused), NOW

    # -- AddOffsetsToTxn -----------------------------------------------------------

    def add_offsets_to_txn(
        self,
        call: Call,
        request: AddOffsetsToTxnRequest,
        now_ms: int,
        *,
        patient: bool = True,
    ) -> None:
        try:
            self._coordinator.check(request.transactional_id)
            if not request.group_id:
                raise ApiError(ErrorCode.INVALID_GROUP_ID)
            transaction = self._coordinator.find(
                request.transactional_id, request.producer_id, request.producer_epoch
            )
            if patient and self._coordinator.wait_for_end(
                transaction,
                lambda at_ms: self.add_offsets_to_txn(
                    call, request, at_ms, patient=False
                ),
                now_ms,
            ):
                return
            number = self._group_partition(request.group_id)
            if self.is_ending(number, request.producer_id):
                raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS)
            partition = (OFFSETS_TOPIC, number)
            after = self._coordinator.add(transaction, [partition], 0, now_ms)
            self._out.answer(call, AddOffsetsToTxnResponse(), after)
        except ApiError as error:
            code = fenced_as_of(error.error_code, call.version, _FENCED_SINCE)
            self._out.answer(call, AddOffsetsToTxnResponse(error_code=code))

    # -- Produce -------------------------------------------------------------------

    def produce(
        self,
        call: Call,
        request: ProduceRequest,
        now_ms: int,
        *,
        patient: bool = True,
    ) -> None:
        """Add the partitions of a Produce to its producer's transaction.

        Then return the request to the handlers, which append its batches.

        If a partition cannot be opened, answer the Produce with an error.
        """
        after: tuple[int, ...] = NOW
        try:
            transactional_id = request.transactional_id or ""
            self._coordinator.check(transactional_id)
            for producer, wanted in self._wanted(call, request).items():
                transaction = self._coordinator.find(transactional_id, *producer)
                if patient and self._coordinator.wait_for_end(
                    transaction,
                    lambda at_ms: self.produce(call, request, at_ms, patient=False),
                    now_ms,
                ):
                    return
                if call.version >= _IMPLICIT_ADD_SINCE:
                    after += self._coordinator.add(
                        transaction, wanted, EPOCH_BUMPS_SINCE, now_ms
                    )
                else:
                    self._coordinator.verify(transaction, wanted)
        except ApiError as error:
            self._refuse(call, request, error.error_code)
            return
        if not after:
            self._give_back(call)
            return

        def go_on(durable: bool) -> None:
            if durable:
                self._give_back(call)
            else:
                self._refuse(call, request, ErrorCode.COORDINATOR_NOT_AVAILABLE)

        self._out.then(after, go_on)

    def _give_back(self, call: Call) -> None:
        if not call.answered:
            call.answered = True  # a handler answers it
            self._put_back(call)

    def _wanted(
        self, call: Call, request: ProduceRequest
    ) -> dict[tuple[int, int], Sequence[TopicPartition]]:
        """Return the existing partitions that a request writes to, by producer.

        A producer is a pair of producer id and epoch.

        Raises:
            ApiError: CORRUPT_MESSAGE.
        """
        wanted: dict[tuple[int, int], list[TopicPartition]] = {}
        for row in request.topic_data:
            name: str | None = row.name
            if call.version >= _TOPIC_IDS_SINCE:
                name = self._topics.topic_name(row.topic_id)
            count = self._topics.partition_count(name) if name else 0
            if name is not None and not self._topics.has_transactions(name):
                continue  # the handler refuses it
            for partition in row.partition_data:
                if name is None or not 0 <= partition.index < count:
                    continue  # the handler answers with the error
                try:
                    producer = producer_of(partition.records)
                except RecordBatchError as error:
                    raise ApiError(ErrorCode.CORRUPT_MESSAGE, str(error)) from error
                if producer is not None:
                    wanted.setdefault(producer, []).append((name, partition.index))
        return dict(wanted)

    def _refuse(self, call: Call, request: ProduceRequest, code: ErrorCode) -> None:
        if code in _TRY_AGAIN:
            code = ErrorCode.NOT_ENOUGH_REPLICAS
        elif code is ErrorCode.PRODUCER_FENCED:
            code = ErrorCode.INVALID_PRODUCER_EPOCH
        elif (
            code is ErrorCode.INVALID_TXN_STATE
            and call.version >= _ABORTABLE_IN_PRODUCE_SINCE
        ):
            code = ErrorCode.TRANSACTION_ABORTABLE
        response = ProduceResponse(
            responses=[
                TopicProduceResponse(
                    name=row.name,
                    topic_id=row.topic_id,
                    partition_responses=[
                        PartitionProduceResponse(
                            index=partition.index, error_code=code, base_offset=-1
                        )
                        for partition in row.partition_data
                    ],
                )
                for row in request.topic_data
            ]
        )
        self._out.answer(call, response)


def _single(request: AddPartitionsToTxnRequest) -> AddPartitionsToTxnTransaction:
    """Convert a request of version 0 to 3, for one transaction, to the later form."""
    return AddPartitionsToTxnTransaction(
        transactional_id=request.v3_and_below_transactional_id,
        producer_id=request.v3_and_below_producer_id,
        producer_epoch=request.v3_and_below_producer_epoch,
        verify_only=False,
        topics=request.v3_and_below_topics,
    )


def _results(
    topics: Sequence[AddPartitionsToTxnTopic],
    code: ErrorCode,
    refused: Mapping[TopicPartition, ErrorCode],
) -> list[AddPartitionsToTxnTopicResult]:
    return [
        AddPartitionsToTxnTopicResult(
            name=topic.name,
            results_by_partition=[
                AddPartitionsToTxnPartitionResult(
                    partition_index=partition,
                    partition_error_code=refused.get((topic.name, partition), code),
                )
                for partition in topic.partitions
            ],
        )
        for topic in topics
    ]
