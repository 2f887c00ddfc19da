"""Serve the requests by which Kafka's brokers read and write share groups' states.

In Kafka the leader of a partition sends them to the share coordinator. Here both are
one process, which needs no such requests. But a broker of Kafka announces these APIs
to all clients, and serves clients that may do CLUSTER_ACTION. So does this broker.

There is a single broker, so leader epochs are not checked.

Source: KIP-932; Kafka's ShareCoordinatorShard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from mpbroker.coordinator.outbox import Call, Outbox
from mpbroker.coordinator.share.share_partition import RecordState, StateBatch
from mpbroker.coordinator.share.share_records import ShareKey
from mpbroker.coordinator.share.share_service import ShareReader
from mpbroker.coordinator.share.share_states import UNINITIALIZED, ShareStates
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.delete_share_group_state import (
    DeleteShareGroupStateRequest,
)
from mpbroker.protocol.messages.initialize_share_group_state import (
    InitializeShareGroupStateRequest,
)
from mpbroker.protocol.messages.read_share_group_state import (
    ReadShareGroupStateRequest,
)
from mpbroker.protocol.messages.read_share_group_state import StateBatch as ReadBatch
from mpbroker.protocol.messages.read_share_group_state_summary import (
    ReadShareGroupStateSummaryRequest,
)
from mpbroker.protocol.messages.write_share_group_state import (
    WriteShareGroupStateRequest,
)
from mpbroker.protocol.share_state_answer import state_answer

_LEADER_EPOCH: Final = 0
_STATES: Final = frozenset(
    {RecordState.AVAILABLE, RecordState.ACKNOWLEDGED, RecordState.ARCHIVED}
)


class ShareStateApis:
    """Initializes, reads, writes and deletes the states of share-partitions."""

    def __init__(
        self, outbox: Outbox, states: ShareStates, reader: ShareReader
    ) -> None:
        self._out = outbox
        self._states = states
        self._reader = reader

    def initialize_share_group_state(
        self,
        call: Call,
        request: InitializeShareGroupStateRequest,
        now_ms: int,
    ) -> None:
        def initialize(key: ShareKey, row: Any, result: Any) -> None:
            self._check_exists(key)
            self._check_epoch(key, row.state_epoch)
            self._states.begin(key, row.start_offset, row.state_epoch, now_ms)

        self._answer(call, request, initialize)

    def read_share_group_state(
        self,
        call: Call,
        request: ReadShareGroupStateRequest,
        now_ms: int,
    ) -> None:
        def read(key: ShareKey, row: Any, result: Any) -> None:
            state = self._states.get(key)
            if state is None:
                raise _uninitialized("Read")
            result.state_epoch = state.state_epoch
            result.start_offset = UNINITIALIZED
            if state.share is not None:
                result.start_offset = state.share.start_offset
                result.state_batches = [
                    ReadBatch(
                        first_offset=each.first,
                        last_offset=each.last,
                        delivery_state=each.state,
                        delivery_count=each.delivery_count,
                    )
                    for each in state.share.state_batches()
                ]

        self._answer(call, request, read)

    def read_share_group_state_summary(
        self,
        call: Call,
        request: ReadShareGroupStateSummaryRequest,
        now_ms: int,
    ) -> None:
        def read(key: ShareKey, row: Any, result: Any) -> None:
            self._check_exists(key)
            state = self._states.get(key)
            result.start_offset = UNINITIALIZED
            result.leader_epoch = _LEADER_EPOCH
            if state is None:
                return
            result.state_epoch = state.state_epoch
            if state.share is not None:
                result.start_offset = state.share.start_offset
                result.delivery_complete_count = state.share.finished_count

        self._answer(call, request, read)

    def write_share_group_state(
        self,
        call: Call,
        request: WriteShareGroupStateRequest,
        now_ms: int,
    ) -> None:
        def write(key: ShareKey, row: Any, result: Any) -> None:
            if self._states.get(key) is None:
                raise _uninitialized("Write")
            self._check_epoch(key, row.state_epoch)
            batches = [_batch_of(each) for each in row.state_batches]
            self._states.write(key, row.state_epoch, row.start_offset, batches, now_ms)

        self._answer(call, request, write)

    def delete_share_group_state(
        self,
        call: Call,
        request: DeleteShareGroupStateRequest,
        now_ms: int,
    ) -> None:
        def delete(key: ShareKey, row: Any, result: Any) -> None:
            self._check_exists(key)
            if self._states.get(key) is not None:
                self._states.delete(key)

        self._answer(call, request, delete)

    def _answer(
        self,
        call: Call,
        request: Message,
        execute: Callable[[ShareKey, Any, Any], None],
    ) -> None:
        """Execute a request partition by partition, and answer it."""
        group_id: str = request.group_id  # type: ignore[attr-defined]
        after: set[int] = set()

        def fill(topic_id: bytes, row: Any, result: Any) -> None:
            key = ShareKey(group_id, topic_id, row.partition)
            try:
                _check(key)
                execute(key, row, result)
                after.add(self._states.log_of(key))
            except ApiError as error:
                result.error_code = error.error_code
                result.error_message = error.message or None

        self._out.answer(call, state_answer(request, fill), tuple(after))

    def _check_exists(self, key: ShareKey) -> None:
        """Raise an error if a share-partition's topic or partition does not exist.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION.
        """
        if not self._reader.has_partition(key.topic_id, key.partition):
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)

    def _check_epoch(self, key: ShareKey, state_epoch: int) -> None:
        """Raise an error if a request's state epoch is older than that of the state.

        Raises:
            ApiError: FENCED_STATE_EPOCH.
        """
        state = self._states.get(key)
        if state is not None and state_epoch < state.state_epoch:
            raise ApiError(
                ErrorCode.FENCED_STATE_EPOCH,
                "The share coordinator rejected the request because the share-group"
                " state epoch did not match.",
            )


def _check(key: ShareKey) -> None:
    """Raise an error if a share-partition has no group id or a negative number.

    Raises:
        ApiError: INVALID_REQUEST.
    """
    if key.partition < 0:
        raise ApiError(
            ErrorCode.INVALID_REQUEST, "The partition id cannot be negative."
        )
    if not key.group_id:
        raise ApiError(ErrorCode.INVALID_REQUEST, "The group id cannot be empty.")


def _uninitialized(verb: str) -> ApiError:
    return ApiError(
        ErrorCode.INVALID_REQUEST,
        f"{verb} operation on uninitialized share partition not allowed.",
    )


def _batch_of(row: Any) -> StateBatch:
    """Convert the state of some offsets in a request to a StateBatch.

    Raises:
        ApiError: INVALID_REQUEST: the given offsets, state or count are invalid.
    """
    if (
        not 0 <= row.first_offset <= row.last_offset
        or row.delivery_state not in _STATES
        or row.delivery_count < 0
    ):
        raise ApiError(ErrorCode.INVALID_REQUEST, "A state batch is invalid.")
    return StateBatch(
        row.first_offset, row.last_offset, row.delivery_state, row.delivery_count
    )
