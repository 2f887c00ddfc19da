"""Rows become records that clients we did not write read; wrong columns are named."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.types import StructType

from mpbroker.spark.sink import check_schema, parse_sink_options
from tests.spark.topic_records import topic_records

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def consume(bootstrap):
    """Read a partition from its start through librdkafka, until there is no more."""

    def read(topic, partition=0):
        return [
            (message.key(), message.value(), tuple(message.headers() or ()))
            for message in topic_records(bootstrap, topic, partition)
        ]

    return read


def test_rows_are_written_with_keys_headers_and_partitions(
    spark, bootstrap, make_topic, consume
):
    topic = make_topic(partitions=2)
    frame = spark.createDataFrame(
        [
            ("k1", bytearray(b"v1"), [("h", bytearray(b"\xff"))], 1),
            (None, bytearray(b""), [("n", None)], 1),
            ("k3", None, None, 0),
        ],
        "key STRING, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>,"
        " partition INT",
    ).coalesce(1)
    writer = frame.write.format("mpbroker").mode("append")
    writer.options(**{"kafka.bootstrap.servers": bootstrap, "topic": topic}).save()
    assert consume(topic, 1) == [
        (b"k1", b"v1", (("h", b"\xff"),)),
        (None, b"", (("n", None),)),
    ]
    assert consume(topic, 0) == [(b"k3", None, ())]


def test_a_column_chooses_the_topic_and_the_option_overrules_it(
    spark, bootstrap, make_topic, consume
):
    one, other = make_topic(), make_topic()
    frame = spark.createDataFrame(
        [(one, "a"), (other, "b")], "topic STRING, value STRING"
    )
    options = {"kafka.bootstrap.servers": bootstrap, "kafka.compression.type": "lz4"}
    frame.write.format("mpbroker").mode("append").options(**options).save()
    assert [value for _, value, _ in consume(one)] == [b"a"]
    assert [value for _, value, _ in consume(other)] == [b"b"]
    options["topic"] = one
    frame.write.format("mpbroker").mode("append").options(**options).save()
    assert sorted(value for _, value, _ in consume(one)) == [b"a", b"a", b"b"]


def test_a_stream_goes_from_topic_to_topic(
    spark, read_stream, finish, bootstrap, make_topic, consume, tmp_path
):
    source, target = make_topic(), make_topic()
    spark.range(1_000).selectExpr("CAST(id AS STRING) AS value").coalesce(
        1
    ).write.format("mpbroker").mode("append").options(
        **{"kafka.bootstrap.servers": bootstrap, "topic": source}
    ).save()
    writer = (
        read_stream(subscribe=source, startingOffsets="earliest")
        .load()  # with the columns that records have no place for
        .writeStream.format("mpbroker")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("topic", target)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
    )
    finish(writer.start)
    assert [int(value) for _, value, _ in consume(target)] == list(range(1_000))


def test_what_a_sink_in_python_cannot_do_is_refused_and_foreach_batch_does_it(
    spark, read_stream, finish, bootstrap, make_topic, consume, tmp_path
):
    source, target = make_topic(), make_topic()
    to = {"kafka.bootstrap.servers": bootstrap, "topic": target}
    words = spark.createDataFrame([("a",), ("b",), ("a",)], "value STRING")
    with pytest.raises(AnalysisException, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
        words.write.format("mpbroker").options(**to).save()
    words.write.format("mpbroker").mode("append").options(
        **{**to, "topic": source}
    ).save()
    counts = (
        read_stream(subscribe=source, startingOffsets="earliest")
        .load()
        .groupBy("value")
        .count()
        .selectExpr("concat(string(value), ' ', count) AS value")
        .writeStream.outputMode("update")
        .trigger(availableNow=True)
    )
    refused = counts.format("mpbroker").options(**to)
    refused = refused.option("checkpointLocation", str(tmp_path / "refused"))
    with pytest.raises(Exception, match="Update mode"):
        finish(refused.start)

    def write(frame, _):
        frame.write.format("mpbroker").mode("append").options(**to).save()

    counts = counts.foreachBatch(write)
    finish(counts.option("checkpointLocation", str(tmp_path / "checkpoint")).start)
    assert {value for _, value, _ in consume(target)} == {b"a 2", b"b 1"}


def test_columns_that_records_have_no_place_for_are_named_unless_they_were_read(caplog):
    schema = StructType().add("value", "string").add("offset", "long")
    schema = schema.add("timestamp", "timestamp").add("timestampType", "integer")
    given = {"kafka.bootstrap.servers": "h:1", "topic": "t"}
    check_schema(schema, parse_sink_options(given))
    assert caplog.messages == []
    check_schema(schema.add("vlaue", "string"), parse_sink_options(given))
    assert caplog.messages == ["column 'vlaue' is ignored: a record has no such field"]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("key STRING", {"topic": "t"}, "no column 'value'"),
        ("value STRING", {}, "no topic: give the option topic=NAME"),
        ("value INT", {"topic": "t"}, "'value' is int; it must be STRING or BINARY"),
        ("value STRING, partition BIGINT", {"topic": "t"}, "'partition' is bigint"),
        ("value STRING, headers ARRAY<STRING>", {"topic": "t"}, "'headers' is array"),
        (
            "value STRING",
            {"topic": "t", "kafka.acks": "some"},
            r"kafka\.acks",
        ),
        (
            "value STRING",
            {"topic": "t", "kafka.value.serializer": "x"},
            "cast the value column",
        ),
    ],
)
def test_what_cannot_be_written_is_named(spark, bootstrap, columns, options, message):
    frame = spark.createDataFrame([], columns)
    writer = frame.write.format("mpbroker").mode("append")
    with pytest.raises(Exception, match=message):
        writer.options(**{"kafka.bootstrap.servers": bootstrap} | options).save()


def test_a_record_that_is_refused_fails_the_write(spark, bootstrap, make_topic):
    topic = make_topic(**{"max.message.bytes": "1000"})
    frame = spark.createDataFrame([("x" * 5_000,)], "value STRING")
    with pytest.raises(
        Exception, match=r"MESSAGE_TOO_LARGE|max.message.bytes|too large"
    ):
        frame.write.format("mpbroker").mode("append").options(
            **{"kafka.bootstrap.servers": bootstrap, "topic": topic}
        ).save()
