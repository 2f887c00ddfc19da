"""Which topics a Kafka Streams topology needs, and of how many partitions."""

from __future__ import annotations

import pytest

from mpbroker.coordinator.streams.record_types import (
    RecordCopartitionGroup,
    RecordSubtopology,
    RecordTopicInfo,
    StreamsGroupTopologyValue,
)
from mpbroker.coordinator.streams.topology import StatusCode, configure
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError


def topic(name: str, partitions: int = 0) -> RecordTopicInfo:
    return RecordTopicInfo(name=name, partitions=partitions)


def word_count() -> list[RecordSubtopology]:
    """Return an application that splits lines, and counts words by their keys."""
    return [
        RecordSubtopology(
            subtopology_id="0",
            source_topics=["lines"],
            repartition_sink_topics=["words-repartition"],
        ),
        RecordSubtopology(
            subtopology_id="1",
            repartition_source_topics=[topic("words-repartition")],
            state_changelog_topics=[topic("counts-changelog")],
        ),
    ]


def configured(subtopologies: list[RecordSubtopology], **counts: int) -> object:
    names = {name.replace("_", "-"): count for name, count in counts.items()}
    value = StreamsGroupTopologyValue(epoch=0, subtopologies=subtopologies)
    return configure(value, lambda name: names.get(name, 0))


def test_internal_topics_have_as_many_partitions_as_their_largest_source() -> None:
    found = configured(word_count(), lines=6)
    missing = {each.name: each.num_partitions for each in found.missing}
    assert missing == {"words-repartition": 6, "counts-changelog": 6}
    assert found.problem.code is StatusCode.MISSING_INTERNAL_TOPICS
    assert found.problem.detail == (
        "Internal topics are missing: counts-changelog, words-repartition"
    )
    ready = configured(word_count(), lines=6, words_repartition=6, counts_changelog=6)
    assert ready.problem is None
    assert [each.num_tasks for each in ready.subtopologies.values()] == [6, 6]


def test_a_missing_source_topic_is_named() -> None:
    found = configured(word_count())
    assert found.subtopologies is None
    assert found.problem.code is StatusCode.MISSING_SOURCE_TOPICS
    assert found.problem.detail == "Source topics lines are missing."


def test_an_internal_topic_of_another_size_is_named() -> None:
    found = configured(word_count(), lines=6, words_repartition=6, counts_changelog=2)
    assert found.problem.code is StatusCode.INCORRECTLY_PARTITIONED_TOPICS
    assert found.problem.detail == (
        "Existing topic counts-changelog has different number of partitions: expected"
        " 6, found 2"
    )


def test_a_number_that_the_application_has_set_is_kept() -> None:
    first, second = word_count()
    second.repartition_source_topics = [topic("words-repartition", 3)]
    found = configured([first, second], lines=6)
    missing = {each.name: each.num_partitions for each in found.missing}
    assert missing == {"words-repartition": 3, "counts-changelog": 3}


def join_of(*sources: str, repartition: list[RecordTopicInfo]) -> RecordSubtopology:
    return RecordSubtopology(
        subtopology_id="0",
        source_topics=list(sources),
        repartition_source_topics=repartition,
        repartition_sink_topics=[each.name for each in repartition],
        copartition_groups=[
            RecordCopartitionGroup(
                source_topics=list(range(len(sources))),
                repartition_source_topics=list(range(len(repartition))),
            )
        ],
    )


def test_topics_that_are_joined_have_equal_numbers() -> None:
    unequal = configured([join_of("a", "b", repartition=[])], a=2, b=3)
    assert unequal.problem.code is StatusCode.INCORRECTLY_PARTITIONED_TOPICS
    assert "[{a=2, b=3}]" in unequal.problem.detail
    fixed = configured([join_of("a", repartition=[topic("r", 5)])], a=4)
    assert "[5] of repartition topic [r]" in fixed.problem.detail
    free = configured([join_of("a", repartition=[topic("r")])], a=4)
    assert [each.num_partitions for each in free.missing] == [4]


@pytest.mark.parametrize(
    ("subtopology", "message"),
    [
        (
            RecordSubtopology(
                subtopology_id="0",
                repartition_source_topics=[topic("r")],
                repartition_sink_topics=["r"],
            ),
            "loops in the topology",
        ),
        (
            RecordSubtopology(
                subtopology_id="0",
                source_topics=["a"],
                repartition_source_topics=[topic("r")],
            ),
            "never used as a sink topic",
        ),
        (RecordSubtopology(subtopology_id="7"), "subtopology 7"),
        (
            RecordSubtopology(
                subtopology_id="0",
                source_topics=["a"],
                copartition_groups=[RecordCopartitionGroup(source_topics=[1])],
            ),
            "names source topic 1",
        ),
    ],
)
def test_a_topology_that_no_topics_could_fit_is_refused(
    subtopology: RecordSubtopology, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        configured([subtopology], a=1)
    assert caught.value.error_code is ErrorCode.STREAMS_INVALID_TOPOLOGY
