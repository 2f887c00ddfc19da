"""A stream goes on where its checkpoint says, in batches no larger than asked for."""

from __future__ import annotations

import io
import json

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from mpbroker.spark.lag import lag_metrics, offset_bytes
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.query import run_query
from tests.spark.topic_records import going_transactions, offsets_in, topic_records
from tests.support.children import wait_until
from tests.support.ports import reusable_port

pytestmark = pytest.mark.timeout(900)


def put(bootstrap, topic, first, end, partitions):
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(first, end):
        producer.produce(topic, str(number), partition=number % partitions)
    assert producer.flush(90) == 0


@pytest.fixture
def run(read_stream, finish, tmp_path):
    """Run a query until it has what is there now; return its batches' sizes."""

    def run_query(topic, **options):
        writer = (
            read_stream(subscribe=topic, startingOffsets="earliest", **options)
            .load()
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
        )
        query = finish(lambda: writer.start(str(tmp_path / "rows")))
        return [each["numInputRows"] for each in query.recentProgress]

    return run_query


def test_every_record_once_over_restarts_limits_and_new_partitions(
    spark, run, bootstrap, make_topic, tmp_path
):
    topic = make_topic(partitions=2)
    put(bootstrap, topic, 0, 1_000, 2)
    assert run(topic, maxOffsetsPerTrigger=400) == [400, 400, 200]
    put(bootstrap, topic, 1_000, 1_030, 2)
    assert run(topic, maxOffsetsPerTrigger=400) == [30]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(90)
    put(bootstrap, topic, 1_030, 1_060, 3)
    assert sum(run(topic)) == 30
    rows = spark.read.parquet(str(tmp_path / "rows")).select("value").collect()
    assert sorted(int(bytes(row.value)) for row in rows) == list(range(1_060))
    last = max((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=_number)
    assert offsets_in(json.loads(last.read_text().splitlines()[-1])) == {
        topic: {"0": 525, "1": 525, "2": 10}
    }


def test_the_lag_after_each_batch_has_the_connectors_names(
    read_stream, finish, bootstrap, make_topic, tmp_path
):
    topic = make_topic(partitions=2)
    put(bootstrap, topic, 0, 100, 2)
    writer = (
        read_stream(
            subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=40
        )
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
    )
    query = finish(writer.start)
    size = offset_bytes({"kafka.bootstrap.servers": bootstrap, "subscribe": topic})
    assert size is not None
    assert [lag_metrics(each["sources"][0], size) for each in query.recentProgress] == [
        {
            "minOffsetsBehindLatest": str(behind),
            "maxOffsetsBehindLatest": str(behind),
            "avgOffsetsBehindLatest": f"{behind}.0",
            "estimatedTotalBytesBehindLatest": str(int(2 * behind * size)),
        }
        for behind in (30, 10, 0)
    ]


def _number(path):
    return int(path.name)


def test_records_that_went_before_they_were_read_stop_a_stream(
    run, bootstrap, make_topic, delete_records
):
    topic = make_topic(partitions=1)
    put(bootstrap, topic, 0, 50, 1)
    assert run(topic, maxOffsetsPerTrigger=50) == [50]
    put(bootstrap, topic, 50, 100, 1)
    delete_records(topic, 0, 70)
    with pytest.raises(Exception, match="offsets 50 to 69 cannot be read"):
        run(topic)
    assert run(topic, failOnDataLoss="false") == [30]


def test_a_checkpoint_of_another_topic_is_refused(run, bootstrap, make_topic):
    one, other = make_topic(partitions=1), make_topic(partitions=1)
    put(bootstrap, one, 0, 5, 1)
    assert run(one) == [5]
    with pytest.raises(
        Exception, match=f"{one}-0 .* do not exist any more, or are not"
    ):
        run(other)


def test_transactions_may_go_on_under_a_stream(
    spark, read_stream, bootstrap, make_topic, tmp_path
):
    topic = make_topic(partitions=1)
    writer = (
        read_stream(subscribe=topic, startingOffsets="earliest")
        .load()
        .select("offset")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
    )

    def stop_after_some(query):
        filled = [each for each in query.recentProgress if each["numInputRows"]]
        if len(filled) >= 5:
            query.stop()

    begin = lambda: writer.start(str(tmp_path / "rows"))  # noqa: E731
    with going_transactions(bootstrap, topic):
        run_query(begin, Progress("stream", io.StringIO()), stop_after_some)
    rows = spark.read.parquet(str(tmp_path / "rows")).collect()
    read = sorted(row.offset for row in rows)
    records = topic_records(bootstrap, topic, isolation="read_uncommitted")
    assert read == [each.offset() for each in records][: len(read)]


def test_a_stream_goes_on_after_its_broker_was_away(spark, make_broker):
    address = f"127.0.0.1:{reusable_port()}"
    broker = make_broker({"listeners": f"PLAINTEXT://{address}"})
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic("t", 1, 1)])["t"].result(90)
    options = {"kafka.bootstrap.servers": address, "subscribe": "t"}
    reader = spark.readStream.format("mpbroker").options(**options)
    writer = reader.option("startingOffsets", "earliest").load().writeStream
    query = writer.format("noop").trigger(processingTime="100 milliseconds").start()

    def has_read(count):
        if error := query.exception():
            raise error
        return sum(each["numInputRows"] for each in query.recentProgress) == count

    try:
        put(address, "t", 0, 10, 1)
        wait_until(lambda: has_read(10))
        broker.kill()
        # Several triggers ask in vain meanwhile.
        broker.start()
        put(address, "t", 10, 15, 1)
        wait_until(lambda: has_read(15))
        broker.kill()
    finally:
        query.stop()  # a broker that is away does not hold it up
