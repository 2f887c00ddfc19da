"""DescribeProducers: describe the producers of partitions and their transactions.

Source: Kafka protocol guide, "DescribeProducers"; KIP-664.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpbroker.metadata.topics import require_partition
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    PartitionResponse,
    ProducerState,
    TopicResponse,
)
from mpbroker.server.answer_budget import AnswerBudget
from mpbroker.server.handler_context import HandlerContext

if TYPE_CHECKING:
    from mpbroker.storage.log.partition_log import PartitionLog


def handle_describe_producers(
    request: DescribeProducersRequest, context: HandlerContext
) -> DescribeProducersResponse:
    """Answer each partition with the producers that its log knows, or with an error.

    A partition that the request repeats is answered once.
    """
    broker = context.broker
    wanted: dict[str, dict[int, None]] = {}
    for row in request.topics:
        wanted.setdefault(row.name, {}).update(dict.fromkeys(row.partition_indexes))
    budget = AnswerBudget()
    answers = []
    for name, indexes in wanted.items():
        topic = broker.registry.topic(name)
        partitions = []
        for index in indexes:
            try:
                budget.check()
                existing = require_partition(topic, name, index)
                found = PartitionResponse(
                    partition_index=index,
                    active_producers=_producers(broker.logs.log(existing, index)),
                )
                budget.spend(found)
            except ApiError as error:
                found = PartitionResponse(
                    partition_index=index,
                    error_code=error.error_code,
                    error_message=str(error),
                )
            partitions.append(found)
        answers.append(TopicResponse(name=name, partitions=partitions))
    return DescribeProducersResponse(topics=answers)


def _producers(log: PartitionLog) -> list[ProducerState]:
    known = log.producers.at(log.view.state())
    return [
        ProducerState(
            producer_id=entry.producer_id,
            producer_epoch=entry.epoch,
            last_sequence=entry.batches[-1].last_sequence if entry.batches else -1,
            last_timestamp=entry.last_timestamp,
            coordinator_epoch=entry.coordinator_epoch,
            current_txn_start_offset=entry.txn_first_offset,
        )
        for entry in known.entries.values()
    ]
