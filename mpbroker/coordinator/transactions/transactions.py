"""Make the objects that serve transactions, for the coordinator's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.coordinator_topic import CoordinatorTopic
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.outbox import Call
from mpbroker.coordinator.transactions.open_transactions import SharedOpenTransactions
from mpbroker.coordinator.transactions.transaction_coordinator import (
    TransactionConfig,
    TransactionCoordinator,
)
from mpbroker.coordinator.transactions.transaction_listing import TransactionListing
from mpbroker.coordinator.transactions.transaction_loading import TransactionLoading
from mpbroker.coordinator.transactions.transaction_markers import (
    MarkerRequests,
    MarkerWriter,
)
from mpbroker.coordinator.transactions.transaction_offsets import TransactionOffsets
from mpbroker.coordinator.transactions.transaction_partitions import (
    TransactionPartitions,
)


class Transactions:
    """Makes the transaction coordinator, the parts for its log, markers and APIs.

    Attributes:
        parts: the objects that have the methods for the APIs of transactions.

    Args:
        topic: __transaction_state.
        new_producer_id: returns an id that no producer has had.
        put_back: returns a Produce to the handlers, which then execute it.
    """

    def __init__(
        self,
        config: TransactionConfig,
        context: CoordinatorContext,
        topic: CoordinatorTopic,
        groups: GroupCoordinator,
        markers: MarkerWriter,
        shared: SharedOpenTransactions,
        new_producer_id: Callable[[], int],
        put_back: Callable[[Call], None],
    ) -> None:
        self.topic = topic
        self.markers = markers
        self.coordinator = TransactionCoordinator(
            config, context, shared, topic.num_partitions, new_producer_id, markers
        )
        self.loading = TransactionLoading(topic, self.coordinator, markers, shared)
        partitions = TransactionPartitions(
            self.coordinator, context, groups.partition_for, put_back
        )
        shards = markers.shards
        if shards is not None:
            partitions.is_ending = shards.is_ending
            shards.on_ended = self.coordinator.look_again
        offsets = TransactionOffsets(groups, self.coordinator, context, shards)
        self.parts: Final = (
            self.coordinator,
            partitions,
            offsets,
            MarkerRequests(context.outbox),
            TransactionListing(self.coordinator, context.outbox),
        )
