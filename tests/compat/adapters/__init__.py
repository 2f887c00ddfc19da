"""One face for every Kafka client that the compatibility tests drive."""

from tests.compat.adapters.adapter import Adapter, Message, Outgoing
from tests.compat.adapters.aiokafka_adapter import AiokafkaAdapter
from tests.compat.adapters.confluent_adapter import ConfluentAdapter
from tests.compat.adapters.kafka_python_adapter import KafkaPythonAdapter

ADAPTERS: dict[str, type[Adapter]] = {
    adapter.name: adapter
    for adapter in (ConfluentAdapter, KafkaPythonAdapter, AiokafkaAdapter)
}

__all__ = ["ADAPTERS", "Adapter", "Message", "Outgoing"]
