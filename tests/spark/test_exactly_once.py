"""Each batch is in the topic once, whoever is killed, for read_committed readers."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from mpbroker.producer.errors import ProducerError
from mpbroker.spark import sink
from mpbroker.spark.exactly_once import CommitError, Task
from mpbroker.spark.options import OptionError
from mpbroker.spark.source import MpbrokerDataSource
from tests.spark.topic_records import topic_records

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def query():
    return uuid.uuid4().hex


@pytest.fixture
def write(bootstrap, monkeypatch):
    """Do what a task does: prepare rows of a batch; return its message."""

    def go(topic, query, values, *, batch=0, task=0, **options):
        writer = make_writer(bootstrap, topic, **options)
        monkeypatch.setattr(sink, "this_task", lambda _: Task(query, batch, task))
        rows = pa.RecordBatch.from_pydict({"value": pa.array(values, pa.string())})
        return writer.write(iter([rows] if values else []))

    return go


def make_writer(bootstrap, topic, **options):
    given = {"kafka.bootstrap.servers": bootstrap, "topic": topic, **options}
    return sink.StreamWriter(sink.parse_sink_options({**given, "exactlyOnce": "true"}))


def after_spark_planned(writer):
    """Return what tasks get: Spark ends batches with writers that it makes anew."""
    return pickle.loads(pickle.dumps(writer))


@pytest.fixture
def still_readable(bootstrap, consume):
    """Check that no open transaction is in the way of who reads what is committed."""

    def check(topic, *values):
        producer = Producer({"bootstrap.servers": bootstrap})
        producer.produce(topic, b"after")
        assert producer.flush(90) == 0
        assert consume(topic, count=1 + len(values)) == sorted(["after", *values])

    return check


@pytest.fixture
def commit(bootstrap):
    def go(*messages, batch=0):
        make_writer(bootstrap, "unused").commit(list(messages), batch)

    return go


@pytest.fixture
def consume(bootstrap):
    """Return the sorted values that a reader sees: by default what is committed."""

    def read(topic, isolation="read_committed", *, count=0):
        found = topic_records(bootstrap, topic, isolation=isolation, count=count)
        return sorted(message.value().decode() for message in found)

    return read


def test_nothing_is_seen_before_the_driver_commits_and_nothing_twice(
    write, commit, consume, make_topic, query
):
    topic = make_topic()
    messages = [write(topic, query, [f"{n}a", f"{n}b"], task=n) for n in (0, 1)]
    assert consume(topic) == []
    commit(*messages)
    assert consume(topic, count=4) == ["0a", "0b", "1a", "1b"]
    commit(*messages)  # the answer was lost: asked again
    commit(write(topic, query, [], batch=1))  # a task without rows
    commit(write(topic, query, ["next"], batch=2))
    assert consume(topic, count=5) == ["0a", "0b", "1a", "1b", "next"]


def test_a_task_that_is_tried_again_is_there_once_and_its_first_try_is_fenced(
    write, commit, consume, make_topic, query
):
    topic = make_topic()
    dead = write(topic, query, ["a", "b"])
    alive = write(topic, query, ["a", "b"])
    commit(alive)
    with pytest.raises(CommitError, match=r"cannot be committed.*transaction\.timeout"):
        commit(dead)
    assert consume(topic, count=2) == ["a", "b"]
    assert consume(topic, "read_uncommitted") == ["a", "a", "b", "b"]


def test_a_batch_that_comes_again_is_left_out_where_it_is_committed(
    write, commit, consume, make_topic, query
):
    topic = make_topic()
    commit(write(topic, query, ["a"], batch=4), batch=4)
    again = write(topic, query, ["a"], batch=4)
    assert (again.records, again.prepared) == (0, None)
    commit(again, batch=4)
    commit(write(topic, query, ["b"], batch=5), batch=5)
    assert consume(topic, count=2) == ["a", "b"]


def test_what_a_failed_batch_has_prepared_is_never_seen(
    write, commit, consume, make_topic, query, bootstrap
):
    topic = make_topic()
    prepared = write(topic, query, ["a"])
    make_writer(bootstrap, topic).abort([prepared, None], 0)
    assert consume(topic) == []
    commit(write(topic, query, ["a"]))
    assert consume(topic, count=1) == ["a"]


@pytest.mark.parametrize("others_prepared", [True, False])
def test_a_task_that_begins_after_its_batch_was_abandoned_opens_nothing(
    still_readable,
    commit,
    make_topic,
    query,
    bootstrap,
    monkeypatch,
    tmp_path,
    others_prepared,
):
    topic = make_topic()
    (tmp_path / "metadata").write_text(f'{{"id":"{query}"}}')

    def stream_writer():
        return make_writer(bootstrap, topic, checkpointLocation=f"file:{tmp_path}")

    def write(writer, task):
        monkeypatch.setattr(sink, "this_task", lambda _: Task(query, 0, task))
        return writer.write(iter([pa.RecordBatch.from_pydict({"value": ["late"]})]))

    tasks = after_spark_planned(stream_writer())
    prepared = write(tasks, 0) if others_prepared else None
    stream_writer().abort([prepared, None], 0)
    for task in (0, 1):
        with pytest.raises(CommitError, match="abandoned before this task began"):
            write(tasks, task)
    still_readable(topic)
    # The query is started again: the batch comes again, and that is another write.
    commit(write(after_spark_planned(stream_writer()), 1))
    still_readable(topic, "after", "late")


def test_a_task_of_a_batch_query_begins_nothing_when_it_was_abandoned(
    still_readable, make_topic, bootstrap
):
    topic = make_topic()
    options = {"kafka.bootstrap.servers": bootstrap, "topic": topic}
    options["exactlyOnce"] = "true"
    writer = sink.BatchWriter(sink.parse_sink_options(options))
    tasks, driver = after_spark_planned(writer), after_spark_planned(writer)
    driver.abort([None])
    with pytest.raises(CommitError, match="abandoned before this task began"):
        tasks.write(iter([pa.RecordBatch.from_pydict({"value": ["late"]})]))
    still_readable(topic)


@pytest.mark.parametrize("content", [None, "{", '{"id": 7}'])
def test_who_cannot_know_the_query_says_what_to_give(
    bootstrap, tmp_path, caplog, content
):
    if content is not None:
        (tmp_path / "metadata").write_text(content)
    for options in ({}, {"checkpointLocation": str(tmp_path)}):
        writer = make_writer(bootstrap, "unused", **options)
        after_spark_planned(writer).abort([None], 0)
        assert "path as the option checkpointLocation" in caplog.text
        caplog.clear()


class StuckSource(MpbrokerDataSource):
    """Its tasks send what they have, and are never done."""

    @classmethod
    def name(cls):
        return "stuck"

    def streamWriter(self, schema, overwrite):  # noqa: N802
        writer = StuckWriter(sink.parse_sink_options(self.options))
        writer.aborted = Path(self.options["aborted"])
        return writer


class StuckWriter(sink.StreamWriter):
    def abort(self, messages, batchId):  # noqa: N803
        super().abort(messages, batchId)
        self.aborted.touch()

    def write(self, iterator):
        def rows():
            yield from iterator
            while True:
                time.sleep(1)

        return super().write(rows())


def test_a_stream_that_is_stopped_in_a_batch_leaves_nothing_in_readers_way(
    spark, read_stream, bootstrap, make_topic, consume, still_readable, tmp_path
):
    spark.dataSource.register(StuckSource)
    source, target = make_topic(), make_topic()
    producer = Producer({"bootstrap.servers": bootstrap})
    producer.produce(source, b"row")
    assert producer.flush(90) == 0

    def start():
        stream = read_stream(subscribe=source, startingOffsets="earliest").load()
        return (
            stream.select("value")
            .writeStream.format("stuck")
            .option("kafka.bootstrap.servers", bootstrap)
            .option("topic", target)
            .option("exactlyOnce", "true")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .option("aborted", str(aborted))
            .start()
        )

    aborted, seen = tmp_path / "aborted", 0
    # Again where Spark gave Python no time to start: for the tasks, or for the abort.
    while not aborted.exists():
        stream = start()
        while stream.isActive:
            if len(consume(target, "read_uncommitted")) > seen:
                stream.stop()
        seen = len(consume(target, "read_uncommitted"))
    still_readable(target)


def test_each_write_of_a_foreach_batch_is_a_write_of_its_own(
    read_stream, finish, bootstrap, make_topic, consume, tmp_path
):
    source, one, other = make_topic(), make_topic(), make_topic()
    producer = Producer({"bootstrap.servers": bootstrap})
    producer.produce(source, b"row")
    assert producer.flush(90) == 0

    def write(frame, _):
        for topic in (one, other):
            writer = frame.select("value").write.format("mpbroker").mode("append")
            writer = writer.option("kafka.bootstrap.servers", bootstrap)
            writer.option("topic", topic).option("exactlyOnce", "true").save()

    stream = read_stream(subscribe=source, startingOffsets="earliest").load()
    writer = stream.writeStream.foreachBatch(write).trigger(availableNow=True)
    finish(writer.option("checkpointLocation", str(tmp_path)).start)
    # More than once if Spark gave Python no time to start, and the batch came again.
    assert set(consume(one, count=1)) == set(consume(other, count=1)) == {"row"}


def test_two_tries_of_a_task_at_once_are_refused(spark, bootstrap, make_topic):
    frame = spark.range(1).selectExpr("string(id) value")
    writer = frame.write.format("mpbroker").mode("append")
    writer = writer.options(
        **{"kafka.bootstrap.servers": bootstrap, "topic": make_topic()}
    )
    spark.sparkContext.setLocalProperty("spark.speculation", "true")
    try:
        with pytest.raises(Exception, match=r"set spark\.speculation=false"):
            writer.option("exactlyOnce", "true").save()
    finally:
        spark.sparkContext.setLocalProperty("spark.speculation", None)


def test_what_nobody_ends_expires(write, consume, make_topic, query, bootstrap):
    topic = make_topic()
    late = None
    for seconds in (5, 30, 120):  # no longer than this machine needs to prepare it
        timeout = {"kafka.transaction.timeout.ms": str(seconds * 1000)}
        with suppress(ProducerError):
            late = write(topic, query, ["late"], task=7, **timeout)
            break
    assert late is not None
    producer = Producer({"bootstrap.servers": bootstrap})
    producer.produce(topic, b"after")
    assert producer.flush(90) == 0
    seen: list[str] = []
    while not seen:  # the open transaction is in the way of readers until then
        seen = consume(topic)
    assert seen == ["after"]
    with pytest.raises(CommitError):
        make_writer(bootstrap, topic).commit([late], 0)


def test_a_driver_killed_between_two_commits_doubles_nothing(
    write, commit, consume, make_topic, query, bootstrap
):
    topic = make_topic()
    script = f"""
        import os, signal
        import pyarrow as pa
        from mpbroker.spark import sink
        from mpbroker.spark.exactly_once import Task

        options = {{"kafka.bootstrap.servers": {bootstrap!r}, "topic": {topic!r}}}
        options["exactlyOnce"] = "true"
        writer = sink.StreamWriter(sink.parse_sink_options(options))
        messages = []
        for task in range(3):
            sink.this_task = lambda _: Task({query!r}, 0, task)
            rows = pa.RecordBatch.from_pydict({{"value": [f"row {{task}}"]}})
            messages.append(writer.write(iter([rows])))

        def commit_two(prepared):
            committed(prepared[:2])
            os.kill(os.getpid(), signal.SIGKILL)

        committed = writer._coordinators.commit
        object.__setattr__(writer._coordinators, "commit", commit_two)
        writer.commit(messages, 0)
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=False,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    messages = [write(topic, query, [f"row {task}"], task=task) for task in range(3)]
    assert [message.records for message in messages] == [0, 0, 1]
    commit(*messages)
    assert consume(topic, count=3) == ["row 0", "row 1", "row 2"]


def test_a_stream_whose_last_commit_was_not_noted_writes_its_batch_once(
    read_stream, finish, bootstrap, make_topic, consume, tmp_path
):
    source, target = make_topic(partitions=2), make_topic()
    producer = Producer({"bootstrap.servers": bootstrap})
    checkpoint = tmp_path / "checkpoint"

    def run(first, end):
        for number in range(first, end):
            producer.produce(source, b"%04d" % number, partition=number % 2)
        assert producer.flush(90) == 0
        stream = read_stream(subscribe=source, startingOffsets="earliest").load()
        writer = (
            stream.select("value")
            .writeStream.format("mpbroker")
            .option("kafka.bootstrap.servers", bootstrap)
            .option("topic", target)
            .option("exactlyOnce", "true")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
        )
        finish(writer.start)

    run(0, 100)
    assert len(consume(target, count=100)) == 100
    # As a driver leaves it that is killed when its transactions are committed and
    # Spark has not noted it: the batch comes again.
    (commit,) = (path for path in (checkpoint / "commits").glob("[0-9]*"))
    commit.unlink()
    (checkpoint / "commits" / f".{commit.name}.crc").unlink(missing_ok=True)
    run(100, 150)
    assert consume(target, count=150) == [f"{number:04d}" for number in range(150)]


def test_a_failed_batch_write_leaves_nothing_to_see(
    spark, bootstrap, make_topic, consume
):
    topic = make_topic()

    def save(frame):
        options = {"kafka.bootstrap.servers": bootstrap, "topic": topic}
        writer = frame.write.format("mpbroker").mode("append").options(**options)
        writer.option("exactlyOnce", "true").save()

    frame = spark.range(10, numPartitions=2)
    with pytest.raises(Exception, match="seven"):
        save(frame.selectExpr("if(id = 7, raise_error('seven'), string(id)) value"))
    assert consume(topic) == []
    save(frame.selectExpr("string(id) value"))
    assert consume(topic, count=10) == [str(number) for number in range(10)]


def test_the_transactional_id_is_not_the_user_s():
    with pytest.raises(OptionError, match=r"kafka\.transactional\.id: exactlyOnce"):
        make_writer("localhost:1", "t", **{"kafka.transactional.id": "mine"})
    with pytest.raises(OptionError, match="exactlyOnce='yes' is neither true nor"):
        sink.parse_sink_options(
            {"kafka.bootstrap.servers": "localhost:1", "exactlyOnce": "yes"}
        )


def test_a_task_that_fails_leaves_nothing_in_readers_way(
    consume, make_topic, query, bootstrap, monkeypatch
):
    topic = make_topic()
    writer = make_writer(bootstrap, topic)
    monkeypatch.setattr(sink, "this_task", lambda _: Task(query, 0, 0))

    def rows():
        yield pa.RecordBatch.from_pydict({"value": ["lost"]})
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        writer.write(rows())
    producer = Producer({"bootstrap.servers": bootstrap})
    producer.produce(topic, b"after")
    assert producer.flush(90) == 0
    assert consume(topic, count=1) == ["after"]
