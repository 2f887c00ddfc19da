"""UnregisterBroker: remove the registration of another broker from the metadata log.

A single node has such registrations only if a Kafka cluster with more brokers wrote the
log before. They mean nothing to this node, but a Kafka that goes on with the log shows
them.

Source: Kafka protocol guide, "UnregisterBroker"; Kafka's ClusterControlManager.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpbroker.metadata.metadata_image import (
    MetadataImage,
    MetadataRecord,
    unregister_broker_record,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.unregister_broker import (
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)
from mpbroker.server.errors import invalid_request
from mpbroker.server.handler_context import HandlerContext


def handle_unregister_broker(
    request: UnregisterBrokerRequest, context: HandlerContext
) -> UnregisterBrokerResponse:
    """Remove a broker's registration, or answer why that is not possible.

    The removal is noted before it is made (intent.py). So a second execution after the
    death of a handler knows that the first one has removed the registration.
    """
    broker_id, intent = request.broker_id, context.intent
    was_ours = bool(intent.earlier())

    def decide(image: MetadataImage) -> Sequence[MetadataRecord]:
        if broker_id == context.broker.node_id:
            raise invalid_request(
                f"Broker ID {broker_id} is the only broker of the cluster, and runs"
            )
        epoch = image.broker_epoch(broker_id)
        if epoch is None and was_ours:
            return []
        if epoch is None:
            raise ApiError(
                ErrorCode.BROKER_ID_NOT_REGISTERED,
                f"Broker ID {broker_id} is not currently registered",
            )
        intent.note([1])
        return [unregister_broker_record(broker_id, epoch)]

    try:
        context.broker.registry.change(decide)
    except ApiError as error:
        return UnregisterBrokerResponse(
            error_code=error.error_code, error_message=error.message
        )
    return UnregisterBrokerResponse(error_code=ErrorCode.NONE, error_message=None)
