"""Kafka Streams goes on while the coordinator, or an instance of it, is killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.faults.test_groups_without_a_coordinator import kill_coordinator
from tests.support.broker import Broker
from tests.support.fetch_clients import have_java_clients
from tests.support.streams_application import PARTITIONS, TIMEOUT_S, word_count

pytestmark = [
    pytest.mark.skipif(
        not have_java_clients(),
        reason="no Kafka Streams in .downloads/java: scripts/test fetches it",
    ),
    pytest.mark.timeout(600),
]


def test_words_are_counted_once_though_coordinators_and_an_instance_are_killed(
    make_broker: Callable[..., Broker],
) -> None:
    broker = make_broker(
        {
            "group.streams.min.session.timeout.ms": 6000,
            "group.streams.session.timeout.ms": 6000,
            "group.streams.min.heartbeat.interval.ms": 500,
            "group.streams.heartbeat.interval.ms": 500,
            "group.streams.initial.rebalance.delay.ms": 0,
        }
    )
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    topics = [NewTopic(name, PARTITIONS, 1) for name in ("words", "counts")]
    for future in admin.create_topics(topics).values():
        future.result(TIMEOUT_S)
    names = ("count", "words", "counts")
    # The transactions of the instance that is killed end soon.
    settings = {"producer_transaction_timeout_ms": "10000"}
    with word_count(broker.bootstrap, names, **settings) as count:
        first = count.instances[0]
        second = count.start()
        for instance in (first, second):
            instance.wait_until_running()
        for _ in range(3):
            count.write(50)
            kill_coordinator(broker)
        count.write(50)
        count.instances.remove(second)
        second.kill()
        count.write(50)
        count.read_all()
        first.stop()
    broker.stop()
