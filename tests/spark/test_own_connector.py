"""Spark's own Kafka connector works unchanged: batch, stream, write; ours agrees.

Both read the same topics and write the same rows with the same options: the rows, the
batches of a stream, or that there is a refusal, must be the same. Each option that
docs/spark.md calls "same" or "better" is among them; `test_secured` has TLS and SASL.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping

import pytest
from confluent_kafka import Producer

from mpbroker.spark.lag import lag_metrics
from tests.spark.test_option_table import option_table
from tests.spark.topic_records import topic_records
from tests.support.children import wait_until
from tests.support.fetch_clients import have_spark_connector

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not have_spark_connector(),
        reason="Spark's Kafka connector is not in .downloads/spark (Maven)",
    ),
]

# The connector refuses these when it writes, or not at all.
OF_THE_SINK = {
    "kafka.key.serializer",
    "kafka.value.serializer",
    "kafka.partitioner.class",
}
# A batch has so many records, or waits for so long.
WAITING = {"minOffsetsPerTrigger": "300", "maxTriggerDelay": "1d"}
COLUMNS = ["partition", "offset", "key", "value", "timestamp", "timestampType"]


@pytest.fixture
def kafka(spark, bootstrap):
    def reader(read):
        return read.format("kafka").option("kafka.bootstrap.servers", bootstrap)

    return reader


def fill(bootstrap, topic, count=500):
    producer = Producer({"bootstrap.servers": bootstrap, "compression.type": "zstd"})
    for number in range(count):
        producer.produce(topic, b"%d" % number, b"k", partition=number % 2)
    assert producer.flush(90) == 0


def rows_of(frame):
    return sorted(tuple(map(str, row)) for row in frame.select(*COLUMNS).collect())


def test_a_batch_query_shows_what_ours_shows(spark, kafka, read, bootstrap, make_topic):
    topic = make_topic(partitions=2)
    fill(bootstrap, topic)
    theirs = kafka(spark.read).option("subscribe", topic).load()
    assert rows_of(theirs) == rows_of(read(subscribe=topic).load())
    assert theirs.count() == 500


def test_a_stream_goes_on_from_its_checkpoint_and_is_written_to_a_topic(
    spark, kafka, read, finish, bootstrap, make_topic, tmp_path
):
    source, target = make_topic(partitions=2), make_topic(partitions=1)
    for expected in (500, 1_000):
        fill(bootstrap, source)
        writer = (
            kafka(spark.readStream)
            .option("subscribe", source)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", "300")
            .load()
            .select("key", "value")
            .writeStream.format("kafka")
            .option("kafka.bootstrap.servers", bootstrap)
            .option("topic", target)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
        )
        finish(writer.start)
        assert read(subscribe=target).load().count() == expected


T0 = time.time_ns() // 1_000_000 - 60_000


@pytest.fixture
def topics(bootstrap, make_topic, delete_records):
    """Two topics: one with headers and timestamps; one with transactions, and cut."""
    plain, cut = make_topic(partitions=2), make_topic(partitions=1)
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(60):
        producer.produce(
            plain,
            None if number % 7 == 0 else b"%d" % number,
            None if number % 5 == 0 else b"k",
            partition=number % 2,
            timestamp=T0 + number * 1_000,
            headers=[("h", b"1"), ("h", None)] if number % 3 == 0 else None,
        )
    assert producer.flush(90) == 0
    writer = Producer({"bootstrap.servers": bootstrap, "transactional.id": cut})
    writer.init_transactions(90)
    for turn in range(8):
        writer.begin_transaction()
        for number in range(5):
            writer.produce(cut, b"%d of %d" % (number, turn), partition=0)
        writer.flush(90)
        (writer.abort_transaction if turn % 2 else writer.commit_transaction)(90)
    delete_records(cut, 0, 3)
    return plain, cut


def offsets(topic, **partitions):
    return json.dumps({topic: {k.strip("p"): v for k, v in partitions.items()}})


def option_cases(plain, cut):
    """Return the options of batch queries by the name of the case."""
    both = {"subscribe": f"{plain},{cut}"}
    of_plain, of_cut = {"subscribe": plain}, {"subscribe": cut}
    committed = {"kafka.isolation.level": "read_committed"}
    lossy = {"failOnDataLoss": "false"}
    early = str(T0 + 20_500)
    future = str(T0 + 10**9)
    part = offsets(plain, p0=10, p1=-2)
    from_part = of_plain | {"startingOffsets": part}
    long_ago = {"startingOffsets": offsets(cut, p0=0)}
    return {
        "topics": both,
        "pattern": {"subscribePattern": f"{plain[:-1]}[\\p{{XDigit}}&&[^.]]"},
        "pattern within": {"subscribePattern": f"{plain[1:-1]}|^{cut}$"},
        "pattern of none": {"subscribePattern": r"\p{Lower}\p{Upper}"},
        "assign": {"assign": json.dumps({plain: [1], cut: [0]})},
        "headers": of_plain | {"includeHeaders": "true"},
        "offsets": from_part | {"endingOffsets": offsets(plain, p0=-1, p1=20)},
        "offsets of some partitions": of_plain
        | {"startingOffsets": offsets(plain, p0=1)},
        "timestamp": of_plain | {"startingTimestamp": early},
        "ending timestamp": of_plain | {"endingTimestamp": early},
        "timestamps": of_plain
        | {"startingOffsetsByTimestamp": offsets(plain, p0=T0 + 30_000, p1=T0)},
        "ending timestamps": of_plain
        | {"endingOffsetsByTimestamp": offsets(plain, p0=T0 + 30_000, p1=T0 + 9_000)},
        "future": of_plain | {"startingTimestamp": future},
        "future is latest": of_plain
        | {"startingTimestamp": future, "startingOffsetsByTimestampStrategy": "latest"},
        "start after the end in time": of_plain
        | {"startingTimestamp": str(T0 + 40_000), "endingTimestamp": early},
        "future end": of_plain | {"endingTimestamp": future},
        "committed": of_cut | committed,
        "committed, to a marker": of_cut
        | committed
        | {"endingOffsets": offsets(cut, p0=12)},
        "committed, inside an aborted": of_cut
        | committed
        | {"startingOffsets": offsets(cut, p0=7), "endingOffsets": offsets(cut, p0=9)},
        "committed, in pieces": of_cut | committed | {"minPartitions": "9"},
        "uncommitted, in pieces": of_cut | {"minPartitions": "9"},
        "lost": of_cut | long_ago,
        "lost, and no matter": of_cut | long_ago | lossy,
        "beyond the end": of_plain | {"startingOffsets": offsets(plain, p0=99, p1=0)},
        "beyond the end, and no matter": of_plain
        | lossy
        | {"startingOffsets": offsets(plain, p0=99, p1=0)},
        "end before start": from_part | {"endingOffsets": offsets(plain, p0=2, p1=2)},
        "latest": of_plain | {"startingOffsets": "latest"},
        "end is earliest": of_plain | {"endingOffsets": "earliest"},
        "two subscriptions": of_plain | {"assign": json.dumps({plain: [0]})},
        "no such topic": {"subscribe": f"{plain}-not"},
        "a group": of_plain | {"kafka.group.id": "mine"},
        "a group's prefix": of_plain | {"groupIdPrefix": "mine"},
        "an unknown name": of_plain | {"startingOffset": "latest"},
        **{
            name: of_plain | {name: "true"}
            for name, here in option_table().items()
            if here == "refused" and name not in OF_THE_SINK
        },
        "zero parts": of_plain | {"minPartitions": "0"},
        "small tasks": of_cut | {"maxRecordsPerPartition": "4"},
        "of the client": of_plain
        | {
            "kafka.client.id": "me",
            "kafka.max.partition.fetch.bytes": "100",
            "kafka.request.timeout.ms": "20000",
            "kafka.security.protocol": "PLAINTEXT",
            "kafkaConsumer.pollTimeoutMs": "60000",
            "fetchOffset.numRetries": "2",
            "fetchOffset.retryIntervalMs": "5",
        },
    }


def stream_cases(plain, cut):
    """Return the options of streams by the name of the case."""
    of_plain, of_cut = {"subscribe": plain}, {"subscribe": cut}
    from_start = {"startingOffsets": "earliest"}
    long_ago = {"startingOffsets": offsets(cut, p0=0)}
    return {
        "few offsets a batch": of_plain | from_start | {"maxOffsetsPerTrigger": "7"},
        "pattern, timestamps, headers, more tasks": {
            "subscribePattern": plain[1:],
            "startingOffsetsByTimestamp": offsets(plain, p0=T0 + 30_000, p1=T0 + 9_000),
            "includeHeaders": "true",
            "minPartitions": "5",
        },
        "partitions, offsets, small tasks, a prefix": {
            "assign": json.dumps({plain: [0], cut: [0]}),
            "startingOffsets": json.dumps({plain: {"0": 10}, cut: {"0": -2}}),
            "maxRecordsPerPartition": "4",
            "groupIdPrefix": "mine",
        },
        "one timestamp, committed, a group": {
            "subscribe": f"{plain},{cut}",
            "startingTimestamp": str(T0 + 20_500),
            "kafka.isolation.level": "read_committed",
            "kafka.group.id": "mine",
        },
        "future is latest": of_plain
        | {
            "startingTimestamp": str(T0 + 10**9),
            "startingOffsetsByTimestampStrategy": "latest",
        },
        "future": of_plain | {"startingTimestamp": str(T0 + 10**9)},
        "lost": of_cut | long_ago,
        "lost, and no matter": of_cut | long_ago | {"failOnDataLoss": "false"},
        "an end": of_plain | from_start | {"endingOffsets": offsets(plain, p0=9, p1=9)},
        "min above max": of_plain
        | {"minOffsetsPerTrigger": "8", "maxOffsetsPerTrigger": "7"},
    }


def sink_cases(one, other):
    """Return columns and options of writes by the name of the case."""
    key, value = "string(id % 7) key", "string(id) value"
    to = {"topic": one}
    header = "named_struct('key', 'h', 'value', binary(string(id)))"
    null = "named_struct('key', 'n', 'value', cast(null as binary))"
    by_column = [f"if(id % 2 = 0, '{one}', '{other}') topic", key, value]
    settings = {"acks": "1", "compression.type": "lz4", "linger.ms": "7"}
    return {
        "topic by option": ([key, value], to),
        "topic by column": (by_column, {}),
        "option above column": (by_column, to),
        "partition": (["int(id % 2) partition", key, value], to),
        "headers": (
            [f"if(id % 3 = 0, null, array({header}, {null})) headers", key, value],
            to,
        ),
        "bytes and nulls": (["binary('k') key", "if(id % 2 = 0, null, 'v') value"], to),
        "of a producer": (
            [key, value],
            to | {f"kafka.{name}": text for name, text in settings.items()},
        ),
        "no topic": ([key, value], {}),
        "no topic in a row": ([key, value, "string(null) topic"], {}),
        "no value": ([key], to),
        "a number for a value": (["id value"], to),
        "a text for a partition": (["'1' partition", value], to),
        "a serializer": ([value], to | {"kafka.value.serializer": "x"}),
    }


def test_each_option_that_is_the_same_or_better_has_a_case():
    cases = [*option_cases("p", "c").values(), *stream_cases("p", "c").values()]
    cases += [options for _, options in sink_cases("p", "c").values()]
    cases.append(WAITING)
    used = {name for options in cases for name in options}
    table = option_table().items()
    known = {name for name, here in table if here in ("same", "better")}
    # The first is in all cases, the others are in `test_secured`.
    elsewhere = {"kafka.bootstrap.servers", "kafka.sasl.*", "kafka.ssl.*"}
    assert known - used == elsewhere


def test_the_table_of_options_has_all_that_the_connector_has(spark):
    provider = "org.apache.spark.sql.kafka010.KafkaSourceProvider$"
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    fields = loader.loadClass(provider).getDeclaredFields()
    found = set()
    for each in fields:
        if each.getType().getSimpleName() == "String":
            each.setAccessible(True)
            found.add(each.get(None))
    # The others are messages, names of classes and a time.
    options = {each for each in found if re.fullmatch(r"[a-z.]+", each)}
    assert {"assign", "maxoffsetspertrigger", "topic"} <= options
    assert options <= {name.lower() for name in option_table()}


def outcome(reader, options):
    """Return all rows with all columns, or that there is an error."""
    try:
        rows = reader.options(**options).load().collect()
    except Exception:  # noqa: BLE001  # of many kinds: only that there is one counts
        return "refused"
    return sorted(str(row.asDict(recursive=True)) for row in rows)


def test_each_option_gives_the_rows_that_the_connector_gives(
    spark, kafka, read, topics
):
    seen, different = {}, {}
    for name, options in option_cases(*topics).items():
        seen[name] = outcome(read(), options)
        theirs = outcome(kafka(spark.read), options)
        if theirs != seen[name]:
            different[name] = {"ours": seen[name], "theirs": theirs}
    assert not different
    refused = {name for name, found in seen.items() if found == "refused"}
    assert {"lost", "latest", "end before start", "beyond the end"} <= refused
    assert not refused & {"pattern", "headers", "committed, to a marker", "timestamp"}
    assert len(seen["committed"]) == 4 * 5 - 3


def stream_outcome(spark, finish, reader, options):
    """Return the batches' sizes, the lag after each, and all rows with all columns.

    Or that there is an error.
    """
    name = f"s{uuid.uuid4().hex}"
    try:
        frame = reader.options(**options).load()
        writer = frame.writeStream.format("memory").queryName(name)
        query = finish(writer.trigger(availableNow=True).start)
        rows = spark.table(name).collect()
    except Exception:  # noqa: BLE001  # as in `outcome`
        return "refused"
    finally:
        spark.catalog.dropTempView(name)  # a query that failed has made it, too
    batches = [each for each in query.recentProgress if each["numInputRows"]]
    return (
        [each["numInputRows"] for each in batches],
        [lag_of(each["sources"][0]) for each in batches],
        sorted(str(row.asDict(recursive=True)) for row in rows),
    )


def lag_of(source: Mapping[str, object]) -> dict[str, float]:
    """Return a source's lag: the connector's metrics, or ours of its offsets."""
    found = source["metrics"] or lag_metrics(source)
    return {name: float(found[name]) for name in found if "OffsetsBehind" in name}


def test_a_stream_has_the_batches_the_lag_and_the_rows_of_the_connector(
    spark, kafka, read_stream, finish, topics
):
    seen, different = {}, {}
    for name, options in stream_cases(*topics).items():
        seen[name] = stream_outcome(spark, finish, read_stream(), options)
        theirs = stream_outcome(spark, finish, kafka(spark.readStream), options)
        if theirs != seen[name]:
            different[name] = {"ours": seen[name], "theirs": theirs}
    assert not different
    refused = {name for name, found in seen.items() if found == "refused"}
    assert refused == {"future", "lost", "an end", "min above max"}
    sizes, lag, rows = seen["few offsets a batch"]
    assert sum(sizes) == len(rows) == 60
    assert max(sizes) <= 7
    assert [set(each) for each in lag] == [
        {f"{which}OffsetsBehindLatest" for which in ("min", "max", "avg")}
    ] * len(sizes)
    assert seen["future is latest"][0] == []


def test_few_records_wait_for_more_or_for_the_delay_as_the_connector_does(
    spark, kafka, read_stream, bootstrap, make_topic
):
    topic = make_topic()
    write = Producer({"bootstrap.servers": bootstrap, "linger.ms": "500"})

    def put(count):
        for number in range(count):  # they come as one batch
            write.produce(topic, b"%d" % number)
        assert write.flush(90) == 0

    def begin(reader, options):
        options = {"subscribe": topic, "startingOffsets": "earliest", **options}
        writer = reader.options(**options).load().writeStream.format("noop")
        return writer.trigger(processingTime="100 milliseconds").start()

    def sizes(query):
        if error := query.exception():
            raise error
        found = [each["numInputRows"] for each in query.recentProgress]
        return [size for size in found if size]

    put(500)
    patient, hasty = [], []
    try:
        for reader in (read_stream, lambda: kafka(spark.readStream)):
            for kind, delay in ((patient, "1d"), (hasty, "1s")):
                query = begin(reader(), WAITING | {"maxTriggerDelay": delay})
                kind.append(query)
                wait_until(lambda query=query: sizes(query) == [500])
        put(5)
        wait_until(lambda: all(sizes(each) == [500, 5] for each in hasty))
        put(400)
        wait_until(lambda: all(sizes(each)[1:] for each in patient))
        assert [sizes(each) for each in patient] == [[500, 405]] * 2
    finally:
        for each in patient + hasty:
            each.stop()


def written(spark, bootstrap, kind, case, topics):
    """Write the rows of a sink's case; return the records, or that there is an error.

    A record is an index of the topics, a partition, key, value and headers.
    """
    columns, options = sink_cases(*topics)[case]
    frame = spark.range(40, numPartitions=1).selectExpr(*columns)
    writer = frame.write.format(kind).mode("append").options(**options)
    try:
        writer.option("kafka.bootstrap.servers", bootstrap).save()
    except Exception:  # noqa: BLE001  # as in `outcome`
        return "refused"
    return [
        (index, partition, each.key(), each.value(), each.headers())
        for index, topic in enumerate(topics)
        for partition in (0, 1)
        for each in topic_records(bootstrap, topic, partition)
    ]


def test_a_sink_writes_the_records_that_the_connector_writes(
    spark, bootstrap, make_topic
):
    seen, different = {}, {}
    for case in sink_cases("", ""):
        found = {}
        for kind in ("mpbroker", "kafka"):
            topics = make_topic(partitions=2), make_topic(partitions=2)
            found[kind] = written(spark, bootstrap, kind, case, topics)
        seen[case] = found["mpbroker"]
        if found["kafka"] != seen[case]:
            different[case] = found
    assert not different
    refused = {case for case, records in seen.items() if records == "refused"}
    assert refused == {
        *("no topic", "no topic in a row", "no value", "a number for a value"),
        *("a text for a partition", "a serializer"),
    }
    assert all(len(seen[case]) == 40 for case in set(seen) - refused)
    assert {record[:2] for record in seen["topic by column"]} == {
        *((0, 0), (0, 1), (1, 0), (1, 1))
    }
