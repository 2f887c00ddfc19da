"""Tell which partitions have a leader, in answers about topics and elections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpbroker.server.described_partitions import described_partition
from mpbroker.storage.files.leader_epochs import UNDEFINED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpbroker.metadata.cluster_nodes import NodeAddress
    from mpbroker.metadata.topics import Topic
    from mpbroker.protocol.messages.metadata import MetadataResponsePartition
    from mpbroker.server.handler_context import Broker


class Leaders:
    """Tells one request which partitions have a leader, here and at other nodes.

    Args:
        broker: this node.
        others: the other live nodes of the cluster.
    """

    def __init__(self, broker: Broker, others: Iterable[NodeAddress]) -> None:
        self._broker = broker
        self._live = {each.node_id for each in others}
        nodes = broker.nodes
        self._offline = {} if nodes is None else nodes.offline()

    def _is_here(self, topic: Topic) -> bool:
        broker = self._broker
        return broker.nodes is None or topic.leader == broker.node_id

    def has_leader(self, topic: Topic, partition: int) -> bool:
        """Return whether a partition has one: its node is live, and its disk there."""
        if self._is_here(topic):
            return not self._broker.logs.is_offline(topic, partition)
        offline = self._offline.get(topic.topic_id, ())
        return topic.leader in self._live and partition not in offline

    def partitions(self, topic: Topic) -> list[MetadataResponsePartition]:
        """Return the descriptions of a topic's partitions; callers must not edit them.

        Those of another node have no leader epoch, since only that node knows it.
        """
        if self._is_here(topic):
            return self._broker.described.partitions(topic)
        place = [topic.leader]
        return [
            described_partition(
                index, place, UNDEFINED, is_live=self.has_leader(topic, index)
            )
            for index in range(len(topic.partitions))
        ]
