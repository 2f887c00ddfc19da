"""`mpbroker pipeline status` tells how pipelines are, from what they publish."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import time

import msgspec
import pytest
from confluent_kafka import Producer

from mpbroker.cli import main
from mpbroker.cli.exit_codes import ExitCode
from mpbroker.spark.lag import offset_bytes
from mpbroker.spark.pipeline import published_status as published
from mpbroker.spark.pipeline import run
from mpbroker.spark.pipeline.description import load
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.published_status import FILE, Publisher, find
from mpbroker.spark.pipeline.run import run_file
from mpbroker.spark.session import SparkSetupError
from tests.support.children import wait_until

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def describe(tmp_path):
    """Write a description; return its path."""

    def write(name="p", bootstrap="localhost:1", topic="flights", more=""):
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f"""
            [pipeline]
            job = "ingest"
            checkpoint = "{tmp_path}/checkpoint-{name}"
            {more}
            [source]
            bootstrap = "{bootstrap}"
            subscribe = "{topic}"
            maxOffsetsPerTrigger = 60
            [table]
            path = "{tmp_path}/lake-{name}"
            """
        )
        return path

    return write


@pytest.fixture
def publish(describe):
    """Begin to publish in this process; return the description and the publisher."""

    def begin(behind=100, offset_bytes=50.0, **more):
        description = load(describe(**more))
        publisher = Publisher(description, Progress("p", io.StringIO()))
        publisher.begin(behind, offset_bytes)
        return description, publisher

    return begin


class Query:
    """A query whose newest batch left so many offsets to be read."""

    def __init__(self, behind):
        source = {"latestOffset": {"t": {"0": 100}}, "endOffset": None}
        source["endOffset"] = {"t": {"0": 100 - behind}}
        self.lastProgress = {"sources": [source]}


def test_a_start_tells_at_once_how_far_it_is_behind(publish):
    description, publisher = publish()
    found = find(description)
    assert (found.state, found.is_well) == ("starting", True)
    assert found.status is not None
    assert (found.status.behind, found.status.behind_bytes) == (100, 5000)
    assert found.status.catch_up_s is None
    publisher.end("stopped")


def test_rates_and_the_time_to_catch_up_are_those_of_the_last_minute(
    publish, monkeypatch
):
    now = [1000.0]
    monkeypatch.setattr(published.time, "time", lambda: now[0])
    description, publisher = publish(behind=100)
    for second in range(1, 201):
        now[0] += 1
        # 2 rows a second at first, then 4.
        publisher._progress.rows += 2 if second <= 100 else 4
        publisher.look(Query(behind=max(10, 100 - second // 4)))
        publisher._publish()
        status = find(description).status
        assert status is not None
        if second == 50:
            assert status.rows_per_s == pytest.approx(2)
            assert status.behind == 88
            assert status.catch_up_s == pytest.approx(88 * 50 / 12)
    assert status.rows_per_s == pytest.approx(4)
    publisher.end("done")
    status = find(description).status
    assert (status.state, status.behind, status.catch_up_s) == ("done", 0, 0)


def test_a_dead_process_is_gone_and_a_silent_machine_stale(publish):
    description, publisher = publish()
    assert find(description).state == "starting"
    elsewhere = find(description, host="another")
    assert elsewhere.state == "starting"
    late = time.time() + 60
    stale = find(description, host="another", now=lambda: late)
    assert (stale.state, stale.is_well) == ("stale", False)
    # On this machine only the process counts: it may have been suspended.
    assert find(description, now=lambda: late).state == "starting"
    publisher.end("stopped")
    path = f"{description.checkpoint}/{FILE}"
    with open(path, "rb") as file:
        left = msgspec.json.decode(file.read(), type=published.Status)
    left.state, left.process_began = "running", left.process_began - 1  # a reused id
    with open(path, "wb") as file:
        file.write(msgspec.json.encode(left))
    assert find(description).state == "gone"
    with open(path, "wb") as file:
        file.write(b'{"name": 3}')
    with pytest.raises(PipelineError, match=rf"{FILE} cannot be read: "):
        find(description)


def test_a_file_is_never_seen_half_written_and_a_full_disk_is_told_once(
    publish, monkeypatch
):
    description, publisher = publish()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(published.os, "replace", refuse)
    publisher._publish()
    publisher._publish()
    assert find(description).state == "starting"  # the last one that was whole
    monkeypatch.undo()
    publisher.end("failed", "it broke")
    assert publisher._progress.out.getvalue().count("No space left") == 1
    assert find(description).status.error == "it broke"


def test_the_command_shows_all_and_its_exit_code_tells(
    publish, describe, capfdbinary, tmp_path
):
    _, publisher = publish()
    never, well = describe("never"), describe("p")

    def show(*arguments):
        code = main(["pipeline", "status", *map(str, arguments)])
        return code, *(text.decode() for text in capfdbinary.readouterr())

    code, out, _ = show(well)
    assert code == ExitCode.OK
    head, row = out.splitlines()
    assert head.split()[:4] == ["PIPELINE", "STATE", "ROWS/S", "BEHIND"]
    assert row.split()[:6] == ["p", "starting", "0", "100", "5.0", "kB"]
    code, out, _ = show(never, well, "--json")
    assert code == ExitCode.NOT_FOUND
    first, second = json.loads(out)
    assert first == {"name": "never", "state": "never", "well": False}
    assert (second["pid"], second["host"]) == (os.getpid(), socket.gethostname())
    publisher.end("failed", "no <table>")
    code, out, _ = show(well, never)
    assert code == ExitCode.ERROR
    assert "p: no <table>" in out
    code, out, _ = show(well, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert (code, out) == (ExitCode.ERROR, "")
    assert "no &lt;table&gt;" in page
    assert not re.search(r"(?:src|href)\s*=|url\(|https?://", page)
    assert show(tmp_path / "none.toml")[0] == ExitCode.CONFIG
    report = tmp_path / "report.toml"
    report.write_text("[pipeline]\njob='report'\n[report]\nlog='x'\nout='y'\n")
    code, _, err = show(report)
    assert (code, "job report has no checkpoint" in err) == (ExitCode.ERROR, True)


def test_files_of_the_unit_are_found_with_their_working_directories(
    publish, tmp_path, capfdbinary, monkeypatch
):
    from mpbroker.cli.spark import pipeline

    _, publisher = publish()
    files, home = tmp_path / "etc", tmp_path / "var"
    monkeypatch.setattr(pipeline, "_FILES", files)
    monkeypatch.setattr(pipeline, "_DIRECTORIES", home)
    assert main(["pipeline", "status"]) == ExitCode.NOT_FOUND
    files.mkdir()
    (home / "p").mkdir(parents=True)
    text = (tmp_path / "p.toml").read_text()
    absolute = f'"{tmp_path}/checkpoint-p"'
    (files / "p.toml").write_text(text.replace(absolute, '"checkpoint"'))
    (home / "p" / "checkpoint").symlink_to(tmp_path / "checkpoint-p")
    assert main(["pipeline", "status"]) == ExitCode.OK
    assert b"starting" in capfdbinary.readouterr().out
    publisher.end("done")


def put(bootstrap, topic, count):
    producer = Producer({"bootstrap.servers": bootstrap})
    for _ in range(count):
        producer.produce(topic, b"x" * 100)
    assert producer.flush(90) == 0


def test_a_run_publishes_what_it_did_and_why_it_failed(
    spark, bootstrap, make_topic, describe
):
    topic = make_topic()
    path = describe(bootstrap=bootstrap, topic=topic)
    put(bootstrap, topic, 150)
    description = load(path)
    assert 50 < offset_bytes(description.source) < 250
    run_file(path)
    found = find(description)
    assert found.status is not None
    assert (found.state, found.status.rows) == ("done", 150)
    assert (found.status.batches, found.status.last_batch) == (3, 2)
    assert time.time() - found.status.committed_s < 600
    (description_path,) = [path]
    description_path.write_text(
        path.read_text()
        .replace("[table]", "[value]\nformat='json'\nfields={a='int'}\n[table]")
        .replace("lake-p", "lake-other")
        .replace("checkpoint-p", "checkpoint-other")
    )
    with pytest.raises(PipelineError):
        run_file(path)  # the values are not JSON, and there is no table for them
    found = find(load(path))
    assert (found.state, found.is_well) == ("failed", False)
    assert "dead_letter" in found.status.error


def test_how_far_a_pipeline_is_behind_is_told_before_spark_starts(
    bootstrap, make_topic, describe, monkeypatch
):
    topic = make_topic()
    description = load(path := describe(bootstrap=bootstrap, topic=topic))
    put(bootstrap, topic, 10)
    seen = []

    def session(*_, **__):
        seen.append(find(description))
        raise SparkSetupError("it does not start")

    monkeypatch.setattr(run, "session", session)
    with pytest.raises(SparkSetupError):
        run_file(path)
    (before,) = seen
    assert (before.state, before.status.behind) == ("starting", 10)
    assert before.status.behind_bytes
    after = find(description)
    assert (after.state, after.status.error) == ("failed", "it does not start")


WITHOUT_PYSPARK = """
import sys
from mpbroker.spark.pipeline import run

def session(*_, **__):
    raise SystemExit("pyspark" in sys.modules)

run.session = session
run.run_file(sys.argv[1])
"""


def test_how_far_a_pipeline_is_behind_is_told_before_pyspark_is_imported(
    bootstrap, make_topic, describe
):
    path = describe(bootstrap=bootstrap, topic=make_topic())
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYSPARK, str(path)], check=False
    )
    assert done.returncode == 0
    assert find(load(path)).status.behind == 0


def test_a_checkpoint_that_cannot_be_written_is_told_before_spark_starts(
    bootstrap, make_topic, describe, monkeypatch
):
    topic = make_topic()
    path = describe(bootstrap=bootstrap, topic=topic)

    def refuse(*_):
        raise PipelineError("no checkpoint")

    monkeypatch.setattr(run, "session", None)  # not called
    monkeypatch.setattr(run, "Publisher", refuse)
    with pytest.raises(PipelineError, match="no checkpoint"):
        run_file(path)


def test_a_killed_pipeline_is_gone(bootstrap, make_topic, describe):
    topic = make_topic()
    path = describe(bootstrap=bootstrap, topic=topic, more='trigger = "1s"')
    put(bootstrap, topic, 10)
    process = subprocess.Popen(
        [sys.executable, "-m", "mpbroker", "pipeline", "run", str(path)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        description = load(path)
        # Before Spark has begun: how far it is behind after a restart is told at once.
        wait_until(lambda: find(description).state == "starting", 240)
        status = find(description).status
        assert status is not None
        assert (status.behind, status.pid) == (10, process.pid)
    finally:
        process.kill()
        process.wait()
    assert find(description).state == "gone"
