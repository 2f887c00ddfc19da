"""InitProducerId: get an id and epoch for an idempotent or transactional producer.

From version 3 a request may have the producer's present id and epoch, to increase the
epoch.

Source: Kafka protocol guide, "InitProducerId".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import BOOLEAN, INT16, INT32, INT64, STRING, field
from mpbroker.protocol.message import Message


class InitProducerIdRequest(
    Message, api_key=ApiKey.INIT_PRODUCER_ID, versions=(0, 6), flexible_from=2
):
    transactional_id: str | None = field(STRING, nullable="0+")
    transaction_timeout_ms: int = field(INT32)
    producer_id: int = field(INT64, "3+", default=-1)
    producer_epoch: int = field(INT16, "3+", default=-1)
    enable2_pc: bool = field(BOOLEAN, "6+")
    keep_prepared_txn: bool = field(BOOLEAN, "6+")


class InitProducerIdResponse(
    Message, api_key=ApiKey.INIT_PRODUCER_ID, versions=(0, 6), flexible_from=2
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    producer_id: int = field(INT64, default=-1)
    producer_epoch: int = field(INT16)
    ongoing_txn_producer_id: int = field(INT64, "6+", default=-1)
    ongoing_txn_producer_epoch: int = field(INT16, "6+", default=-1)
