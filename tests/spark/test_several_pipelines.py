"""Several pipelines run in one Spark application, and one that fails alone fails."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest
from confluent_kafka import Producer

from mpbroker.cli import main
from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.spark import pipeline
from mpbroker.spark.pipeline import run as runner
from mpbroker.spark.pipeline.run import run_files

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def describe(tmp_path, bootstrap):
    """Write a description of an ingest; return its path."""

    def write(name, topic, *, value="", more="", **keys):
        path = tmp_path / f"{name}.toml"
        checkpoint = keys.get("checkpoint", f"{tmp_path}/checkpoint-{name}")
        path.write_text(
            f"""
            [pipeline]
            job = "ingest"
            name = "{keys.get("pipeline", name)}"
            checkpoint = "{checkpoint}"
            trigger = "{keys.get("trigger", "once")}"
            [source]
            bootstrap = "{keys.get("bootstrap", bootstrap)}"
            subscribe = "{topic}"
            {value}
            [table]
            path = "{tmp_path}/lake-{name}"
            {more}
            """
        )
        return str(path)

    return write


JSON = "[value]\nformat='json'\nfields={a='int'}"


@pytest.fixture
def topic(make_topic, bootstrap):
    name = make_topic(partitions=2)
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(20):
        producer.produce(name, b"%d" % number)
    assert producer.flush(90) == 0
    return name


@pytest.fixture
def own_session(spark, monkeypatch):
    """Let runs use the tests' Spark, whose settings are there already."""
    monkeypatch.setattr(runner, "session", lambda *_, **__: spark)


def test_one_that_fails_does_not_stop_the_others(
    own_session, topic, describe, tmp_path, capfdbinary
):
    files = [
        describe("one", topic),
        describe("bad", topic, value=JSON),  # no JSON, and no dead letters
        describe("wrong", topic, more="compact_mb = 'x'"),
        describe("two", topic),
        describe("absent", "no-such-topic"),
        describe("again", topic, pipeline="one"),
        describe("shared", topic, checkpoint=f"{tmp_path}/checkpoint-two"),
        describe("report", topic),
    ]
    log = tmp_path / "requests.log"
    log.write_text("")
    (tmp_path / "report.toml").write_text(
        f"[pipeline]\njob='report'\n[report]\nlog='{log}'\nout='{tmp_path}/r.html'\n"
    )
    code = main(["pipeline", "run", *files, "--json"])
    out, err = capfdbinary.readouterr()
    # Another try might help the one that failed while it ran.
    assert code == ExitCode.ERROR
    found = {
        each["pipeline"] if "pipeline" in each else each["file"]: each
        for each in json.loads(out)
    }
    assert (found["one"]["rows"], found["two"]["rows"]) == (20, 20)
    errors = {
        each["file"].rpartition("/")[2]: each["error"]
        for each in found.values()
        if "error" in each
    }
    assert set(errors) == {
        *("bad.toml", "wrong.toml", "absent.toml", "again.toml", "shared.toml"),
        "report.toml",
    }
    assert "compact_mb='x'" in errors["wrong.toml"]
    assert "no-such-topic does not exist" in errors["absent.toml"]
    assert "pipeline.name='one' is that of" in errors["again.toml"]
    assert "checkpoint-two' is that of" in errors["shared.toml"]
    assert "no request in" in errors["report.toml"]
    assert b"6 of 8 pipelines failed" in err
    assert b"bad: failed: " in err


def test_the_code_is_that_of_the_failure_which_another_try_may_help_best(
    topic, describe, capfdbinary
):
    wrong = describe("wrong", topic, more="compact_mb = 'x'")
    absent = describe("absent", "no-such-topic")
    away = describe("away", topic, bootstrap="127.0.0.1:1")
    run = ["pipeline", "run", "--dry-run"]
    assert main([*run, wrong, wrong]) == ExitCode.CONFIG
    assert main([*run, wrong, absent]) == ExitCode.NOT_FOUND
    assert main([*run, absent, away, wrong]) == ExitCode.UNAVAILABLE
    assert main([*run, describe("one", topic), describe("two", topic)]) == ExitCode.OK
    assert set(pipeline._BY_HOPE) == {
        *(ExitCode.ERROR, ExitCode.UNAVAILABLE, ExitCode.NOT_FOUND, ExitCode.CONFIG)
    }


def test_settings_of_spark_that_differ_are_refused(topic, describe):
    one = describe("one", topic, more='[spark]\n"spark.a" = "1"')
    other = describe("two", topic, more='[spark]\n"spark.a" = "2"\n"spark.b" = "1"')
    outcomes = run_files([one, other], dry_run=True)
    assert [each.error is None for each in outcomes] == [True, False]
    assert r"spark.spark.a='2' is '1' in" in str(outcomes[1].error)


def test_threads_find_our_format_for_windows_to_a_topic(
    own_session, topic, describe, make_topic, tmp_path
):
    target = make_topic()
    path = describe(
        "windows",
        topic,
        value="[aggregate]\nwindow='1 minute'\nmeasures={n='count(*)'}",
        more=f"[topic]\ntopic='{target}'",
    )
    text = Path(path).read_text().replace('"ingest"', '"aggregate"')
    Path(path).write_text(re.sub(r"\[table\]\n.*\n", "", text))
    outcomes = run_files([path, describe("one", topic)])
    assert [each.error for each in outcomes] == [None, None]


def test_ctrl_c_stops_all(own_session, topic, describe, monkeypatch):
    files = [describe(name, topic, trigger="100ms") for name in ("one", "two")]
    committed = threading.Barrier(3)
    begin = runner._Run.go

    def watched(run, spark):
        seen = []

        def wait(query):
            if run.progress.batches and not seen:
                seen.append(1)
                committed.wait(600)

        run.progress.watches.append(wait)
        begin(run, spark)

    interrupted = []
    join = threading.Thread.join

    def interrupt(thread, timeout=None):
        if timeout == runner._LOOK_S and not interrupted:
            committed.wait(600)  # both have written a batch
            interrupted.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        join(thread, timeout)

    monkeypatch.setattr(runner._Run, "go", watched)
    monkeypatch.setattr(threading.Thread, "join", interrupt)
    outcomes = run_files(files)
    assert [each.error for each in outcomes] == [None, None]
    assert [each.figures["rows"] for each in outcomes] == [20, 20]
