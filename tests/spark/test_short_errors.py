"""A pipeline ends with a few lines, not with the stacks of Java and Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.spark.cluster import QUICK_JAVA, has_java
from tests.support.children import wait_until

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not has_java(), reason="Spark needs Java 17 or newer, and there is none"
    ),
]


@pytest.fixture
def describe(bootstrap, make_topic, tmp_path):
    """Describe a pipeline over a topic with one value; return file and topic."""

    def write(name, value, trigger):
        topic = make_topic()
        producer = Producer({"bootstrap.servers": bootstrap})
        producer.produce(topic, value)
        assert producer.flush(90) == 0
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f"""
            [pipeline]
            job = "ingest"
            trigger = "{trigger}"
            checkpoint = "{tmp_path}/checkpoint-{name}"
            [source]
            bootstrap = "{bootstrap}"
            subscribe = "{topic}"
            [value]
            format = "json"
            fields = {{n = "bigint"}}
            [table]
            path = "{tmp_path}/lake-{name}"
            """
        )
        return path, topic

    return write


@pytest.fixture
def run(tmp_path):
    """Start `mpbroker pipeline run`; return the process, and what reads its stderr."""
    started = []

    def start(*files):
        with (tmp_path / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "mpbroker", "pipeline", "run", *files],
                stderr=stderr,
                cwd=Path(__file__).resolve().parents[2],
                env={**os.environ, "JDK_JAVA_OPTIONS": QUICK_JAVA},
                start_new_session=True,
            )
        started.append(process)
        return process, (tmp_path / "stderr").read_text

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(process):
    wait_until(lambda: process.poll() is not None)
    return process.returncode


def check_short(text, pipelines):
    assert "at org.apache.spark" not in text
    assert "Traceback" not in text
    # Some are Java's and Spark's when they start.
    assert len(text.splitlines()) < 9 + 7 * pipelines, text


def test_a_pipeline_that_is_stopped_ends_with_its_summary(run, describe):
    path, _ = describe("p", b'{"n":1}', "100ms")
    process, stderr = run(path)
    wait_until(lambda: "p: batch 0" in stderr() or process.poll() is not None)
    process.terminate()
    assert ended(process) == 0, stderr()
    assert "p: done: 1 rows in 1 batch" in stderr(), stderr()
    check_short(stderr(), 1)


def test_a_value_that_cannot_be_read_and_ctrl_c_are_told_in_a_few_lines(run, describe):
    path, _ = describe("p", b'{"n":1}', "100ms")
    bad, topic = describe("bad", b"no JSON", "once")
    process, stderr = run(path, bad)
    why = f"the value at {topic}-0 offset 0 cannot be read"
    told = ("p: batch 0", why)
    wait_until(
        lambda: all(each in stderr() for each in told) or process.poll() is not None
    )
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert ended(process) == 1, stderr()
    assert "p: done: 1 rows in 1 batch" in stderr(), stderr()
    check_short(stderr(), 2)
