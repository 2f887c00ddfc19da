"""AddOffsetsToTxn: announce that a transaction will commit a group's offsets.

Source: Kafka protocol guide, "AddOffsetsToTxn".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, INT64, STRING, field
from mpbroker.protocol.message import Message


class AddOffsetsToTxnRequest(
    Message, api_key=ApiKey.ADD_OFFSETS_TO_TXN, versions=(0, 4), flexible_from=3
):
    transactional_id: str = field(STRING)
    producer_id: int = field(INT64)
    producer_epoch: int = field(INT16)
    group_id: str = field(STRING)


class AddOffsetsToTxnResponse(
    Message, api_key=ApiKey.ADD_OFFSETS_TO_TXN, versions=(0, 4), flexible_from=3
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
