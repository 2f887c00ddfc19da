"""What docs/spark.md and README.md show of Spark works."""

from __future__ import annotations

import pytest

from mpbroker import Producer
from tests.test_document_snippets import README, SPARK, blocks

pytestmark = pytest.mark.timeout(600)


def test_the_python_that_is_shown_reads_and_writes(spark, make_broker):
    broker = make_broker()
    with Producer(bootstrap_servers=broker.bootstrap) as producer:
        for value in (b"one", b"two"):
            producer.send("events", value)
    names: dict[str, object] = {}
    for block in [*blocks(README, "python"), *blocks(SPARK, "python")]:
        if "spark" in block:
            block = block.replace("localhost:9092", broker.bootstrap)
            block = block.replace("/var/lib/mpbroker", str(broker.data_dir))
            exec(block, names)
    archived = names["archived"].select("value").collect()
    assert [bytes(row.value) for row in archived] == [b"one", b"two"]
    reader = spark.read.format("mpbroker").option("subscribe", "shouted")
    shouted = reader.option("kafka.bootstrap.servers", broker.bootstrap).load()
    assert [bytes(row.value) for row in shouted.collect()] == [b"ONE", b"TWO"]
