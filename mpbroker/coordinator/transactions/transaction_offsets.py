"""Serve TxnOffsetCommit: commit offsets of a group as a part of a transaction.

The group checks that the member may commit. The transaction must be open in the group's
partition of __consumer_offsets; from version 5 on this request itself adds the
partition.

In a cluster the group has a shard in place of the partition, and the transaction's
coordinator is another node, mostly. It is asked (shard_transactions.py), and its
answer comes when the transaction has the shard on disk.

Source: Kafka protocol guide, "TxnOffsetCommit"; KIP-447, KIP-890.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.classic_group import ClassicGroup
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.groups.group_offsets import OffsetAndMetadata
from mpbroker.coordinator.outbox import NOW, Call
from mpbroker.coordinator.streams.streams_group import StreamsGroup
from mpbroker.coordinator.transactions.transaction_coordinator import (
    TransactionCoordinator,
)
from mpbroker.coordinator.transactions.transaction_metadata import EPOCH_BUMPS_SINCE
from mpbroker.metadata.topic_names import OFFSETS_TOPIC
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)

if TYPE_CHECKING:
    from mpbroker.cluster.groups.transaction_exchange import Question
    from mpbroker.coordinator.shard_transactions import ShardTransactions

_IMPLICIT_ADD_SINCE: Final = 5
_STALE_EPOCH_SINCE: Final = 9  # the version of OffsetCommit that has the error


class TransactionOffsets:
    """Serves TxnOffsetCommit.

    Args:
        shards: asks the transaction's coordinator; None: there is no cluster.
    """

    def __init__(
        self,
        groups: GroupCoordinator,
        coordinator: TransactionCoordinator,
        context: CoordinatorContext,
        shards: ShardTransactions | None = None,
    ) -> None:
        self._groups = groups
        self._coordinator = coordinator
        self._out = context.outbox
        self._topics = context.topics
        self._shards = shards
        if shards is not None:
            shards.on_asked = self.answer_question

    def txn_offset_commit(
        self,
        call: Call,
        request: TxnOffsetCommitRequest,
        now_ms: int,
        *,
        patient: bool = True,
    ) -> None:
        if self._shards is not None:
            self._ask(self._shards, call, request, now_ms)
            return
        group_id = request.group_id
        try:
            self._groups.check_group(group_id)
            self._coordinator.check(request.transactional_id)
            transaction = self._coordinator.find(
                request.transactional_id, request.producer_id, request.producer_epoch
            )
            if patient and self._coordinator.wait_for_end(
                transaction,
                lambda at_ms: self.txn_offset_commit(
                    call, request, at_ms, patient=False
                ),
                now_ms,
            ):
                return
            partition = (OFFSETS_TOPIC, self._groups.partition_for(group_id))
            after: tuple[int, ...] = NOW
            if call.version >= _IMPLICIT_ADD_SINCE:
                after = self._coordinator.add(
                    transaction, [partition], EPOCH_BUMPS_SINCE, now_ms
                )
            else:
                self._coordinator.verify(transaction, [partition])
        except ApiError as error:
            self._refuse(call, request, error.error_code)
            return
        if not after:
            self._commit(call, request, now_ms)
            return

        def go_on(durable: bool) -> None:
            if durable:
                self._commit(call, request, now_ms)
            else:
                self._refuse(call, request, ErrorCode.COORDINATOR_NOT_AVAILABLE)

        # The offsets are written only when the log has their transaction. If they were
        # written first, and the coordinator died in between, they would be pending for
        # ever.
        self._out.then(after, go_on)

    # -- in a cluster --------------------------------------------------------------

    def _ask(
        self,
        shards: ShardTransactions,
        call: Call,
        request: TxnOffsetCommitRequest,
        now_ms: int,
    ) -> None:
        try:
            self._groups.check_group(request.group_id)
            if not request.transactional_id:
                raise ApiError(ErrorCode.INVALID_REQUEST)
        except ApiError as error:
            self._refuse(call, request, error.error_code)
            return

        def answered(code: ErrorCode, now_ms: int) -> None:
            if code is ErrorCode.NONE:
                self._commit(call, request, now_ms)
            else:
                self._refuse(call, request, code)

        shards.ask(
            request.transactional_id,
            (request.producer_id, request.producer_epoch),
            self._groups.partition_for(request.group_id),
            answered,
            now_ms,
            adds=call.version >= _IMPLICIT_ADD_SINCE,
        )

    def answer_question(
        self, question: Question, now_ms: int, *, patient: bool = True
    ) -> None:
        """Answer whether a producer may commit offsets in a shard of some node."""
        shards = self._shards
        assert shards is not None
        try:
            self._coordinator.check(question.transactional_id)
            transaction = self._coordinator.find(
                question.transactional_id,
                question.producer_id,
                question.producer_epoch,
            )
            if patient and self._coordinator.wait_for_end(
                transaction,
                lambda at_ms: self.answer_question(question, at_ms, patient=False),
                now_ms,
            ):
                return
            if shards.is_ending(question.shard, question.producer_id):
                raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS)
            partition = (OFFSETS_TOPIC, question.shard)
            if question.adds:
                after = self._coordinator.add(
                    transaction, [partition], EPOCH_BUMPS_SINCE, now_ms
                )
            else:
                self._coordinator.verify(transaction, [partition])
                after = (self._coordinator.log_of(question.transactional_id),)
        except ApiError as error:
            shards.answer(question, error.error_code)
            return

        # The offsets will be on another machine's disk. A power cut here must not take
        # the transaction, without which nothing would ever end them.
        def go_on(durable: bool) -> None:
            code = ErrorCode.NONE if durable else ErrorCode.COORDINATOR_NOT_AVAILABLE
            shards.answer(question, code)

        self._out.then(after, go_on)

    # -- the offsets ---------------------------------------------------------------

    def _commit(self, call: Call, request: TxnOffsetCommitRequest, now_ms: int) -> None:
        group_id = request.group_id
        log = self._groups.partition_for(group_id)
        try:
            if self._shards is None:
                self._verify(request, log)
            self._groups.check_group(group_id)
            self._validate(request)
        except ApiError as error:
            self._refuse(call, request, error.error_code)
            return
        producer = request.producer_id, request.producer_epoch
        wrote = False
        topics = []
        for row in request.topics:
            count = self._topics.partition_count(row.name)
            partitions = []
            for part in row.partitions:
                index = part.partition_index
                metadata = part.committed_metadata or ""
                code = self._groups.offsets.judge(index, count, metadata)
                if code is ErrorCode.NONE:
                    committed = OffsetAndMetadata(
                        part.committed_offset,
                        part.committed_leader_epoch,
                        metadata,
                        now_ms,
                        -1,
                    )
                    self._groups.commit_in_transaction(
                        group_id, row.name, index, committed, producer
                    )
                    wrote = True
                partitions.append(
                    TxnOffsetCommitResponsePartition(
                        partition_index=index, error_code=code
                    )
                )
            topics.append(
                TxnOffsetCommitResponseTopic(name=row.name, partitions=partitions)
            )
        response = TxnOffsetCommitResponse(topics=topics)
        self._out.answer(call, response, (log,) if wrote else NOW)

    def _verify(self, request: TxnOffsetCommitRequest, log: int) -> None:
        """Check again that the transaction is open in a partition.

        It may have been aborted while its record was written.

        Raises:
            ApiError: it is not.
        """
        transaction = self._coordinator.find(
            request.transactional_id, request.producer_id, request.producer_epoch
        )
        self._coordinator.verify(transaction, [(OFFSETS_TOPIC, log)])

    def _validate(self, request: TxnOffsetCommitRequest) -> None:
        """Check that the member of a request may commit offsets in its generation.

        Raises:
            ApiError: it may not.
        """
        member_id, generation = request.member_id, request.generation_id
        group = self._groups.group(request.group_id)
        if group is None:
            if generation >= 0:
                raise ApiError(ErrorCode.ILLEGAL_GENERATION)
        elif isinstance(group, ClassicGroup):
            group.validate_offset_commit(
                member_id, request.group_instance_id, generation, transactional=True
            )
        elif generation >= 0 or member_id or request.group_instance_id is not None:
            try:
                partitions = (
                    (row.name, part.partition_index)
                    for row in request.topics
                    for part in row.partitions
                )
                if isinstance(group, StreamsGroup):
                    group.validate_offset_commit(
                        member_id, generation, _STALE_EPOCH_SINCE, partitions
                    )
                else:
                    group.validate_offset_commit(
                        member_id,
                        generation,
                        _STALE_EPOCH_SINCE,
                        (
                            (self._topics.topic_id(name), number)
                            for name, number in partitions
                        ),
                    )
            except ApiError as error:
                if error.error_code is ErrorCode.STALE_MEMBER_EPOCH:
                    raise ApiError(ErrorCode.ILLEGAL_GENERATION) from error
                raise

    def _refuse(
        self, call: Call, request: TxnOffsetCommitRequest, code: ErrorCode
    ) -> None:
        if code is ErrorCode.PRODUCER_FENCED:
            code = ErrorCode.INVALID_PRODUCER_EPOCH
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        topics = []
        for row in request.topics:
            count = self._topics.partition_count(row.name)
            partitions = [
                TxnOffsetCommitResponsePartition(
                    partition_index=part.partition_index,
                    error_code=code if 0 <= part.partition_index < count else unknown,
                )
                for part in row.partitions
            ]
            topics.append(
                TxnOffsetCommitResponseTopic(name=row.name, partitions=partitions)
            )
        self._out.answer(call, TxnOffsetCommitResponse(topics=topics))
