"""ShareSession: one broker's deliveries to a member, and the acknowledgements.

A session begins with a ShareFetch of epoch 0, and each request that is answered raises
its epoch. A request names only the partitions that are added or removed, and those
with acknowledgements. When the session ends, the broker releases the records that the
member has acquired; the `ShareSession` is lost, and a new one takes its place.

It is sans-IO: requests come out, and responses come in.

Source: KIP-932, "Share sessions".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from mpbroker.client.cluster import TopicPartition
from mpbroker.protocol.messages import share_acknowledge as acknowledge_messages
from mpbroker.protocol.messages import share_fetch as fetch_messages
from mpbroker.protocol.messages.share_acknowledge import (
    AcknowledgeTopic,
    AcknowledgeType,
    ShareAcknowledgeRequest,
)
from mpbroker.protocol.messages.share_fetch import (
    FetchPartition,
    FetchTopic,
    ForgottenTopic,
    ShareFetchRequest,
)

_INITIAL_EPOCH: Final = 0
_FINAL_EPOCH: Final = -1
_LARGEST_EPOCH: Final = 0x7FFF_FFFF

BATCH_OPTIMIZED: Final = 0
RECORD_LIMIT: Final = 1


class ShareFetchSettings(NamedTuple):
    """The limits of ShareFetch requests; most fields are Kafka's settings.

    Attributes:
        share_acquire_mode: BATCH_OPTIMIZED: whole batches, so that there may be more
            than ``max_poll_records``; RECORD_LIMIT: never more.
    """

    fetch_max_wait_ms: int = 500
    fetch_min_bytes: int = 1
    fetch_max_bytes: int = 52_428_800
    max_poll_records: int = 500
    share_acquire_mode: int = BATCH_OPTIMIZED


class SharePlace(NamedTuple):
    """A partition by topic id, as requests name it, and by topic name, as users do."""

    topic_id: bytes
    where: TopicPartition


class Run(NamedTuple):
    """Consecutive offsets with one type of acknowledgement."""

    first: int
    last: int
    type: int


# The acknowledgements of one request, by partition.
Given = Mapping[SharePlace, Mapping[int, AcknowledgeType]]


def runs_of(types: Mapping[int, AcknowledgeType]) -> list[Run]:
    """Join acknowledgements of one type at consecutive offsets into runs.

    Args:
        types: the type of acknowledgement, by offset.

    Returns:
        The runs, in the order of offsets.
    """
    runs: list[Run] = []
    for offset in sorted(types):
        kind = types[offset]
        if runs and runs[-1].last + 1 == offset and runs[-1].type == kind:
            runs[-1] = runs[-1]._replace(last=offset)
        else:
            runs.append(Run(offset, offset, kind))
    return runs


class ShareSession:
    """Makes the requests of a member's share session with one broker.

    One request may be in flight at a time.

    Attributes:
        is_lost: whether the session has ended; a new `ShareSession` must replace it.
        given: the acknowledgements that are not sent yet, by partition.
    """

    def __init__(self, group_id: str, member_id: str) -> None:
        self.is_lost = False
        self.given: dict[SharePlace, dict[int, AcknowledgeType]] = {}
        self._group_id = group_id
        self._member_id = member_id
        self._epoch = _INITIAL_EPOCH
        self._fetched: dict[SharePlace, None] = {}  # the broker knows these

    @property
    def is_open(self) -> bool:
        """Whether the session has begun at the broker and has not ended."""
        return self._epoch != _INITIAL_EPOCH and not self.is_lost

    @property
    def renews(self) -> bool:
        """Whether an unsent acknowledgement is RENEW, which no ShareFetch may carry."""
        return any(
            AcknowledgeType.RENEW in types.values() for types in self.given.values()
        )

    def give(self, place: SharePlace, offset: int, kind: AcknowledgeType) -> None:
        """Store an acknowledgement, which is sent with the session's next request."""
        self.given.setdefault(place, {})[offset] = kind

    def take_given(self) -> Given:
        """Remove and return the acknowledgements that are not sent yet."""
        given, self.given = self.given, {}
        return given

    def answered(self) -> None:
        """Raise the session's epoch, because the broker has answered a request."""
        self._epoch = 1 if self._epoch == _LARGEST_EPOCH else self._epoch + 1

    def fetch(
        self,
        places: Iterable[SharePlace],
        given: Given,
        settings: ShareFetchSettings,
        max_wait_ms: int,
    ) -> ShareFetchRequest:
        """Return a request for records of some partitions, and of no others.

        Args:
            places: the partitions.
            given: acknowledgements to send with the request.
            settings: the limits of the request.
            max_wait_ms: how long the broker may wait for records.
        """
        wanted = dict.fromkeys(places)
        rows: dict[bytes, list[FetchPartition]] = {}
        for place in wanted | dict.fromkeys(given):
            if place in given or place not in self._fetched:
                rows.setdefault(place.topic_id, []).append(
                    FetchPartition(
                        partition_index=place.where.partition,
                        acknowledgement_batches=[
                            fetch_messages.AcknowledgementBatch(
                                first_offset=run.first,
                                last_offset=run.last,
                                acknowledge_types=[run.type],
                            )
                            for run in runs_of(given.get(place, {}))
                        ],
                    )
                )
        forgotten: dict[bytes, list[int]] = {}
        for place in self._fetched | dict.fromkeys(given):
            if place not in wanted:
                forgotten.setdefault(place.topic_id, []).append(place.where.partition)
        self._fetched = wanted
        return ShareFetchRequest(
            group_id=self._group_id,
            member_id=self._member_id,
            share_session_epoch=self._epoch,
            max_wait_ms=max_wait_ms,
            min_bytes=settings.fetch_min_bytes,
            max_bytes=settings.fetch_max_bytes,
            max_records=settings.max_poll_records,
            batch_size=settings.max_poll_records,
            share_acquire_mode=settings.share_acquire_mode,
            topics=[
                FetchTopic(topic_id=topic_id, partitions=partitions)
                for topic_id, partitions in rows.items()
            ],
            forgotten_topics_data=[
                ForgottenTopic(topic_id=topic_id, partitions=partitions)
                for topic_id, partitions in forgotten.items()
            ],
        )

    def acknowledge(self, given: Given, *, ends: bool) -> ShareAcknowledgeRequest:
        """Return a request that sends acknowledgements, and fetches nothing.

        Args:
            given: the acknowledgements.
            ends: whether to end the session; the broker releases all other records.
        """
        rows: dict[bytes, list[acknowledge_messages.AcknowledgePartition]] = {}
        renews = False
        for place, types in given.items():
            renews = renews or AcknowledgeType.RENEW in types.values()
            rows.setdefault(place.topic_id, []).append(
                acknowledge_messages.AcknowledgePartition(
                    partition_index=place.where.partition,
                    acknowledgement_batches=[
                        acknowledge_messages.AcknowledgementBatch(
                            first_offset=run.first,
                            last_offset=run.last,
                            acknowledge_types=[run.type],
                        )
                        for run in runs_of(types)
                    ],
                )
            )
        return ShareAcknowledgeRequest(
            group_id=self._group_id,
            member_id=self._member_id,
            share_session_epoch=_FINAL_EPOCH if ends else self._epoch,
            is_renew_ack=renews,
            topics=[
                AcknowledgeTopic(topic_id=topic_id, partitions=partitions)
                for topic_id, partitions in rows.items()
            ],
        )
