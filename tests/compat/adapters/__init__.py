"""One face for every Kafka client that the compatibility tests drive."""

from tests.compat.adapters.adapter import Adapter, Message, Outgoing
from tests.compat.adapters.aiokafka_adapter import AiokafkaAdapter
from tests.compat.adapters.confluent_adapter import ConfluentAdapter
from tests.compat.adapters.franz_go_adapter import FranzGoAdapter
from tests.compat.adapters.kafka_python_adapter import KafkaPythonAdapter
from tests.compat.adapters.own_adapter import OwnAdapter
from tests.support.fetch_clients import FRANZ_GO

_PYTHON = (ConfluentAdapter, KafkaPythonAdapter, AiokafkaAdapter, OwnAdapter)
# tests/compat/test_other_languages.py says so where it could not be built.
_FOREIGN = (FranzGoAdapter,) if FRANZ_GO.exists() else ()

ADAPTERS: dict[str, type[Adapter]] = {
    adapter.name: adapter for adapter in (*_PYTHON, *_FOREIGN)
}

__all__ = ["ADAPTERS", "Adapter", "Message", "Outgoing"]
