"""Producers to a shared topic, while the processes of their node die at random."""

from __future__ import annotations

import os
import random
import signal
import threading

from confluent_kafka import Producer

from tests.broker.test_shared_topics import (  # noqa: F401 - fixtures
    PATIENCE_S,
    broker,
    cluster_template,
    consumed,
    create,
    empty_url,
    processes,
    settings,
    shared_server,
)
from tests.support.children import wait_until

# A long run: MPBROKER_TEST_DEATHS=200 pytest tests/broker/test_shared_topic_deaths.py
DEATHS = int(os.environ.get("MPBROKER_TEST_DEATHS", "4"))
KINDS = ("cluster-node", "data-plane-kafka-request-handler")


class Load(threading.Thread):
    """One producer, which sends numbered values until it is stopped.

    Attributes:
        offsets: by value, as they were answered.
    """

    def __init__(self, bootstrap, name, with_id):
        super().__init__()
        self.offsets = {}
        self._name = name
        self._stopped = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": with_id,
                "max.in.flight": 1,
                # No answer is lost: so nothing is sent twice.
                "retries": 1000 if with_id else 0,
                "linger.ms": 2,
            }
        )

    def _done(self, error, message):
        assert error is None, error
        self.offsets[message.value()] = message.offset()

    def run(self):
        number = 0
        while not self._stopped.is_set():
            for _ in range(20):
                value = b"%s-%d" % (self._name, number)
                self._producer.produce("shared", value, on_delivery=self._done)
                number += 1
            assert self._producer.flush(PATIENCE_S) == 0

    def stop(self):
        self._stopped.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()


def test_deaths_at_random_lose_double_and_swap_nothing(broker):  # noqa: F811
    create(broker, "shared")
    loads = [
        Load(broker.bootstrap, name, with_id=name in b"ab")
        for name in (b"a", b"b", b"c", b"d")
    ]
    for load in loads:
        load.start()

    def answered():
        return min(len(load.offsets) for load in loads)

    chance = random.Random()
    for _ in range(DEATHS):
        before = answered()
        # Each producer has had answers since the last death: two deaths at one request
        # may double it, if it has no id.
        wait_until(lambda before=before: answered() > before + 20)
        living = processes(broker, chance.choice(KINDS))
        if living:
            os.kill(chance.choice(living), signal.SIGKILL)
    for load in loads:
        load.stop()
    told = {}
    for load in loads:
        assert list(load.offsets.values()) == sorted(load.offsets.values())
        told.update(load.offsets)
    found = consumed(broker, "shared", len(told))
    assert found == sorted((offset, value) for value, offset in told.items())
    assert [offset for offset, _ in found] == list(range(len(told)))
