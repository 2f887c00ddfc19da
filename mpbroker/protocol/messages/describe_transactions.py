"""DescribeTransactions: the coordinator's state of transactional ids.

Source: Kafka protocol guide, "DescribeTransactions".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, INT64, STRING, Struct, array, field
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message


class DescribeTransactionsRequest(
    Message,
    api_key=ApiKey.DESCRIBE_TRANSACTIONS,
    versions=(0, 0),
    flexible_from=0,
    max_elements=MAX_REQUEST_NAMES,
):
    transactional_ids: list[str] = array(STRING)


class TopicData(Struct):
    topic: str = field(STRING)
    partitions: list[int] = array(INT32)


class TransactionState(Struct):
    error_code: int = field(INT16)
    transactional_id: str = field(STRING)
    transaction_state: str = field(STRING)
    transaction_timeout_ms: int = field(INT32)
    transaction_start_time_ms: int = field(INT64)
    producer_id: int = field(INT64)
    producer_epoch: int = field(INT16)
    topics: list[TopicData] = array(TopicData)


class DescribeTransactionsResponse(
    Message, api_key=ApiKey.DESCRIBE_TRANSACTIONS, versions=(0, 0), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    transaction_states: list[TransactionState] = array(TransactionState)
