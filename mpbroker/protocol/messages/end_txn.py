"""EndTxn: commit or abort a transaction.

From version 5 the response has the producer's next id and epoch.

Source: Kafka protocol guide, "EndTxn"; KIP-890.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import BOOLEAN, INT16, INT32, INT64, STRING, field
from mpbroker.protocol.message import Message


class EndTxnRequest(Message, api_key=ApiKey.END_TXN, versions=(0, 5), flexible_from=3):
    transactional_id: str = field(STRING)
    producer_id: int = field(INT64)
    producer_epoch: int = field(INT16)
    committed: bool = field(BOOLEAN)


class EndTxnResponse(Message, api_key=ApiKey.END_TXN, versions=(0, 5), flexible_from=3):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    producer_id: int = field(INT64, "5+", default=-1, ignorable=True)
    producer_epoch: int = field(INT16, "5+", default=-1, ignorable=True)
