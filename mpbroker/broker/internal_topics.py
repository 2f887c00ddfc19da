"""The coordinator's topics, as they are made: by it, or by a client that asks for one.

Source: Kafka's AutoTopicCreationManager; GroupCoordinatorConfig, TransactionLogConfig.
"""

from __future__ import annotations

from mpbroker.config import BrokerConfig
from mpbroker.metadata.topic_names import OFFSETS_TOPIC, TRANSACTION_TOPIC
from mpbroker.metadata.topics import NewTopic


def internal_topics(config: BrokerConfig) -> dict[str, NewTopic]:
    """Return them by name."""
    topics = (
        NewTopic(
            OFFSETS_TOPIC,
            config.offsets_topic_num_partitions,
            {
                "cleanup.policy": "compact",
                "compression.type": "producer",
                "segment.bytes": str(config.offsets_topic_segment_bytes),
            },
        ),
        NewTopic(
            TRANSACTION_TOPIC,
            config.transaction_state_log_num_partitions,
            {
                "cleanup.policy": "compact",
                "compression.type": "uncompressed",
                "unclean.leader.election.enable": "false",
                "min.insync.replicas": str(config.transaction_state_log_min_isr),
                "segment.bytes": str(config.transaction_state_log_segment_bytes),
            },
        ),
    )
    return {each.name: each for each in topics}
