"""Find the partitions of a query, and the offsets between which it reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.admin.topic_admin import list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.metadata import MetadataResponseTopic
from mpbroker.spark.options import (
    LATEST,
    OffsetRequest,
    OptionError,
    SourceOptions,
)
from mpbroker.spark.topic_pattern import compile_topic_pattern

T = TypeVar("T")
Offsets = dict[TopicPartition, int]

_NO_OFFSET: Final = -1
NO_TOPIC_ID: Final = bytes(16)
# Between a topic's name and its id in a checkpoint: no topic's name has this character.
_BEFORE_ID: Final = "@"
# Pauses of whoever waits for a broker: each is twice as long as the last.
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
# A broker may lack a topic for a moment, such as after its start. A partition is gone
# if brokers say so this many times, which takes three seconds with the pauses above.
GONE_ANSWERS: Final = 6
# The version of offsets as JSON. A document of another one has a topic "@VERSION"
# without partitions; all that were written so far have none.
_VERSION: Final = "1"


class DataLossError(MpbrokerError):
    """Records of the query's range no longer exist.

    The user restores them, or sets failOnDataLoss=false to go on without them.
    """


class OffsetsError(MpbrokerError):
    """A checkpoint has offsets that this version cannot read.

    The user runs the query with the mpbroker that wrote them, or with its own
    checkpoint.
    """


class OffsetRange(NamedTuple):
    """Part of a partition: offsets from ``start`` to ``end`` - 1.

    Attributes:
        topic_id: the topic's id when the range was planned, as 32 hex digits; empty if
            it is not known. A topic of another id has other records.
    """

    partition: TopicPartition
    start: int
    end: int
    topic_id: str = ""

    @property
    def size(self) -> int:
        return self.end - self.start


class Subscribed(NamedTuple):
    """What a query's subscription stands for just now.

    Attributes:
        leaders: the leader's node id of each partition; -1: it has none.
        topic_ids: the ids of the topics by name, as 32 hex digits. Brokers older than
            Kafka 2.8 give none.
    """

    leaders: dict[TopicPartition, int]
    topic_ids: dict[str, str]


def check_order(partition: TopicPartition, start: int, end: int) -> None:
    """Refuse a batch query that would read nothing because it ends before it starts.

    Raises:
        OptionError: the start is greater than the end.
    """
    if start > end:
        raise OptionError(
            f"{partition}: the start, offset {start}, is greater than the end, offset"
            f" {end}; give a start that is not, or another end"
        )


class OffsetReader:
    """Asks brokers for partitions and offsets; keeps its connections until `close`.

    Attributes:
        patience_s: how long to wait for brokers that do not answer, and for leaders, in
            seconds. 0: only as long as fetchOffset.numRetries attempts take.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.patience_s = 0.0
        self._options = options
        self._cluster: Cluster | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return a state that can be pickled: all but the connections."""
        return {**self.__dict__, "_cluster": None}

    def subscribed(self, may_be_gone: Collection[str] = ()) -> Subscribed:
        """Return the subscribed partitions, and the ids of their topics.

        Args:
            may_be_gone: topics that are left out if they, or partitions of them, do not
                exist; for other topics this is an error.

        Raises:
            ApiError: a topic of the subscription does not exist.
            OptionError: a partition of ``assign`` does not exist.
            BrokerUnavailableError: no broker answers.
        """
        return self._retry(lambda: self._subscribed(may_be_gone))

    def partitions(self) -> dict[TopicPartition, int]:
        """Return the subscribed partitions with their leaders' node ids.

        Raises:
            As ``subscribed``.
        """
        return self.subscribed().leaders

    def topic_ids(self) -> dict[str, str]:
        """Return the ids of the subscribed topics by name, as 32 hex digits.

        Raises:
            As ``subscribed``.
        """
        return self.subscribed().topic_ids

    def offsets(self, leaders: Mapping[TopicPartition, int], which: int) -> Offsets:
        """Ask the leaders for the EARLIEST or LATEST offset of each partition.

        LATEST is the last stable offset if the query reads committed records only.
        """
        return self._list(dict.fromkeys(leaders, which), leaders)

    def ends(self, leaders: Mapping[TopicPartition, int]) -> Offsets:
        """Return the log end offset of each partition, whatever the isolation level."""
        return self._list(dict.fromkeys(leaders, LATEST), leaders, read_committed=False)

    def resolve(
        self,
        request: OffsetRequest,
        leaders: Mapping[TopicPartition, int],
        *,
        unmatched: Callable[[TopicPartition, int], int | None],
    ) -> Offsets:
        """Return each partition's offset where the user wants a query to start or end.

        The request may name offsets, timestamps, EARLIEST or LATEST (`OffsetRequest`).

        Args:
            unmatched: a function that is called with a partition and a timestamp (ms)
                if all records are older; it returns LATEST, or raises.

        Raises:
            OptionError: the request names other partitions than those that exist.
        """
        if request.timestamp_ms is not None:
            questions = dict.fromkeys(leaders, request.timestamp_ms)
        elif request.timestamps is not None:
            questions = _same_partitions(request.timestamps, leaders)
        elif request.offsets is not None:
            return self._fill_in(_same_partitions(request.offsets, leaders), leaders)
        else:
            return self.offsets(leaders, request.everywhere)
        found = self._list(questions, leaders)
        for partition, offset in found.items():
            if offset == _NO_OFFSET:
                found[partition] = unmatched(partition, questions[partition]) or LATEST
        return self._fill_in(found, leaders)

    def store(self, group: str, offsets: Offsets) -> None:
        """Store offsets for a consumer group, which must have no members.

        Raises:
            ApiError: the coordinator refuses.
            BrokerUnavailableError: the coordinator does not answer.
        """
        from mpbroker.client.admin.group_admin import alter_offsets

        self._retry(lambda: alter_offsets(self._connected(), group, offsets), 0)

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    # -- asking ------------------------------------------------------------------------

    def _topics(self, may_be_gone: Collection[str]) -> list[MetadataResponseTopic]:
        cluster, wanted = self._connected(), self._options.subscription
        if wanted.pattern is not None:
            matches = compile_topic_pattern(wanted.pattern).search
            return [
                topic
                for topic in cluster.metadata(None).topics
                if topic.name and not topic.is_internal and matches(topic.name)
            ]
        names = wanted.topics or sorted({each.topic for each in wanted.partitions})
        found = []
        for name in names:
            try:
                found.append(cluster.topic(name))
            except ApiError as error:
                if not is_unknown(error) or name not in may_be_gone:
                    raise
        return found

    def _subscribed(self, may_be_gone: Collection[str] = ()) -> Subscribed:
        wanted = self._options.subscription
        topics = self._topics(may_be_gone)
        leaders = {
            TopicPartition(topic.name or "", each.partition_index): each.leader_id
            for topic in topics
            for each in topic.partitions
        }
        topic_ids = {
            topic.name or "": topic.topic_id.hex()
            for topic in topics
            if topic.topic_id != NO_TOPIC_ID
        }
        if not wanted.partitions:
            return Subscribed(leaders, topic_ids)
        missing = [
            str(each)
            for each in wanted.partitions
            if each not in leaders and each.topic not in may_be_gone
        ]
        if missing:
            raise OptionError(f"assign: there is no partition {', '.join(missing)}")
        chosen = {each: leaders[each] for each in wanted.partitions if each in leaders}
        return Subscribed(chosen, topic_ids)

    def _list(
        self,
        questions: Mapping[TopicPartition, int],
        leaders: Mapping[TopicPartition, int],
        *,
        read_committed: bool | None = None,
    ) -> Offsets:
        """Ask leaders for offsets; after an error, ask who the leaders are now."""
        if read_committed is None:
            read_committed = bool(self._options.isolation_level)
        newest: Mapping[TopicPartition, int] | None = leaders

        def ask() -> Offsets:
            nonlocal newest
            if newest is None:
                gone = {each.topic for each in questions}
                newest = dict(leaders) | self._subscribed(gone).leaders
            now, newest = newest, None  # until these have answered
            for each in questions:
                if now[each] < 0:
                    raise BrokerUnavailableError(f"{each} has no leader")
            answers = list_offsets(
                self._connected(), questions, now, read_committed=read_committed
            )
            return {partition: answer.offset for partition, answer in answers.items()}

        return self._retry(ask)

    def _fill_in(
        self, offsets: Offsets, leaders: Mapping[TopicPartition, int]
    ) -> Offsets:
        """Replace EARLIEST and LATEST by the offsets that the brokers give for them."""
        questions = {
            partition: offset for partition, offset in offsets.items() if offset < 0
        }
        if questions:
            offsets = offsets | self._list(questions, leaders)
        return offsets

    def _connected(self) -> Cluster:
        if self._cluster is None:
            cluster = Cluster(
                self._options.bootstrap,
                self._options.request_timeout_ms / 1000,
                self._options.client,
            )
            cluster.metadata([])  # learn the addresses of all nodes
            self._cluster = cluster
        return self._cluster

    def _retry(self, ask: Callable[[], T], patience_s: float | None = None) -> T:
        """Call ``ask``, which sends requests, until it succeeds.

        After an error the next attempt has a new connection. After
        fetchOffset.numRetries attempts there are more as long as the patience lasts,
        unless brokers say again and again that a topic is unknown.

        Args:
            patience_s: None: ``self.patience_s``.

        Raises:
            BrokerUnavailableError, ApiError: of the last attempt, or at once if the
                broker's refusal is final.
        """
        patience_s = self.patience_s if patience_s is None else patience_s
        began = time.monotonic()
        attempt, unknown, pause_s = 1, 0, FIRST_PAUSE_S
        while True:
            try:
                return ask()
            except (BrokerUnavailableError, ApiError) as error:
                self.close()
                if isinstance(error, ApiError):
                    unknown += is_unknown(error)
                    if not error.error_code.retriable:
                        raise
                if attempt >= self._options.fetch_retries and (
                    time.monotonic() - began >= patience_s or unknown >= GONE_ANSWERS
                ):
                    raise
            if attempt < self._options.fetch_retries:
                time.sleep(self._options.fetch_retry_interval_ms / 1000)
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            attempt += 1


def is_unknown(error: ApiError) -> bool:
    """Return whether a broker says that there is no such topic or partition."""
    return error.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _same_partitions(
    given: Mapping[TopicPartition, int], leaders: Mapping[TopicPartition, int]
) -> Offsets:
    if set(given) != set(leaders):
        missing = ", ".join(str(each) for each in sorted(set(leaders) - set(given)))
        strange = ", ".join(str(each) for each in sorted(set(given) - set(leaders)))
        raise OptionError(
            "offsets must be given for exactly the partitions that are read (-2 for"
            f" earliest, -1 for latest); missing: {missing or 'none'}; not read:"
            f" {strange or 'none'}"
        )
    return dict(given)


# -- offsets as a checkpoint's JSON ----------------------------------------------------


def to_json(
    offsets: Mapping[TopicPartition, int], topic_ids: Mapping[str, str] | None = None
) -> dict[str, dict[str, int]]:
    """Return offsets as Spark's connector writes them: ``{"topic": {"0": 23}}``.

    A topic's id is added as a topic without partitions, ``{"topic@ID": {}}``: to those
    who read offsets, such as Spark's connector, this says nothing.
    """
    found: dict[str, dict[str, int]] = {}
    for partition, offset in sorted(offsets.items()):
        found.setdefault(partition.topic, {})[str(partition.partition)] = offset
    for topic, topic_id in sorted((topic_ids or {}).items()):
        found[f"{topic}{_BEFORE_ID}{topic_id}"] = {}
    return found


def from_json(offsets: Mapping[str, Any]) -> Offsets:
    """Return the offsets of a document that `to_json` made.

    Raises:
        OffsetsError: the document is of another version, or has no offsets of topics.
    """
    try:
        for topic in offsets:
            name, mark, version = topic.partition(_BEFORE_ID)
            if mark and not name and version != _VERSION:
                raise OffsetsError(
                    f"the checkpoint's offsets have version {version:.20}, and this"
                    f" mpbroker reads version {_VERSION}: run the query with the"
                    " mpbroker that wrote them"
                )
        return {
            TopicPartition(topic, int(number)): int(offset)
            for topic, partitions in offsets.items()
            for number, offset in partitions.items()
        }
    except (AttributeError, TypeError, ValueError):
        text = repr(offsets)
        raise OffsetsError(
            f"the checkpoint has {text if len(text) <= 100 else text[:100] + '...'} in"
            " the place of topics' offsets: it is that of another source, or a later"
            " mpbroker has written it; give the query its own checkpoint"
        ) from None


def topic_ids_from_json(offsets: Mapping[str, Any]) -> dict[str, str]:
    """Return the topics' ids in a document that `to_json` made; it may have none."""
    parts = [each.partition(_BEFORE_ID) for each in offsets]
    return {topic: topic_id for topic, mark, topic_id in parts if mark and topic}


def made_again(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """Return the topics that have another id now than before."""
    return {topic for topic in before if now.get(topic, before[topic]) != before[topic]}


# -- ranges ----------------------------------------------------------------------------


def split_ranges(
    ranges: list[OffsetRange],
    min_partitions: int | None,
    max_records: int | None,
) -> list[OffsetRange]:
    """Cut ranges into at least about ``min_partitions`` parts of limited size.

    Empty ranges are left out.

    Args:
        min_partitions: how many parts to aim at; a range is cut in proportion to its
            size. None: no minimum.
        max_records: the largest number of offsets in a part. None: no limit.

    Source: Spark's KafkaOffsetRangeCalculator.
    """
    ranges = [each for each in ranges if each.size > 0]
    if max_records is not None:
        ranges = [
            part for each in ranges for part in _cut(each, -(-each.size // max_records))
        ]
    if min_partitions is None or len(ranges) >= min_partitions:
        return ranges
    total = sum(each.size for each in ranges)
    # Small ranges stay whole, and the others share the parts that are left: otherwise a
    # large range among many small ones is cut into more parts than were asked for.
    large = {each for each in ranges if _share(each.size, total, min_partitions) > 1}
    large_total = sum(each.size for each in large)
    rest = max(1, min_partitions - (len(ranges) - len(large)))
    return [
        part
        for each in ranges
        for part in _cut(
            each, _share(each.size, large_total, rest) if each in large else 1
        )
    ]


def _share(size: int, total: int, parts: int) -> int:
    """Return how many of ``parts`` a range of this size gets; at least one."""
    return max(1, int(size / total * parts + 0.5))  # rounded as Java rounds


def _cut(whole: OffsetRange, parts: int) -> list[OffsetRange]:
    parts = min(parts, whole.size)
    bounds = [whole.start + whole.size * part // parts for part in range(parts + 1)]
    return [whole._replace(start=start, end=end) for start, end in pairwise(bounds)]


def limit_offsets(start: Offsets, end: Offsets, max_rows: int) -> Offsets:
    """Return end offsets, ``end`` at most, of a batch of about ``max_rows`` offsets.

    Each partition has a share in proportion to its offsets, and at least one offset.

    Source: Spark's KafkaMicroBatchStream.rateLimit.
    """
    sizes = {
        partition: offset - start.get(partition, offset)
        for partition, offset in end.items()
    }
    total = sum(size for size in sizes.values() if size > 0)
    if total <= max_rows:
        return end
    limited = {}
    for partition, offset in end.items():
        size = sizes[partition]
        if size <= 0:
            limited[partition] = offset
            continue
        share = max_rows * size / total
        limited[partition] = min(offset, start[partition] + max(1, int(share)))
    return limited
