"""The figures of partitions, of those too that no client has used since the start."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.exporter.asking import METRICS, get, samples, wait_until
from tests.support.broker import Broker

# Only the task that loads logs runs: the others would load them, too, but later.
ALONE = {
    **METRICS,
    "metrics.kafka.names.enable": "true",
    "log.initial.task.delay.ms": 3_600_000,
}


@pytest.mark.parametrize("stop", [Broker.stop, Broker.kill], ids=["clean", "unclean"])
def test_logs_and_lag_are_shown_after_a_start_before_clients_use_them(tmp_path, stop):
    made = Broker(tmp_path / "data", ALONE)
    made.start()
    admin = AdminClient({"bootstrap.servers": made.bootstrap})
    admin.create_topics([NewTopic("flights", 4)])["flights"].result(30)
    producer = Producer({"bootstrap.servers": made.bootstrap})
    for number in range(9):
        producer.produce("flights", b"%d" % number, partition=2)
    assert not producer.flush(30)
    client = Consumer({"bootstrap.servers": made.bootstrap, "group.id": "departures"})
    client.commit(offsets=[TopicPartition("flights", 2, 4)], asynchronous=False)
    client.close()
    stop(made)
    with made:

        def shown():
            status, text = get(made)
            assert status == 200
            found = samples(text)
            return not found["mpbroker_partitions_unloaded"] and found

        now = wait_until(shown)
        place = '{topic="flights",partition="2"}'
        assert now["mpbroker_log_end_offset" + place] == 9
        assert now["mpbroker_log_size_bytes" + place] > 9
        assert now['kafka_topic_partitions{topic="flights"}'] == 4
        unused = '{topic="flights",partition="0"}'
        assert now["mpbroker_log_end_offset" + unused] == 0
        assert now["kafka_log_log_size" + unused] == 0
        lag = '{group="departures",topic="flights",partition="2"}'
        wait_until(lambda: shown().get("mpbroker_group_lag" + lag) == 5)
