"""Serve TxnOffsetCommit: offsets of a group that count if a transaction commits.

The group checks that the member may commit. The transaction must be open in the group's
partition of __consumer_offsets; from version 5 on this request itself adds the
partition.

Source: Kafka protocol guide, "TxnOffsetCommit"; KIP-447, KIP-890.
"""

from __future__ import annotations

from typing import Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.classic_group import ClassicGroup
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.groups.group_offsets import OffsetAndMetadata
from mpbroker.coordinator.outbox import NOW, Call
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

_IMPLICIT_ADD_SINCE: Final = 5
_STALE_EPOCH_SINCE: Final = 9  # the version of OffsetCommit that has the error


class TransactionOffsets:
    """Serves TxnOffsetCommit."""

    def __init__(
        self,
        groups: GroupCoordinator,
        coordinator: TransactionCoordinator,
        context: CoordinatorContext,
    ) -> None:
        self._groups = groups
        self._coordinator = coordinator
        self._out = context.outbox
        self._topics = context.topics

    def txn_offset_commit(
        self,
        call: Call,
        request: TxnOffsetCommitRequest,
        now_ms: int,
        *,
        patient: bool = True,
    ) -> None:
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

        # The offsets are written when the log has the transaction that they are in.
        # Otherwise a death in between would leave them pending for ever.
        self._out.then(after, go_on)

    def _commit(self, call: Call, request: TxnOffsetCommitRequest, now_ms: int) -> None:
        group_id = request.group_id
        log = self._groups.partition_for(group_id)
        try:
            # Checked again: it may have been aborted while its record was written.
            transaction = self._coordinator.find(
                request.transactional_id, request.producer_id, request.producer_epoch
            )
            self._coordinator.verify(transaction, [(OFFSETS_TOPIC, log)])
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

    def _validate(self, request: TxnOffsetCommitRequest) -> None:
        """Raise unless the member may commit; a request need not name one."""
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
                group.validate_offset_commit(member_id, generation, _STALE_EPOCH_SINCE)
            except ApiError as error:
                if error.error_code is ErrorCode.STALE_MEMBER_EPOCH:
                    raise ApiError(ErrorCode.ILLEGAL_GENERATION) from error
                raise

    def _refuse(
        self, call: Call, request: TxnOffsetCommitRequest, code: ErrorCode
    ) -> None:
        if code is ErrorCode.PRODUCER_FENCED:
            code = ErrorCode.INVALID_PRODUCER_EPOCH
        topics = [
            TxnOffsetCommitResponseTopic(
                name=row.name,
                partitions=[
                    TxnOffsetCommitResponsePartition(
                        partition_index=part.partition_index, error_code=code
                    )
                    for part in row.partitions
                ],
            )
            for row in request.topics
        ]
        self._out.answer(call, TxnOffsetCommitResponse(topics=topics))
