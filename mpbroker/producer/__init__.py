"""The producer for Kafka brokers: `Producer`, and `AsyncProducer` for asyncio."""

from mpbroker.client.group_metadata import GroupMetadata
from mpbroker.client.serialization import Serializer
from mpbroker.producer.async_producer import AsyncProducer
from mpbroker.producer.batch import RecordFuture, RecordMetadata
from mpbroker.producer.errors import (
    AbortableError,
    BufferExhaustedError,
    DeliveryTimeoutError,
    FatalError,
    NetworkError,
    OutOfOrderSequenceError,
    ProducerClosedError,
    ProducerError,
    ProducerFencedError,
    ProducerForkedError,
    RecordTooLargeError,
    RefusedError,
    RetriableError,
    SerializationError,
    TransactionAbortedError,
    TransactionStateError,
)
from mpbroker.producer.partitioners import Partitioner, RoundRobinPartitioner
from mpbroker.producer.producer import Producer
from mpbroker.producer.record import ProducerInterceptor, ProducerRecord
from mpbroker.producer.transactions import OffsetAndMetadata

__all__ = [
    "AbortableError",
    "AsyncProducer",
    "BufferExhaustedError",
    "DeliveryTimeoutError",
    "FatalError",
    "GroupMetadata",
    "NetworkError",
    "OffsetAndMetadata",
    "OutOfOrderSequenceError",
    "Partitioner",
    "Producer",
    "ProducerClosedError",
    "ProducerError",
    "ProducerFencedError",
    "ProducerForkedError",
    "ProducerInterceptor",
    "ProducerRecord",
    "RecordFuture",
    "RecordMetadata",
    "RecordTooLargeError",
    "RefusedError",
    "RetriableError",
    "RoundRobinPartitioner",
    "SerializationError",
    "Serializer",
    "TransactionAbortedError",
    "TransactionStateError",
]
