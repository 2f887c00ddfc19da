"""A broker that speaks the Kafka protocol, as a family of Python processes.

And clients of any Kafka broker: `from mpbroker import Producer, Consumer, AdminClient`
or ShareConsumer.
Each name is imported when it is first used (PEP 562), because every process of a broker
imports this module and needs none of them.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mpbroker.client.admin.admin_client import *  # noqa: F403
    from mpbroker.client.admin.async_admin_client import *  # noqa: F403
    from mpbroker.client.consumer.async_consumer import *  # noqa: F403
    from mpbroker.client.consumer.consumer import *  # noqa: F403
    from mpbroker.client.errors import *  # noqa: F403
    from mpbroker.client.share.share_consumer import *  # noqa: F403
    from mpbroker.producer import *  # noqa: F403

__version__: Final = "0.1.0.dev0"

# By module: the names above, as its `__all__` has them.
_HOMES: Final = {
    "mpbroker.client.admin.async_admin_client": "AsyncAdminClient",
    "mpbroker.client.consumer.async_consumer": "AsyncConsumer",
    "mpbroker.client.admin.admin_client": (
        "AclBinding AclFilter AclOperation AclPermissionType Address AdminClient "
        "ClusterDescription ConfigEntry ConfigResource ConfigResourceType "
        "ConfigSource EARLIEST FeatureDescription GroupDescription GroupListing "
        "GroupMemberDescription LATEST LogDirDescription MAX_TIMESTAMP "
        "OffsetAndTimestamp PartitionDescription PatternType "
        "QuotaDescription ResourceType ScramUser TopicDescription TopicListing "
        "TopicPartition"
    ),
    "mpbroker.client.consumer.consumer": (
        "Consumer ConsumerRecord Deserializer LeaderLostError LogTruncationError "
        "NoOffsetError OffsetOutOfRangeError RebalanceListener RebalancedError "
        "RecordDeserializationError"
    ),
    "mpbroker.client.errors": (
        "AddressError ApiError AuthenticationError BrokerUnavailableError ClientError "
        "ConfigError DisconnectedError ErrorCode MpbrokerError ProtocolError "
        "RequestTimeoutError SaslAuthenticationError SslAuthenticationError "
        "UnsupportedVersionError WakeupError"
    ),
    "mpbroker.client.share.share_consumer": "AcknowledgeType ShareConsumer",
    "mpbroker.producer": (
        "AbortableError AsyncProducer BufferExhaustedError DeliveryTimeoutError "
        "FatalError GroupMetadata NetworkError OffsetAndMetadata "
        "OutOfOrderSequenceError Partitioner Producer ProducerClosedError "
        "ProducerError ProducerFencedError ProducerForkedError ProducerInterceptor "
        "ProducerRecord RecordFuture RecordMetadata RecordTooLargeError RefusedError "
        "RetriableError RoundRobinPartitioner SerializationError Serializer "
        "TransactionAbortedError TransactionStateError"
    ),
}
_HOME_OF: Final = {
    name: home for home, names in _HOMES.items() for name in names.split()
}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    import_module("mpbroker.base.distribution").refuse_other_distribution()
    value: object = getattr(import_module(home), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
