"""ListTransactions: list transactional ids that match filters.

The filters are state and producer id; from version 1 the duration of the transaction,
from version 2 a regular expression.

Source: Kafka protocol guide, "ListTransactions"; KIP-994, KIP-1152.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, INT64, STRING, Struct, array, field
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message


class ListTransactionsRequest(
    Message,
    api_key=ApiKey.LIST_TRANSACTIONS,
    versions=(0, 2),
    flexible_from=0,
    max_elements=MAX_REQUEST_NAMES,
):
    state_filters: list[str] = array(STRING)
    producer_id_filters: list[int] = array(INT64)
    duration_filter: int = field(INT64, "1+", default=-1)
    transactional_id_pattern: str | None = field(
        STRING, "2+", nullable="2+", default=None
    )


class TransactionState(Struct):
    transactional_id: str = field(STRING)
    producer_id: int = field(INT64)
    transaction_state: str = field(STRING)


class ListTransactionsResponse(
    Message, api_key=ApiKey.LIST_TRANSACTIONS, versions=(0, 2), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    unknown_state_filters: list[str] = array(STRING)
    transaction_states: list[TransactionState] = array(TransactionState)
