"""InitProducerId: an identity for an idempotent producer.

Source: Kafka protocol guide, "InitProducerId"; KIP-98, KIP-360.
"""

from __future__ import annotations

from collections.abc import Callable

from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)


def handle_init_producer_id(
    request: InitProducerIdRequest, allocate_producer_id: Callable[[], int]
) -> InitProducerIdResponse:
    """Give out a producer id that nobody has had, at epoch 0.

    A producer that asks again, to bump its epoch, gets a new id, as from Kafka. One
    with a transactional id is the coordinator's business.
    """
    return InitProducerIdResponse(
        error_code=0, producer_id=allocate_producer_id(), producer_epoch=0
    )
