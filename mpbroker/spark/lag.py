"""Compute how far a stream is behind its topics, from Spark's progress reports.

Spark's connector gives these figures as ``metrics`` of its source. A source in Python
cannot add any, but Spark's progress reports have all the offsets that are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from mpbroker.spark.offsets import OffsetReader, Offsets, OffsetsError, from_json

_ANSWER_S: Final = 10.0


def lag_metrics(
    source: Mapping[str, Any], offset_bytes: float | None = None
) -> dict[str, str]:
    """Return the lag of a stream under the names and in the form of Spark's connector.

    The result is empty for a source that has read nothing yet, or has no offsets of
    Kafka's kind. It has ``estimatedTotalBytesBehindLatest`` only with ``offset_bytes``.

    Args:
        source: an element of ``query.lastProgress["sources"]``.
        offset_bytes: the mean number of bytes for each offset, which the function
            `offset_bytes` estimates from the stream's options.
    """
    behind = list(offsets_behind(source).values())
    if not behind:
        return {}
    found = {
        "minOffsetsBehindLatest": str(min(behind)),
        "maxOffsetsBehindLatest": str(max(behind)),
        "avgOffsetsBehindLatest": str(sum(behind) / len(behind)),
    }
    if offset_bytes is not None:
        found["estimatedTotalBytesBehindLatest"] = str(int(sum(behind) * offset_bytes))
    return found


def offsets_behind(source: Mapping[str, Any]) -> Offsets:
    """Return how many offsets of each partition a stream has not read yet.

    Args:
        source: see `lag_metrics`.
    """
    latest, reached = _offsets(source, "latestOffset"), _offsets(source, "endOffset")
    return {
        partition: max(0, latest[partition] - offset)
        for partition, offset in reached.items()
        if partition in latest
    }


def _offsets(source: Mapping[str, Any], name: str) -> Offsets:
    found: Any = source.get(name)
    try:
        return from_json(orjson.loads(found) if isinstance(found, str) else found)
    except (ValueError, OffsetsError):
        return {}  # null, or of another kind of source


def offset_bytes(options: Mapping[str, str]) -> float | None:
    """Estimate the mean number of bytes for each offset of a source.

    It is the size of the partitions divided by the number of their offsets. None: the
    topic is empty, or the broker does not tell its sizes to this user.

    Args:
        options: the source's options, as for a stream.

    Raises:
        OptionError: an option of the source is wrong.
    """
    from mpbroker.base.errors import MpbrokerError
    from mpbroker.client.cluster import Cluster
    from mpbroker.protocol.messages.describe_log_dirs import (
        DescribableLogDirTopic,
        DescribeLogDirsRequest,
        DescribeLogDirsResponse,
    )
    from mpbroker.spark.options import EARLIEST, LATEST, parse_source_options

    checked = parse_source_options(
        {"startingOffsets": "earliest", **options}, streaming=True
    )
    reader = OffsetReader(checked)
    try:
        leaders = reader.partitions()
        begin, end = reader.offsets(leaders, EARLIEST), reader.offsets(leaders, LATEST)
        offsets = sum(end[each] - begin[each] for each in leaders)
        size = 0
        with Cluster(checked.bootstrap, _ANSWER_S, checked.client) as cluster:
            cluster.metadata([])
            for node in set(leaders.values()):
                theirs: dict[str, list[int]] = {}
                for each in leaders:
                    if leaders[each] == node:
                        theirs.setdefault(each.topic, []).append(each.partition)
                request = DescribeLogDirsRequest(
                    topics=[
                        DescribableLogDirTopic(topic=topic, partitions=partitions)
                        for topic, partitions in theirs.items()
                    ]
                )
                answer = cluster.broker(node).request(request, DescribeLogDirsResponse)
                size += sum(
                    partition.partition_size
                    for result in answer.results
                    for topic in result.topics
                    for partition in topic.partitions
                )
    except MpbrokerError:
        return None
    finally:
        reader.close()
    return size / offsets if offsets and size else None
