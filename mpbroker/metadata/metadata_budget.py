"""A bound for the metadata that is not about topics.

Every process has all metadata in memory. Topics are bounded by max.partitions. All else
has no natural end: clients may set configs on groups that do not exist, and quotas on
users of any name. So the memory of all that together has a limit, and a change that
would add to it above the limit is refused. What removes anything is always accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mpbroker.metadata.metadata_image import (
    BROKER_RESOURCE,
    TOPIC_RESOURCE,
    MetadataImage,
    MetadataRecord,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

# Room for some 250,000 ACL entries, or configs of as many groups.
MAX_METADATA_BYTES: Final = 128 * 1024 * 1024
# What the objects of an entry take in memory beside their texts.
_OBJECTS: Final = 256
_FEW: Final = {"FeatureLevelRecord", "ProducerIdsRecord"}
_OF_TOPICS: Final = {"TopicRecord", "PartitionRecord", "RemoveTopicRecord"}
# A broker's configs have an end, and must be changeable when all room is taken.
_BOUNDED: Final = (TOPIC_RESOURCE, BROKER_RESOURCE)


class MetadataBudget:
    """Estimates the memory that the metadata takes, and refuses what exceeds it.

    The estimate grows with each record. It is made anew from the metadata when it
    comes to the limit, since records may have replaced or removed others.

    Args:
        limit: the largest number of bytes, by the measure of ``weight``.
    """

    def __init__(self, limit: int = MAX_METADATA_BYTES) -> None:
        self._limit = limit
        self._estimate = 0

    def add(self, record: MetadataRecord) -> None:
        """Count a record that is being replayed."""
        self._estimate += weight(record)

    def check(self, records: Sequence[MetadataRecord], image: MetadataImage) -> None:
        """Check that there is room for what records add.

        Args:
            records: the records of a change that is about to be committed.
            image: the metadata before the change.

        Raises:
            ApiError: POLICY_VIOLATION: there is none.
        """
        added = sum(map(weight, records))
        if not added or self._estimate + added <= self._limit:
            return
        self._measure(image)
        if self._estimate + added > self._limit:
            raise ApiError(
                ErrorCode.POLICY_VIOLATION,
                "ACLs, quotas, users, tokens and configs of groups take"
                f" {self._estimate} bytes of memory in each process, and this change"
                f" adds {added}: the limit is {self._limit}. Remove some that are not"
                " needed, such as configs of groups that do not exist.",
            )

    def used(self, image: MetadataImage) -> int:
        """Return the estimate, made anew if it is near the limit."""
        if self._estimate > self._limit // 2:
            self._measure(image)
        return self._estimate

    def _measure(self, image: MetadataImage) -> None:
        groups = image.records_without_topics()
        self._estimate = sum(sum(map(weight, group)) for group in groups)


def weight(record: MetadataRecord) -> int:
    """Return about how many bytes of memory a record adds.

    It is 0 if the record removes something, is about a topic, or is of a kind of which
    there are few.
    """
    kind: str = record["type"]
    if kind == "ConfigRecord":  # an ACL has a resourceType, too
        is_few = record["resourceType"] in _BOUNDED or record["value"] is None
    else:
        is_few = (
            kind in _FEW
            or kind in _OF_TOPICS
            or kind.startswith(("Remove", "Unregister"))
            or bool(record.get("remove"))
        )
    return 0 if is_few else _OBJECTS + len(str(record))
