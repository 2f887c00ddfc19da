"""InitProducerId: give an idempotent producer its id.

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
    """Answer with a new producer id and epoch 0.

    An idempotent producer that asks for a new epoch also gets a new id, as in Kafka.
    Requests with a transactional id are forwarded to the coordinator.
    """
    if request.transactional_id is not None:
        return FORWARDED
    return InitProducerIdResponse(
        error_code=0,
        producer_id=context.broker.registry.allocate_producer_id(),
        producer_epoch=0,
    )
