"""Define names of topics: the rules for legal names, and the internal topics.

Source: org.apache.kafka.common.internals.Topic, for rules and messages.
"""

from __future__ import annotations

from typing import Final

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

# A topic's name and the index of one of its partitions.
TopicPartition = tuple[str, int]

MAX_NAME_LENGTH: Final = 249
CLUSTER_METADATA_TOPIC: Final = "__cluster_metadata"
OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTION_TOPIC: Final = "__transaction_state"
SHARE_STATE_TOPIC: Final = "__share_group_state"
INTERNAL_TOPICS: Final = frozenset(
    (OFFSETS_TOPIC, TRANSACTION_TOPIC, SHARE_STATE_TOPIC)
)

_LEGAL: Final = frozenset(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
)


def check_topic_name(name: str) -> None:
    """Check that a name is legal for a topic.

    Raises:
        ApiError: INVALID_TOPIC_EXCEPTION, with Kafka's message.
    """
    complaint = _complaint(name)
    if complaint is not None:
        raise ApiError(
            ErrorCode.INVALID_TOPIC_EXCEPTION, f"Topic name is invalid: {complaint}"
        )


def is_legal_topic_name(name: str) -> bool:
    """Return whether a name is legal for a topic."""
    return _complaint(name) is None


def collision_key(name: str) -> str:
    """Return a key that is equal for names that would collide in Kafka's metrics.

    Kafka's names of metrics have "_" in the place of ".".
    """
    return name.replace(".", "_")


def _complaint(name: str) -> str | None:
    if not name:
        return "the empty string is not allowed"
    if name in (".", ".."):
        return f"'{name}' is not allowed"
    if len(name) > MAX_NAME_LENGTH:
        return (
            f"the length of '{name[:MAX_NAME_LENGTH]}...' is longer than the max"
            f" allowed length {MAX_NAME_LENGTH}"
        )
    if not _LEGAL.issuperset(name):
        return (
            f"'{name}' contains one or more characters other than ASCII"
            " alphanumerics, '.', '_' and '-'"
        )
    return None
