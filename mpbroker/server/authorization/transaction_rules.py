"""Define the authorization rules of the APIs about transactions.

A rule takes the sender's access, the request and the version of the API. It removes the
parts of the request that are denied, and returns a function that adds their refusals to
the response (rulings.py). If all is denied, it may return the whole answer. apis.py
names the rule of each API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mpbroker.protocol.acl import AclOperation, ResourceType
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from mpbroker.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopicResult,
)
from mpbroker.protocol.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    TransactionState,
)
from mpbroker.protocol.messages.init_producer_id import InitProducerIdRequest
from mpbroker.protocol.messages.list_transactions import (
    ListTransactionsRequest,
    ListTransactionsResponse,
)
from mpbroker.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from mpbroker.server.authorization.authorization import (
    CLUSTER_DENIED,
    TRANSACTIONAL_ID_DENIED,
    Access,
)
from mpbroker.server.authorization.rulings import Amend, Ruling, append_to, take_denied

_O = AclOperation
_TOPIC_DENIED: Final = ErrorCode.TOPIC_AUTHORIZATION_FAILED
_GROUP_DENIED: Final = ErrorCode.GROUP_AUTHORIZATION_FAILED
_ID_DENIED: Final = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
_FOR_BROKERS_SINCE: Final = 4  # of AddPartitionsToTxn


def _may_id(
    access: Access, operation: AclOperation, transactional_id: str, *, log: bool = True
) -> bool:
    return access.may(
        operation, ResourceType.TRANSACTIONAL_ID, transactional_id, log=log
    )


def write_id(access: Access, request: Any, version: int) -> None:
    """Require WRITE permission for the transactional id.

    Raises:
        ApiError: TRANSACTIONAL_ID_AUTHORIZATION_FAILED.
    """
    if not _may_id(access, _O.WRITE, request.transactional_id):
        raise ApiError(_ID_DENIED, TRANSACTIONAL_ID_DENIED)


def init_producer_id(
    access: Access, request: InitProducerIdRequest, version: int
) -> None:
    """Require WRITE permission for the transactional id.

    A request without an id needs IDEMPOTENT_WRITE of the cluster, or WRITE of at least
    one topic.

    Raises:
        ApiError: TRANSACTIONAL_ID_AUTHORIZATION_FAILED if the id is denied;
            CLUSTER_AUTHORIZATION_FAILED if a request without an id is denied.

    Source: KIP-679.
    """
    if request.transactional_id is not None:
        return write_id(access, request, version)
    if access.may_cluster(_O.IDEMPOTENT_WRITE, log=False) or access.may_some_topic(
        _O.WRITE
    ):
        return None
    access.require_cluster(_O.IDEMPOTENT_WRITE)  # it logs the denial
    raise ApiError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, CLUSTER_DENIED)


def add_partitions_to_txn(
    access: Access, request: AddPartitionsToTxnRequest, version: int
) -> AddPartitionsToTxnResponse | None:
    """Require WRITE permission for the transactional id, and WRITE for all topics.

    If one topic is denied, nothing is added: the topics that are allowed get
    OPERATION_NOT_ATTEMPTED. From version 4 on the request is for brokers only, and
    needs CLUSTER_ACTION of the cluster instead.

    Raises:
        ApiError: CLUSTER_AUTHORIZATION_FAILED: the sender of version 4 or later lacks
            CLUSTER_ACTION.
    """
    if version >= _FOR_BROKERS_SINCE:
        access.require_cluster(_O.CLUSTER_ACTION)
        return None
    topics = request.v3_and_below_topics
    if not _may_id(access, _O.WRITE, request.v3_and_below_transactional_id):
        return _added(topics, {}, _ID_DENIED)
    codes: dict[str, ErrorCode] = {}
    for topic in topics:
        found = access.topics.topic(topic.name)
        is_internal = found is not None and found.is_internal
        if is_internal or not access.may_topic(_O.WRITE, topic.name):
            codes[topic.name] = _TOPIC_DENIED
        elif found is None:
            codes[topic.name] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if _TOPIC_DENIED not in codes.values():
        return None
    return _added(topics, codes, ErrorCode.OPERATION_NOT_ATTEMPTED)


def _added(
    topics: Sequence[Any], codes: dict[str, ErrorCode], others: ErrorCode
) -> AddPartitionsToTxnResponse:
    """Return an answer with an error code for each topic.

    Args:
        topics: the topics of the request.
        codes: the codes of some topics, by name.
        others: the code of the topics that have none in ``codes``.
    """
    return AddPartitionsToTxnResponse(
        results_by_topic_v3_and_below=[
            AddPartitionsToTxnTopicResult(
                name=topic.name,
                results_by_partition=[
                    AddPartitionsToTxnPartitionResult(
                        partition_index=index,
                        partition_error_code=codes.get(topic.name, others),
                    )
                    for index in topic.partitions
                ],
            )
            for topic in topics
        ]
    )


def add_offsets_to_txn(
    access: Access, request: AddOffsetsToTxnRequest, version: int
) -> None:
    """Require WRITE permission for the transactional id, and READ for the group.

    Raises:
        ApiError: TRANSACTIONAL_ID_AUTHORIZATION_FAILED if the id is denied,
            GROUP_AUTHORIZATION_FAILED if the group is denied.
    """
    write_id(access, request, version)
    access.require_group(_O.READ, request.group_id)


def txn_offset_commit(
    access: Access, request: TxnOffsetCommitRequest, version: int
) -> Ruling:
    """Require WRITE for the transactional id, READ for the group and for each topic."""
    code = ErrorCode.NONE
    if not _may_id(access, _O.WRITE, request.transactional_id):
        code = _ID_DENIED
    elif not access.may_group(_O.READ, request.group_id):
        code = _GROUP_DENIED
    if code:
        return TxnOffsetCommitResponse(
            topics=[_refused_commit(topic, code) for topic in request.topics]
        )
    denied = take_denied(
        request, "topics", lambda topic: access.may_topic(_O.READ, topic.name)
    )
    refusals = [_refused_commit(topic, _TOPIC_DENIED) for topic in denied]
    if refusals and not request.topics:
        return TxnOffsetCommitResponse(topics=refusals)
    return append_to("topics", refusals)


def _refused_commit(topic: Any, code: ErrorCode) -> TxnOffsetCommitResponseTopic:
    return TxnOffsetCommitResponseTopic(
        name=topic.name,
        partitions=[
            TxnOffsetCommitResponsePartition(
                partition_index=each.partition_index, error_code=code
            )
            for each in topic.partitions
        ],
    )


def describe_transactions(
    access: Access, request: DescribeTransactionsRequest, version: int
) -> Amend:
    """Require DESCRIBE permission for each transactional id.

    Topics for which the sender lacks DESCRIBE are left out of the response.
    """
    denied = take_denied(
        request, "transactional_ids", lambda each: _may_id(access, _O.DESCRIBE, each)
    )

    def amend(response: DescribeTransactionsResponse) -> None:
        for state in response.transaction_states:
            state.topics = [
                row
                for row in state.topics
                if access.may_topic(_O.DESCRIBE, row.topic, log=False)
            ]
        response.transaction_states += [
            TransactionState(transactional_id=transactional_id, error_code=_ID_DENIED)
            for transactional_id in denied
        ]

    return amend


def list_transactions(
    access: Access, request: ListTransactionsRequest, version: int
) -> Amend:
    """Require nothing, and list only the ids for which the sender has DESCRIBE."""

    def amend(response: ListTransactionsResponse) -> None:
        response.transaction_states = [
            state
            for state in response.transaction_states
            if _may_id(access, _O.DESCRIBE, state.transactional_id, log=False)
        ]

    return amend
