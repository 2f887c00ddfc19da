"""InitProducerId: an identity for an idempotent producer.

Source: Kafka protocol guide, "InitProducerId"; KIP-98, KIP-360.
"""

from __future__ import annotations

from collections.abc import Callable

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)


def handle_init_producer_id(
    request: InitProducerIdRequest, allocate_producer_id: Callable[[], int]
) -> InitProducerIdResponse:
    """Give out a producer id that nobody has had, at epoch 0.

    Without a transactional id a producer that asks again, to bump its epoch, gets a
    new id, as from Kafka. With one, its transaction coordinator answers; it is not
    there yet, which the client takes for a coordinator that starts, and asks again.
    """
    if request.transactional_id is None:
        return InitProducerIdResponse(
            error_code=0, producer_id=allocate_producer_id(), producer_epoch=0
        )
    error = (
        ErrorCode.COORDINATOR_NOT_AVAILABLE
        if request.transactional_id
        else ErrorCode.INVALID_REQUEST
    )
    return InitProducerIdResponse(error_code=error, producer_epoch=-1)
