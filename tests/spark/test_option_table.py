"""The table of options in docs/spark.md has all of Spark's, and says what they do."""

from __future__ import annotations

import logging
import re

import pytest

from mpbroker.spark.options import SOURCE_OPTIONS, OptionError, parse_source_options
from mpbroker.spark.sink import parse_sink_options
from tests.test_document_snippets import SPARK

NEEDED = {"kafka.bootstrap.servers": "h:9092", "subscribe": "t"}
SINK = {"kafka.bootstrap.servers": "h:9092", "topic": "t"}
OURS = {"commitGroup"}

# What Spark's guide names: options of the source and of the sink, and Spark's settings.
# Source: "Structured Streaming + Kafka Integration Guide".
GUIDE = re.findall(
    r"\S+",
    """
assign subscribe subscribePattern kafka.bootstrap.servers startingTimestamp
startingOffsetsByTimestamp startingOffsets endingTimestamp endingOffsetsByTimestamp
endingOffsets failOnDataLoss kafkaConsumer.pollTimeoutMs fetchOffset.numRetries
fetchOffset.retryIntervalMs maxOffsetsPerTrigger minOffsetsPerTrigger maxTriggerDelay
minPartitions maxRecordsPerPartition groupIdPrefix kafka.group.id includeHeaders
startingOffsetsByTimestampStrategy spark.sql.streaming.kafka.useDeprecatedOffsetFetching
spark.kafka.consumer.cache.* spark.kafka.consumer.fetchedData.cache.*
spark.kafka.producer.cache.* topic kafka.partitioner.class kafka.auto.offset.reset
kafka.key.deserializer kafka.value.deserializer kafka.key.serializer
kafka.value.serializer kafka.enable.auto.commit kafka.interceptor.classes
spark.kafka.clusters.* spark.security.credentials.kafka.enabled
""",
)

# A value that is not the default of each option that has an effect.
BATCH = {
    "assign": '{"t":[0]}',
    "subscribe": "other",
    "subscribePattern": "t.*",
    "startingTimestamp": "1000",
    "startingOffsetsByTimestamp": '{"t":{"0":1000}}',
    "startingOffsetsByTimestampStrategy": "latest",
    "startingOffsets": '{"t":{"0":7}}',
    "endingTimestamp": "1000",
    "endingOffsetsByTimestamp": '{"t":{"0":1000}}',
    "endingOffsets": '{"t":{"0":7}}',
    "failOnDataLoss": "false",
    "kafkaConsumer.pollTimeoutMs": "5",
    "fetchOffset.numRetries": "7",
    "fetchOffset.retryIntervalMs": "7",
    "minPartitions": "7",
    "maxRecordsPerPartition": "7",
    "includeHeaders": "true",
    "kafka.bootstrap.servers": "other:9092",
    "kafka.isolation.level": "read_committed",
    "kafka.max.partition.fetch.bytes": "7",
    "kafka.request.timeout.ms": "7",
    "kafka.client.id": "me",
    "kafka.security.protocol": "SSL",
}
STREAM = {
    "groupIdPrefix": "team",
    "kafka.group.id": "lag",
    "maxOffsetsPerTrigger": "7",
    "minOffsetsPerTrigger": "7",
    "maxTriggerDelay": "7s",
}
# What a group's options are about.
OF_A_GROUP = {
    "groupIdPrefix": {"commitGroup": "lag"},
    "kafka.group.id": {"commitGroup": "lag", "groupIdPrefix": "team"},
}
WRITE = {
    "topic": "other",
    "kafka.acks": "1",
    "kafka.compression.type": "lz4",
    "kafka.linger.ms": "7",
}


def option_table():
    """Return what docs/spark.md says of each option: same, better, refused..."""
    text = SPARK.read_text().partition("### Every option of Spark's connector")[2]
    rows = re.findall(r"^\| (`.*|other .*|any .*) \| (.*) \| .*\|$", text, re.M)
    return {
        name: here for names, here in rows for name in re.findall(r"`([^`]+)`", names)
    }


def parse(options, streaming=False):
    # assign and subscribePattern take the place of subscribe.
    needed = {k: v for k, v in NEEDED.items() if k != "subscribe"}
    if {"assign", "subscribePattern"} & set(options):
        return parse_source_options({**needed, **options}, streaming=streaming)
    return parse_source_options({**NEEDED, **options}, streaming=streaming)


def test_the_table_has_each_option_of_the_guide_and_of_the_source():
    table = option_table()
    assert set(GUIDE) <= set(table)
    assert set(SOURCE_OPTIONS) - OURS <= set(table)
    assert set(table.values()) == {"same", "better", "no effect", "refused"}


def test_an_option_that_is_the_same_or_better_has_an_effect():
    for streaming, examples in ((False, BATCH), (True, STREAM)):
        for name, value in examples.items():
            needed = OF_A_GROUP.get(name, {})
            found = parse(needed | {name: value}, streaming)
            assert found != parse(needed, streaming), name
    for name, value in WRITE.items():
        assert parse_sink_options({**SINK, name: value}) != parse_sink_options(SINK)
    known = {
        name for name, here in option_table().items() if here in ("same", "better")
    }
    patterns = {name for name in known if name.endswith("*")}
    assert known - patterns == set(BATCH) | set(STREAM) | set(WRITE)


@pytest.fixture
def warnings_of(caplog):
    def warned(options):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert parse(options) == parse({})
        return [each.getMessage() for each in caplog.records]

    return warned


def test_an_option_without_effect_changes_nothing(warnings_of):
    for name, here in option_table().items():
        if here == "no effect" and not name.startswith("spark."):
            assert warnings_of({name: "x"}), name


@pytest.mark.parametrize("name", ["groupIdPrefix", "kafka.group.id"])
def test_an_option_about_groups_is_told_where_no_group_is_named(name, warnings_of):
    [said] = warnings_of({name: "x"})
    assert said.startswith(f"option {name} has no effect without commitGroup: ")


def test_the_group_of_a_query_has_the_prefix_or_the_id_that_is_given():
    def group(**options):
        given = {name.replace("_", "."): value for name, value in options.items()}
        return parse({"commitGroup": "lag", **given}, streaming=True).commit_group

    assert group() == "lag"
    assert group(groupIdPrefix="team") == "team-lag"
    assert group(kafka_group_id="lag", groupIdPrefix="team") == "lag"
    assert parse({"kafka.group.id": "x"}, streaming=True).commit_group is None
    with pytest.raises(OptionError, match=r"kafka\.group\.id='x' name two groups"):
        group(kafka_group_id="x")


def test_a_name_that_is_nearly_right_is_told(warnings_of):
    assert warnings_of({"startingOffset": "x", "kafka.fetch.max": "1"}) == [
        "option startingoffset is unknown and is ignored; did you mean"
        " startingOffsets?",
        "option kafka.fetch.max has no meaning here and is ignored",
    ]
    assert warnings_of({"speed": "x"}) == ["option speed is unknown and is ignored"]


def test_a_refused_option_is_refused_with_what_to_use():
    for name, here in option_table().items():
        if here != "refused":
            continue
        ask = parse_sink_options if name == "kafka.partitioner.class" else parse
        given = SINK if ask is parse_sink_options else {}
        with pytest.raises(OptionError, match=rf"{name} is not supported: \w+"):
            ask({**given, name: "x"})


def test_each_option_that_is_known_is_read():
    # A wrong value of each is refused, but of those that are any text.
    taken = {"subscribe", "groupIdPrefix", "commitGroup", "subscribePattern"}
    for name in set(SOURCE_OPTIONS) - taken:
        streaming = not name.startswith("ending")
        with pytest.raises(OptionError, match=f"(?i){re.escape(name)}='!'"):
            parse({name: "!"}, streaming)
