"""InitProducerId: an identity for an idempotent producer.

Source: Kafka protocol guide, "InitProducerId"; KIP-98, KIP-360.
"""

from __future__ import annotations

from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.request import FORWARDED, Deferred


def handle_init_producer_id(
    request: InitProducerIdRequest, context: HandlerContext
) -> InitProducerIdResponse | Deferred:
    """Give out a new producer id, at epoch 0; a transactional one the coordinator does.

    A producer that asks again, to bump its epoch, gets a new id, as from Kafka.
    """
    if request.transactional_id is not None:
        return FORWARDED
    return InitProducerIdResponse(
        error_code=0,
        producer_id=context.broker.registry.allocate_producer_id(),
        producer_epoch=0,
    )
