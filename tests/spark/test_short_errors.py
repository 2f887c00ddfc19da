"""A pipeline ends with a few lines, not with the stacks of Java and Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.spark.cluster import has_java
from tests.support.children import wait_until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not has_java(), reason="Spark needs Java 17 or newer, and there is none"
    ),
]


@pytest.fixture
def run(bootstrap, make_topic, tmp_path):
    """Start `mpbroker pipeline run` over a topic with one value; stderr is a file."""
    started = []

    def start(value, trigger):
        topic = make_topic()
        producer = Producer({"bootstrap.servers": bootstrap})
        producer.produce(topic, value)
        assert producer.flush(90) == 0
        path = tmp_path / "p.toml"
        path.write_text(
            f"""
            [pipeline]
            job = "ingest"
            trigger = "{trigger}"
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
        with (tmp_path / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "mpbroker", "pipeline", "run", str(path)],
                stderr=stderr,
                cwd=Path(__file__).resolve().parents[2],
                env=os.environ,
                start_new_session=True,
            )
        started.append(process)
        return process, topic, (tmp_path / "stderr").read_text

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(process):
    wait_until(lambda: process.poll() is not None)
    return process.returncode


def check_short(text):
    assert "at org.apache.spark" not in text
    assert "Traceback" not in text
    assert len(text.splitlines()) < 15, text


def test_a_value_that_cannot_be_read_is_told_in_a_few_lines(run):
    process, topic, stderr = run(b"no JSON", "once")
    assert ended(process) == 1
    last = stderr().strip().splitlines()[-1]
    assert f"the value at {topic}-0 offset 0 cannot be read" in last
    check_short(stderr())


@pytest.mark.parametrize("way", ["Ctrl-C", "SIGTERM"])
def test_a_pipeline_that_is_stopped_ends_with_its_summary(run, way):
    process, _, stderr = run(b'{"n":1}', "100ms")
    wait_until(lambda: "p: batch 0" in stderr() or process.poll() is not None)
    if way == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    else:
        process.terminate()
    assert ended(process) == 0, stderr()
    assert "p: done: 1 rows in 1 batch" in stderr()
    check_short(stderr())
