"""TransactionDriver: sends the requests of a `TransactionManager` to coordinators.

It has one request in flight at a time, so responses come in order.

Source: KIP-98; KIP-890 for why a transaction of the first version does not use newer
versions of the requests: with these the broker does what the second version needs.
"""

from __future__ import annotations

from typing import Final

from mpbroker.client.client_request import ClientResponse
from mpbroker.client.errors import UnsupportedVersionError, error_code_of
from mpbroker.client.network_client import NetworkClient
from mpbroker.producer.accumulator import RecordAccumulator
from mpbroker.producer.config import ProducerSettings
from mpbroker.producer.errors import (
    AbortableError,
    FatalError,
    ProducerError,
    TransactionAbortedError,
    error_of,
)
from mpbroker.producer.transactions import (
    ABORTABLE_CODES,
    Pending,
    Step,
    TransactionManager,
    TransactionState,
)
from mpbroker.protocol.error_code import ErrorCode
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
from mpbroker.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from mpbroker.protocol.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.protocol.messages.init_producer_id import InitProducerIdResponse
from mpbroker.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)

_GROUP: Final = 0
_TRANSACTION: Final = 1

# The highest versions of the requests, by the version of the transaction.
_INIT_MAX_VERSIONS: Final = {Step.INIT: 5, Step.BUMP: 5}
_MAX_VERSIONS: Final = {
    1: {
        **_INIT_MAX_VERSIONS,
        Step.ADD_PARTITIONS: 3,
        Step.ADD_OFFSETS: 4,
        Step.COMMIT_OFFSETS: 4,
        Step.END: 4,
    },
    2: {**_INIT_MAX_VERSIONS, Step.COMMIT_OFFSETS: 5, Step.END: 5},
}
_FIND_BY_KEY_MAX_VERSION: Final = 3

_FIND_AGAIN: Final = frozenset(
    {ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR}
)


class TransactionDriver:
    """Sends a `TransactionManager`'s requests; only the sender's thread uses it."""

    def __init__(
        self,
        client: NetworkClient,
        manager: TransactionManager,
        accumulator: RecordAccumulator,
        settings: ProducerSettings,
    ) -> None:
        self._client = client
        self._manager = manager
        self._accumulator = accumulator
        self._settings = settings
        self._coordinators: dict[tuple[int, str], int] = {}
        self._busy = False
        self._not_before_ms = -float("inf")
        self._now_ms = 0.0

    def step(self, now_ms: float) -> float:
        """Send the request that is due; return how long to wait for the next, in ms."""
        self._now_ms = now_ms
        manager = self._manager
        manager.begin_turn()
        self._accumulator.completing_transaction = manager.is_completing
        if manager.state in (
            TransactionState.ABORTING,
            TransactionState.ABORTABLE_ERROR,
        ):
            self._abort_undrained()
        if self._busy:
            return float("inf")
        if now_ms < self._not_before_ms:
            return self._not_before_ms - now_ms
        pending = manager.next_pending(lambda: self._accumulator.has_incomplete)
        if pending is None:
            return float("inf")
        if pending.step is Step.END and not manager.has_begun_at_broker:
            manager.ended(pending)  # the broker does not know of the transaction
            return 0.0
        return self._send(pending, now_ms)

    def _abort_undrained(self) -> None:
        batches = self._accumulator.undrained()
        if batches:
            error = self._manager.error or TransactionAbortedError(
                "not sent: the transaction was aborted"
            )
            for batch in batches:
                self._manager.failed(batch, TransactionAbortedError(str(error)))
            self._accumulator.abort(batches, TransactionAbortedError(str(error)))

    # -- sending -----------------------------------------------------------------------

    def _send(self, pending: Pending, now_ms: float) -> float:
        key = self._coordinator_key(pending)
        node = self._coordinators.get(key)
        if node is None:
            return self._find(pending, key, now_ms)
        if not self._client.ready(node, now_ms):
            self._manager.put_back(pending)
            if not self._client.knows(node):
                # The coordinator is newer than our metadata, which is being updated.
                self._coordinators.pop(key, None)
                return self._settings.client.retry_backoff_ms
            delay_ms = self._client.delay_ms(node, now_ms)
            gone = not self._client.is_connected(node)  # else it only throttles us
            if gone and delay_ms > 0 and delay_ms != float("inf"):
                # The connection was lost: another broker may be the coordinator now.
                self._coordinators.pop(key, None)
            return delay_ms
        request, response_type = self._request(pending)
        self._busy = True
        self._manager.sending(pending)
        self._client.send(
            node,
            request,
            response_type,
            lambda answer: self._take(pending, key, answer),
            now_ms,
            max_version=_MAX_VERSIONS[self._manager.version][pending.step],
        )
        return float("inf")

    def _coordinator_key(self, pending: Pending) -> tuple[int, str]:
        if pending.step is Step.COMMIT_OFFSETS:
            assert pending.group is not None
            return _GROUP, pending.group.group_id
        return _TRANSACTION, self._manager.transactional_id

    def _find(self, pending: Pending, key: tuple[int, str], now_ms: float) -> float:
        self._manager.put_back(pending)
        node = self._client.least_loaded_node(now_ms)
        if node is None:
            return self._settings.client.retry_backoff_ms
        if not self._client.ready(node, now_ms):
            return min(
                self._client.delay_ms(node, now_ms),
                self._settings.client.retry_backoff_ms,
            )
        self._busy = True
        self._client.send(
            node,
            FindCoordinatorRequest(key=key[1], key_type=key[0]),
            FindCoordinatorResponse,
            lambda answer: self._take_coordinator(key, answer),
            now_ms,
            max_version=_FIND_BY_KEY_MAX_VERSION,
        )
        return float("inf")

    def _request(self, pending: Pending) -> tuple[Message, type[Message]]:
        manager = self._manager
        if pending.step in (Step.INIT, Step.BUMP):
            return manager.init_request(), InitProducerIdResponse
        if pending.step is Step.ADD_PARTITIONS:
            return self._add_partitions(), AddPartitionsToTxnResponse
        if pending.step is Step.END:
            end = EndTxnRequest(
                transactional_id=manager.transactional_id,
                producer_id=manager.producer_id,
                producer_epoch=manager.epoch,
                committed=pending.committed,
            )
            return end, EndTxnResponse
        assert pending.group is not None
        if pending.step is Step.ADD_OFFSETS:
            add = AddOffsetsToTxnRequest(
                transactional_id=manager.transactional_id,
                producer_id=manager.producer_id,
                producer_epoch=manager.epoch,
                group_id=pending.group.group_id,
            )
            return add, AddOffsetsToTxnResponse
        return self._commit_offsets(pending), TxnOffsetCommitResponse

    def _add_partitions(self) -> Message:
        topics: dict[str, list[int]] = {}
        for topic, partition in sorted(self._manager.adding):
            topics.setdefault(topic, []).append(partition)
        return AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self._manager.transactional_id,
            v3_and_below_producer_id=self._manager.producer_id,
            v3_and_below_producer_epoch=self._manager.epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnTopic(name=name, partitions=partitions)
                for name, partitions in topics.items()
            ],
        )

    def _commit_offsets(self, pending: Pending) -> Message:
        group, offsets = pending.group, pending.offsets
        assert group is not None and offsets is not None
        topics: dict[str, list[TxnOffsetCommitRequestPartition]] = {}
        for partition, position in offsets.items():
            topics.setdefault(partition.topic, []).append(
                TxnOffsetCommitRequestPartition(
                    partition_index=partition.partition,
                    committed_offset=position.offset,
                    committed_leader_epoch=position.leader_epoch,
                    committed_metadata=position.metadata,
                )
            )
        return TxnOffsetCommitRequest(
            transactional_id=self._manager.transactional_id,
            group_id=group.group_id,
            producer_id=self._manager.producer_id,
            producer_epoch=self._manager.epoch,
            generation_id=group.generation_id,
            member_id=group.member_id,
            group_instance_id=group.group_instance_id,
            topics=[
                TxnOffsetCommitRequestTopic(name=name, partitions=partitions)
                for name, partitions in topics.items()
            ],
        )

    # -- answers -----------------------------------------------------------------------

    def _take_coordinator(self, key: tuple[int, str], answer: ClientResponse) -> None:
        self._busy = False
        response = answer.response
        if not isinstance(response, FindCoordinatorResponse):
            self._lost(answer)
            return
        if not response.error_code:
            self._coordinators[key] = response.node_id
            return
        code = error_code_of(response.error_code)
        if code.retriable:
            self._manager.note_trouble(f"no coordinator: {code.name}")
            self._back_off()
            return
        what = f"no coordinator of {key[1]!r}"
        error = error_of(response.error_code, what, response.error_message)
        self._manager.fail(_as_abortable(error, code))

    def _take(
        self, pending: Pending, key: tuple[int, str], answer: ClientResponse
    ) -> None:
        self._busy = False
        if answer.response is None:
            self._lost(answer, pending, key)
            return
        code = _worst_code(answer.response)
        if not code:
            self._done(pending, answer.response)
            return
        known = error_code_of(code)
        if known in _FIND_AGAIN:
            self._coordinators.pop(key, None)
        if known.retriable:
            self._manager.put_back(pending, was_sent=True)
            self._manager.note_trouble(known.name)
            self._back_off()
            return
        error = error_of(code, pending.operation.what)
        self._manager.fail(_as_abortable(error, known), pending)

    def _lost(
        self,
        answer: ClientResponse,
        pending: Pending | None = None,
        key: tuple[int, str] | None = None,
    ) -> None:
        if isinstance(answer.error, UnsupportedVersionError):
            error = FatalError(
                f"this broker has no transactions: {answer.error}",
                ErrorCode.UNSUPPORTED_VERSION,
            )
            self._manager.fail(error, pending)
            return
        if pending is not None:
            self._manager.put_back(pending, was_sent=True)
        if key is not None:
            self._coordinators.pop(key, None)
        self._manager.note_trouble(str(answer.error))
        self._back_off()

    def _back_off(self) -> None:
        self._not_before_ms = self._now_ms + self._settings.client.retry_backoff_ms

    def _done(self, pending: Pending, response: Message) -> None:
        manager = self._manager
        if isinstance(response, InitProducerIdResponse):
            manager.initialized(pending, response)
        elif pending.step is Step.ADD_PARTITIONS:
            manager.added_partitions()
        elif pending.step is Step.ADD_OFFSETS:
            manager.added_offsets(pending)
        elif isinstance(response, EndTxnResponse):
            manager.ended(pending, response)
        else:
            pending.operation.finish()


def _worst_code(response: Message) -> int:
    """Return the error code of a response; 0 if it has none.

    If the response has a code for each partition, return the first that is an error.
    Return OPERATION_NOT_ATTEMPTED only if there is no other.
    """
    codes: list[int] = []
    if isinstance(response, AddPartitionsToTxnResponse):
        codes = [
            entry.partition_error_code
            for topic in response.results_by_topic_v3_and_below
            for entry in topic.results_by_partition
        ]
    elif isinstance(response, TxnOffsetCommitResponse):
        codes = [
            entry.error_code for topic in response.topics for entry in topic.partitions
        ]
    else:
        return int(getattr(response, "error_code", 0))
    # OPERATION_NOT_ATTEMPTED only tells that another part was refused.
    codes = [code for code in codes if code]
    real = [code for code in codes if code != ErrorCode.OPERATION_NOT_ATTEMPTED]
    return (real or codes or [0])[0]


def _as_abortable(error: ProducerError, code: ErrorCode) -> ProducerError:
    if code not in ABORTABLE_CODES:
        return error
    return AbortableError(f"{error}; call abort_transaction()", code)
