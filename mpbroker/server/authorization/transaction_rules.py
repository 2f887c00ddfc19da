"""The rules of APIs about transactions: see apis.py."""

from __future__ import annotations

from typing import Any, Final

from mpbroker.protocol.acl import AclOperation, ResourceType
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import add_partitions_to_txn as add_partitions_messages
from mpbroker.protocol.messages import describe_transactions as describe_messages
from mpbroker.protocol.messages import txn_offset_commit as offset_commit_messages
from mpbroker.server.authorization.authorization import (
    CLUSTER_DENIED,
    GROUP_DENIED,
    TRANSACTIONAL_ID_DENIED,
    Access,
    Verdict,
    refused,
)
from mpbroker.server.authorization.group_rules import may_group
from mpbroker.server.authorization.topic_rules import split

_O = AclOperation
_TOPIC_DENIED: Final = ErrorCode.TOPIC_AUTHORIZATION_FAILED
_GROUP_DENIED: Final = ErrorCode.GROUP_AUTHORIZATION_FAILED
_ID_DENIED: Final = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
_FOR_BROKERS_SINCE: Final = 4  # of AddPartitionsToTxn


def may_id(
    access: Access, operation: AclOperation, transactional_id: str, *, log: bool = True
) -> bool:
    return access.may(
        operation, ResourceType.TRANSACTIONAL_ID, transactional_id, log=log
    )


def write_id(access: Access, request: Any, version: int) -> Verdict | None:
    """Raises: ApiError: TRANSACTIONAL_ID_AUTHORIZATION_FAILED."""
    if not may_id(access, _O.WRITE, request.transactional_id):
        raise ApiError(_ID_DENIED, TRANSACTIONAL_ID_DENIED)
    return None


def init_producer_id(access: Access, request: Any, version: int) -> Verdict | None:
    """WRITE of the id; without one IDEMPOTENT_WRITE, or WRITE of any topic (KIP-679).

    Raises:
        ApiError: TRANSACTIONAL_ID_AUTHORIZATION_FAILED, CLUSTER_AUTHORIZATION_FAILED.
    """
    if request.transactional_id is not None:
        return write_id(access, request, version)
    if access.may_cluster(_O.IDEMPOTENT_WRITE, log=False) or access.may_some_topic(
        _O.WRITE
    ):
        return None
    access.require_cluster(_O.IDEMPOTENT_WRITE)  # which says so in the log
    raise ApiError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, CLUSTER_DENIED)


def add_partitions_to_txn(access: Access, request: Any, version: int) -> Verdict | None:
    """All or nothing: if one topic is denied, the others are not attempted.

    Raises:
        ApiError: CLUSTER_AUTHORIZATION_FAILED; from version 4 on it is for brokers.
    """
    if version >= _FOR_BROKERS_SINCE:
        access.require_cluster(_O.CLUSTER_ACTION)
        return None
    topics = request.v3_and_below_topics
    if not may_id(access, _O.WRITE, request.v3_and_below_transactional_id):
        return refused(_added(topics, {}, _ID_DENIED))
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
    return refused(_added(topics, codes, ErrorCode.OPERATION_NOT_ATTEMPTED))


def _added(topics: Any, codes: dict[str, ErrorCode], others: ErrorCode) -> Any:
    return add_partitions_messages.AddPartitionsToTxnResponse(
        results_by_topic_v3_and_below=[
            add_partitions_messages.AddPartitionsToTxnTopicResult(
                name=topic.name,
                results_by_partition=[
                    add_partitions_messages.AddPartitionsToTxnPartitionResult(
                        partition_index=index,
                        partition_error_code=codes.get(topic.name, others),
                    )
                    for index in topic.partitions
                ],
            )
            for topic in topics
        ]
    )


def add_offsets_to_txn(access: Access, request: Any, version: int) -> Verdict | None:
    """Raises: ApiError: as write_id(), or GROUP_AUTHORIZATION_FAILED."""
    write_id(access, request, version)
    if not may_group(access, _O.READ, request.group_id):
        raise ApiError(_GROUP_DENIED, GROUP_DENIED)
    return None


def txn_offset_commit(access: Access, request: Any, version: int) -> Verdict | None:
    response = offset_commit_messages.TxnOffsetCommitResponse

    def refusal(topic: Any, code: ErrorCode) -> Any:
        return offset_commit_messages.TxnOffsetCommitResponseTopic(
            name=topic.name,
            partitions=[
                offset_commit_messages.TxnOffsetCommitResponsePartition(
                    partition_index=each.partition_index, error_code=code
                )
                for each in topic.partitions
            ],
        )

    code = ErrorCode.NONE
    if not may_id(access, _O.WRITE, request.transactional_id):
        code = _ID_DENIED
    elif not may_group(access, _O.READ, request.group_id):
        code = _GROUP_DENIED
    if code:
        return refused(
            response(topics=[refusal(each, code) for each in request.topics])
        )
    request.topics, denied = split(
        request.topics, lambda topic: access.may_topic(_O.READ, topic.name)
    )
    if not denied:
        return None
    refusals = [refusal(topic, _TOPIC_DENIED) for topic in denied]
    if not request.topics:
        return refused(response(topics=refusals))

    def amend(answer: Any) -> None:
        answer.topics += refusals

    return Verdict(request, amend)


def describe_transactions(access: Access, request: Any, version: int) -> Verdict | None:
    """DESCRIBE of the id; topics that the sender may not describe are left out."""
    request.transactional_ids, denied = split(
        request.transactional_ids, lambda each: may_id(access, _O.DESCRIBE, each)
    )

    def amend(response: Any) -> None:
        for state in response.transaction_states:
            state.topics = [
                row
                for row in state.topics
                if access.may_topic(_O.DESCRIBE, row.topic, log=False)
            ]
        response.transaction_states += [
            describe_messages.TransactionState(
                transactional_id=transactional_id, error_code=_ID_DENIED
            )
            for transactional_id in denied
        ]

    return Verdict(request, amend)


def list_transactions(access: Access, request: Any, version: int) -> Verdict | None:
    def amend(response: Any) -> None:
        response.transaction_states = [
            state
            for state in response.transaction_states
            if may_id(access, _O.DESCRIBE, state.transactional_id, log=False)
        ]

    return Verdict(request, amend)
