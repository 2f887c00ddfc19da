"""A pipeline that fails says why in a few lines, not in Java's and Python's stacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.spark.cluster import has_java

pytestmark = pytest.mark.timeout(900)


def test_a_value_that_cannot_be_read_is_told_in_a_few_lines(
    bootstrap, make_topic, tmp_path
):
    if not has_java():
        pytest.skip("Spark needs Java 17 or newer, and there is none")
    topic = make_topic()
    producer = Producer({"bootstrap.servers": bootstrap})
    producer.produce(topic, b"no JSON")
    assert producer.flush(90) == 0
    path = tmp_path / "p.toml"
    path.write_text(
        f"""
        [pipeline]
        job = "ingest"
        checkpoint = "{tmp_path}/checkpoint"
        [source]
        bootstrap = "{bootstrap}"
        subscribe = "{topic}"
        [value]
        format = "json"
        fields = {{n = "bigint"}}
        [table]
        path = "{tmp_path}/lake"
        """
    )
    done = subprocess.run(
        [sys.executable, "-m", "mpbroker", "pipeline", "run", str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ,
    )
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert f"the value at {topic}-0 offset 0 cannot be read" in lines[-1]
    assert "at org.apache.spark" not in done.stderr
    assert "Traceback" not in done.stderr
    assert len(lines) < 15, done.stderr
