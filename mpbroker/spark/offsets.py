"""Which partitions there are, and between which offsets a query reads them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.admin.topic_admin import list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.protocol.errors import ApiError
from mpbroker.spark.options import (
    LATEST,
    OffsetRequest,
    OptionError,
    SourceOptions,
)

T = TypeVar("T")
Offsets = dict[TopicPartition, int]

_NO_OFFSET: Final = -1


class DataLossError(MpbrokerError):
    """Records that were to be read are gone; see failOnDataLoss."""


class OffsetRange(NamedTuple):
    """Part of a partition: offsets from ``start`` up to, not including, ``end``."""

    partition: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class OffsetReader:
    """Asks brokers for partitions and offsets, over one connection that is kept."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._cluster: Cluster | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Travel to executors without the connection."""
        return {"_options": self._options, "_cluster": None}

    def partitions(self) -> dict[TopicPartition, int]:
        """Return what is subscribed to, each with its leader's node id.

        Raises:
            ApiError: a topic or partition that was named does not exist.
        """
        return self._retry(self._partitions)

    def offsets(self, leaders: Mapping[TopicPartition, int], which: int) -> Offsets:
        """Return the EARLIEST or LATEST offset of each partition.

        LATEST is the end of what is committed if only that is read.
        """
        return self._retry(lambda: self._list(dict.fromkeys(leaders, which), leaders))

    def ends(self, leaders: Mapping[TopicPartition, int]) -> Offsets:
        """Return where each partition's log ends, committed or not."""
        questions = dict.fromkeys(leaders, LATEST)

        def ask() -> Offsets:
            return self._list(questions, leaders, read_committed=False)

        return self._retry(ask)

    def resolve(
        self,
        request: OffsetRequest,
        leaders: Mapping[TopicPartition, int],
        *,
        unmatched: Callable[[TopicPartition, int], int | None],
    ) -> Offsets:
        """Turn what the user asked for into offsets.

        Args:
            unmatched: called with a partition and a timestamp that no record is as
                late as; returns LATEST, or raises.

        Raises:
            OptionError: offsets are not given for exactly the partitions there are.
        """
        if request.timestamp_ms is not None:
            questions = dict.fromkeys(leaders, request.timestamp_ms)
        elif request.timestamps is not None:
            questions = _same_partitions(request.timestamps, leaders)
        elif request.offsets is not None:
            return self._fill_in(_same_partitions(request.offsets, leaders), leaders)
        else:
            return self.offsets(leaders, request.everywhere)
        found = self._retry(lambda: self._list(questions, leaders))
        for partition, offset in found.items():
            if offset == _NO_OFFSET:
                found[partition] = unmatched(partition, questions[partition]) or LATEST
        return self._fill_in(found, leaders)

    def store(self, group: str, offsets: Offsets) -> None:
        """Store offsets as a consumer group's, which must have no members.

        Raises:
            ApiError: refused. BrokerUnavailableError: no answer.
        """
        from mpbroker.client.admin.group_admin import alter_offsets

        self._retry(lambda: alter_offsets(self._connected(), group, offsets))

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    # -- asking ------------------------------------------------------------------------

    def _partitions(self) -> dict[TopicPartition, int]:
        cluster, wanted = self._connected(), self._options.subscription
        if wanted.pattern is not None:
            matches = re.compile(wanted.pattern).fullmatch
            topics = [
                topic
                for topic in cluster.metadata(None).topics
                if topic.name and not topic.is_internal and matches(topic.name)
            ]
        else:
            names = wanted.topics or sorted({each.topic for each in wanted.partitions})
            topics = [cluster.topic(name) for name in names]
        leaders = {
            TopicPartition(topic.name or "", each.partition_index): each.leader_id
            for topic in topics
            for each in topic.partitions
        }
        if not wanted.partitions:
            return leaders
        missing = [str(each) for each in wanted.partitions if each not in leaders]
        if missing:
            raise OptionError(f"assign: there is no partition {', '.join(missing)}")
        return {each: leaders[each] for each in wanted.partitions}

    def _list(
        self,
        questions: Mapping[TopicPartition, int],
        leaders: Mapping[TopicPartition, int],
        *,
        read_committed: bool | None = None,
    ) -> Offsets:
        if read_committed is None:
            read_committed = bool(self._options.isolation_level)
        answers = list_offsets(
            self._connected(), questions, leaders, read_committed=read_committed
        )
        return {partition: answer.offset for partition, answer in answers.items()}

    def _fill_in(
        self, offsets: Offsets, leaders: Mapping[TopicPartition, int]
    ) -> Offsets:
        """Replace EARLIEST and LATEST by the offsets they stand for."""
        questions = {
            partition: offset for partition, offset in offsets.items() if offset < 0
        }
        if questions:
            found = self._retry(lambda: self._list(questions, leaders))
            offsets = offsets | found
        return offsets

    def _connected(self) -> Cluster:
        if self._cluster is None:
            cluster = Cluster(
                self._options.bootstrap,
                self._options.request_timeout_ms / 1000,
                self._options.client,
            )
            cluster.metadata([])  # learn which node is where
            self._cluster = cluster
        return self._cluster

    def _retry(self, ask: Callable[[], T]) -> T:
        """Ask again, over a new connection, fetchOffset.numRetries times in all."""
        attempt = 1
        while True:
            try:
                return ask()
            except (BrokerUnavailableError, ApiError) as error:
                self.close()
                refused = isinstance(error, ApiError) and not error.error_code.retriable
                if refused or attempt >= self._options.fetch_retries:
                    raise
            attempt += 1
            time.sleep(self._options.fetch_retry_interval_ms / 1000)


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


# -- how offsets look in a checkpoint --------------------------------------------------


def to_json(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Return ``{"topic": {"0": 23}}``, as Spark's connector writes it."""
    found: dict[str, dict[str, int]] = {}
    for partition, offset in sorted(offsets.items()):
        found.setdefault(partition.topic, {})[str(partition.partition)] = offset
    return found


def from_json(offsets: Mapping[str, Any]) -> Offsets:
    """Read what `to_json` wrote."""
    return {
        TopicPartition(topic, int(number)): int(offset)
        for topic, partitions in offsets.items()
        for number, offset in partitions.items()
    }


# -- ranges ----------------------------------------------------------------------------


def split_ranges(
    ranges: list[OffsetRange],
    min_partitions: int | None,
    max_records: int | None,
) -> list[OffsetRange]:
    """Cut ranges so that there are enough of them, and none is too long.

    Args:
        ranges: empty ones are left out.
        min_partitions: about so many, in proportion to their sizes.
        max_records: most offsets of one.

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
    return [
        part
        for each in ranges
        for part in _cut(each, max(1, round(each.size / total * min_partitions)))
    ]


def _cut(whole: OffsetRange, parts: int) -> list[OffsetRange]:
    parts = min(parts, whole.size)
    bounds = [whole.start + whole.size * part // parts for part in range(parts + 1)]
    return [whole._replace(start=start, end=end) for start, end in pairwise(bounds)]


def limit_offsets(start: Offsets, end: Offsets, max_rows: int) -> Offsets:
    """Move ``end`` back so that at most about ``max_rows`` lie before it.

    In proportion to what each partition has; one that has little is not starved.

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
