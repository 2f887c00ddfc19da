"""DeleteRecords on topics with diskless.enable=true, asked of any node."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from kafka import KafkaConsumer
from kafka import TopicPartition as PurePartition

from tests.broker.test_shared_topics import (  # noqa: F401 - fixtures
    consumed,
    create,
    hold,
    knows,
    nodes,
    processes,
    produced,
    settings,
)
from tests.cluster.conftest import (  # noqa: F401 - fixtures
    cluster_template,
    empty_url,
    execute,
    shared_server,
)
from tests.support.broker import Broker
from tests.support.children import wait_until

PATIENCE_S = 60
VALUES = [b"%d" % number for number in range(10)]
WAITING = (
    "SELECT pid FROM pg_stat_activity"
    " WHERE query LIKE '%delete_records_v1%' AND wait_event_type = 'Lock'"
    " AND datname = current_database()"
)


def admin_of(node, **options):
    return AdminClient({"bootstrap.servers": node.bootstrap, **options})


def delete(node, topic, before, **options):
    """Delete the records of partition 0 below an offset; return its new start."""
    place = TopicPartition(topic, 0, before)
    admin = admin_of(node)  # kept until it has answered
    (done,) = admin.delete_records([place], **options).values()
    return done.result(PATIENCE_S).low_watermark


def refusal(node, topic, before, **options):
    with pytest.raises(KafkaException) as caught:
        delete(node, topic, before, **options)
    return caught.value.args[0]


def start_of(node, topic):
    place = TopicPartition(topic, 0)
    admin = admin_of(node)
    (found,) = admin.list_offsets({place: OffsetSpec.earliest()}).values()
    return found.result(PATIENCE_S).offset


def first(node, topic):
    """Return offset and value of the first record that a consumer from 0 gets."""
    reader = KafkaConsumer(
        bootstrap_servers=node.bootstrap,
        auto_offset_reset="earliest",
        consumer_timeout_ms=PATIENCE_S * 1000,
    )
    place = PurePartition(topic, 0)
    reader.assign([place])
    reader.seek(place, 0)  # out of range: it begins with the first there is
    found = next(reader)
    reader.close()
    return found.offset, found.value


@pytest.fixture
def often(settings):  # noqa: F811
    """Settings of a node that removes segments and extents soon."""
    return {**settings, "log.retention.check.interval.ms": "50"}


def test_records_are_deleted_by_any_node_and_for_all_of_them(nodes):  # noqa: F811
    one, two = nodes
    create(one, "shared")
    wait_until(lambda: knows(two, "shared"))
    assert produced(one, "shared", VALUES) == list(range(10))
    assert consumed(two, "shared", 10)[-1] == (9, b"9")
    assert delete(two, "shared", 4) == 4
    assert start_of(two, "shared") == 4
    wait_until(lambda: start_of(one, "shared") == 4)
    assert first(one, "shared") == (4, b"4")
    # Not back, not beyond the end, and not at all where nothing is.
    assert delete(one, "shared", 2) == 4
    assert refusal(one, "shared", 11).code() == KafkaError.OFFSET_OUT_OF_RANGE
    assert refusal(one, "shared", -2).code() == KafkaError.OFFSET_OUT_OF_RANGE
    assert start_of(two, "shared") == 4
    # -1, by librdkafka's name for it, is the high watermark.
    assert delete(one, "shared", -1) == 10
    wait_until(lambda: start_of(two, "shared") == 10)
    assert produced(two, "shared", [b"next"]) == [10]
    assert delete(two, "shared", 10) == 10


def test_a_request_may_delete_from_shared_and_local_topics(nodes):  # noqa: F811
    one, _ = nodes
    create(one, "shared", 2)
    create(one, "local", **{"diskless.enable": "false"})
    for topic in ("shared", "local"):
        assert produced(one, topic, VALUES) == list(range(10))
    wanted = [
        TopicPartition("shared", 0, 3),
        TopicPartition("local", 0, 5),
        TopicPartition("shared", 1, 1),
    ]
    admin = admin_of(one)
    shared, local, refused = admin.delete_records(wanted).values()
    assert shared.result(PATIENCE_S).low_watermark == 3
    assert local.result(PATIENCE_S).low_watermark == 5
    with pytest.raises(KafkaException) as caught:
        refused.result(PATIENCE_S)
    assert caught.value.args[0].code() == KafkaError.OFFSET_OUT_OF_RANGE
    assert [start_of(one, each) for each in ("shared", "local")] == [3, 5]


def test_what_is_deleted_leaves_the_database_and_the_disk(tmp_path, often):
    url = often["cluster.database.url"]
    with Broker(tmp_path / "data", often) as broker:
        create(broker, "shared", **{"segment.bytes": "1048576"})
        large = os.urandom(600_000)
        for value in (large, large[::-1]):
            produced(broker, "shared", [value])
        segments = tmp_path / "data" / "shared-0"
        assert len(list(segments.glob("*.log"))) == 2
        assert delete(broker, "shared", 1) == 1
        used = "SELECT count(*) FROM mpbroker.object WHERE live_extents > 0"
        wait_until(lambda: execute(url, used)[0][0] == 1)
        wait_until(lambda: len(list(segments.glob("*.log"))) == 1)
        assert first(broker, "shared") == (1, large[::-1])


def test_without_the_database_the_client_is_told_to_try_again(
    tmp_path,
    settings,  # noqa: F811
    hold,  # noqa: F811
):
    url = settings["cluster.database.url"]
    with Broker(tmp_path / "data", settings) as broker:
        create(broker, "shared")
        assert produced(broker, "shared", VALUES) == list(range(10))
        held = hold()
        error = refusal(broker, "shared", 4, operation_timeout=1)
        assert error.code() == KafkaError.REQUEST_TIMED_OUT
        # Handlers serve others meanwhile: each deletion is parked.
        assert start_of(broker, "shared") == 0
        held.release()
        wait_until(lambda: not execute(url, WAITING))
        assert delete(broker, "shared", 5) == 5


@pytest.mark.parametrize("victim", ["cluster-node", "kafka-request-handler", "node"])
def test_a_death_within_a_deletion_leaves_it_done_or_not(
    tmp_path,
    settings,  # noqa: F811
    hold,  # noqa: F811
    victim,
):
    url = settings["cluster.database.url"]
    with Broker(tmp_path / "data", settings) as broker:
        create(broker, "shared")
        assert produced(broker, "shared", VALUES) == list(range(10))
        held = hold()
        place = TopicPartition("shared", 0, 4)
        admin = admin_of(broker)
        (asked,) = admin.delete_records([place]).values()
        wait_until(lambda: execute(url, WAITING))
        if victim == "node":
            broker.kill()
        else:
            for pid in processes(broker, victim):
                os.kill(pid, signal.SIGKILL)
        held.release()  # the commit is executed, and its answer is for a dead process
        if victim == "node":
            with contextlib.suppress(KafkaException):
                asked.result(PATIENCE_S)
            del admin
            broker.start()
        else:
            assert asked.result(PATIENCE_S).low_watermark == 4
        heads = "SELECT log_start FROM mpbroker.partition_head"
        wait_until(lambda: execute(url, heads)[0][0] == 4)
        wait_until(lambda: start_of(broker, "shared") == 4)
        assert first(broker, "shared") == (4, b"4")
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        producer.produce("shared", b"last")
        assert producer.flush(PATIENCE_S) == 0
