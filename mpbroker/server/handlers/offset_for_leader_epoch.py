"""OffsetForLeaderEpoch: find the offset at which a leader epoch ended.

Source: Kafka protocol guide, "OffsetForLeaderEpoch"; KIP-101, KIP-320.
"""

from __future__ import annotations

from typing import Final

from mpbroker.metadata.topics import require_partition
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderTopicResult,
)
from mpbroker.server.fetch.fetch_handler import check_leader_epoch
from mpbroker.server.handler_context import HandlerContext

_NO_END: Final = (1 << 63) - 1


def handle_offset_for_leader_epoch(
    request: OffsetForLeaderEpochRequest, context: HandlerContext
) -> OffsetForLeaderEpochResponse:
    """Answer each partition with the end offset of the wanted epoch, or an error."""
    broker = context.broker
    response = OffsetForLeaderEpochResponse()
    for wanted in request.topics:
        topic = broker.registry.topic(wanted.topic)
        results = []
        for partition in wanted.partitions:
            index = partition.partition
            try:
                existing = require_partition(topic, wanted.topic, index)
                found = broker.logs.log(existing, index).lookup
                check_leader_epoch(partition.current_leader_epoch, found)
                end = found.end_offset_for_epoch(partition.leader_epoch)
                end_offset = end.start_offset
                if existing.config.diskless_enable and end.epoch == found.leader_epoch:
                    # This node may not have all records yet. None of them is ever cut
                    # off, and no client shall think so.
                    end_offset = _NO_END
                results.append(
                    EpochEndOffset(
                        error_code=0,
                        partition=index,
                        leader_epoch=end.epoch,
                        end_offset=end_offset,
                    )
                )
            except ApiError as error:
                results.append(
                    EpochEndOffset(error_code=error.error_code, partition=index)
                )
        response.topics.append(
            OffsetForLeaderTopicResult(topic=wanted.topic, partitions=results)
        )
    return response
