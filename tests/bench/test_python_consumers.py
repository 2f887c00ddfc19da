"""The clients of the benchmark of consumers read what there is, each record once."""

from __future__ import annotations

import pytest

from tests.bench.client_throughput import DISTINCT_VALUES, PRODUCER_SETTINGS, values_of
from tests.bench.python_consumers import CLIENTS, Work
from tests.bench.rdkafka import BatchProducer


@pytest.mark.parametrize("prefix", CLIENTS)
def test_a_client_reads_each_record_once(bootstrap, topic_name, prefix):
    _, read = CLIENTS[prefix]
    with BatchProducer(
        bootstrap, topic_name, values_of(100), PRODUCER_SETTINGS
    ) as producer:
        producer.send(1)
    assert read(Work(bootstrap, topic_name, DISTINCT_VALUES)) == DISTINCT_VALUES
