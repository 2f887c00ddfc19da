"""ConfigSource: the place where the value of a config was set.

Source: org.apache.kafka.clients.admin.ConfigEntry.ConfigSource; DescribeConfigs in the
Kafka protocol guide.
"""

from enum import IntEnum


class ConfigSource(IntEnum):
    """The place where a config's value was set, by its number in the protocol."""

    UNKNOWN = 0
    TOPIC_CONFIG = 1
    DYNAMIC_BROKER_CONFIG = 2
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5
    DYNAMIC_BROKER_LOGGER_CONFIG = 6
    DYNAMIC_CLIENT_METRICS_CONFIG = 7
    GROUP_CONFIG = 8
