"""A pipeline's TOML is understood, or refused with what would be right."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from confluent_kafka import Producer

from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.spark import pipeline
from mpbroker.protocol.errors import ApiError
from mpbroker.spark.pipeline import run as runner
from mpbroker.spark.pipeline.description import load, parse
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.run import preview
from tests.support.ports import reusable_port

GOOD = """
[pipeline]
job = "ingest"
checkpoint = "/c"
trigger = "30s"

[source]
bootstrap = "h:9092"
subscribe = "t"
includeHeaders = true

[value]
format = "json"
[value.fields]
carrier = "string"
at = "timestamp"

[table]
path = "/lake/"
format = "delta"
partition_by = ["date", "carrier"]
event_time = "at"
late_after = "1d"
"""


WINDOWS = {
    "pipeline": {"job": "aggregate", "checkpoint": "/c"},
    "source": {"bootstrap": "h:1", "subscribe": "t"},
    "value": {"format": "json", "fields": {"kind": "string"}},
    "aggregate": {"window": "1 minute", "measures": {"n": "count(*)"}},
}


def test_a_whole_file_is_read_and_named_after_itself(tmp_path):
    path = tmp_path / "flights.toml"
    path.write_text(GOOD)
    found = load(path)
    assert (found.name, found.job, found.trigger_s) == ("flights", "ingest", 30)
    assert found.source == {
        "kafka.bootstrap.servers": "h:9092",
        "subscribe": "t",
        "includeHeaders": "true",
    }
    assert found.table is not None
    assert (found.table.path, found.table.late_after_s) == ("/lake", 86400)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[table]", "[tabel]", r"no section 'tabel' \(did you mean 'table'\?\)"),
        ("checkpoint =", "chekpoint =", r"'chekpoint' \(did you mean 'checkpoint'\?\)"),
        ('"ingest"', '"digest"', r"job='digest' .*did you mean 'ingest'"),
        ('"timestamp"', '"timestmp"', r"fields.at='timestmp' .*did you mean 'timestam"),
        ('"delta"', '"hudi"', "'hudi' is none of parquet, delta, iceberg"),
        ('"30s"', '"soon"', "trigger='soon' must be 'once', or a duration"),
        ('event_time = "at"', 'event_time = "att"', r"'att'.*did you mean 'at'"),
        ('"carrier"]', '"carier"]', r"'carier'.*did you mean 'carrier'"),
        ('checkpoint = "/c"', "", "checkpoint is not set"),
        ('path = "/lake/"', "", "table.path is not set"),
        (
            'event_time = "at"',
            'event_time = "carrier"',
            "'carrier', which is string; i",
        ),
        ('at = "timestamp"', 'at = "date"', None),
        ('carrier = "string"', 'carrier = "double"', "'carrier', which is double; it"),
        ('"date", "carrier"', '"_key"', "names '_key', which is binary; it must be st"),
        ('"date", "carrier"', '"_topc"', r"none of the columns.*did you mean '_topic'"),
        ('"date", "carrier"', '"_topic", "_partition"', None),
        ('"ingest"', '"ingest"\nname = "_x"', r"pipeline.name='_x'.*not begin"),
        ("[value.fields]", "[value.fields]\n_offset='int'", "begin with '_'"),
        ('"json"', '"avro"', "needs value.schema"),
        ('"json"', '"raw"', "'raw' has no fields"),
        ("[source]", "[source", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_right(tmp_path, old, new, message):
    path = tmp_path / "x.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    if message is None:  # nothing is
        load(path)
        return
    with pytest.raises(PipelineError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "job is not set"),
        ({"pipeline": {"job": "ingest"}}, r"needs a section \[source\]"),
        ({"pipeline": 3}, "must be a section"),
        (
            {"pipeline": {"job": "replay"}, "table": {"path": "x"}, "topic": {"a": 1}},
            "topic.topic is not set",
        ),
        (
            {
                "pipeline": {"job": "replay"},
                "table": {"path": "x"},
                "topic": {"topic": "t"},
                "replay": {"rate": 1, "speed": 2},
            },
            "exclude each other",
        ),
        (
            {
                "pipeline": {"job": "replay"},
                "table": {"path": "x"},
                "topic": {"topic": "t", "exactlyOnce": True},
            },
            "a replay is at least once",
        ),
        (
            WINDOWS | {"table": {"path": "t", "partition_by": ["kind"]}},
            r"partition_by names 'kind', which is none of the columns: window_end",
        ),
        (
            WINDOWS | {"table": {"path": "t", "event_time": "_timestamp"}},
            r"event_time names '_timestamp', which is none of the columns: window_end",
        ),
        (
            WINDOWS
            | {
                "topic": {"topic": "t"},
                "aggregate": WINDOWS["aggregate"] | {"event_time": "kind"},
            },
            "'kind', which is string; it must be timestamp",
        ),
    ],
)
def test_what_is_missing_is_named(content, message):
    with pytest.raises(PipelineError, match=message):
        parse(content)


def test_a_missing_file_is_one_line_and_an_exit_code(tmp_path):
    done = _mpbroker("run", str(tmp_path / "none.toml"))
    assert done.returncode == 78
    assert done.stderr.strip().endswith(
        "none.toml cannot be read: No such file or directory"
    )
    assert len(done.stderr.splitlines()) == 1


def test_a_dry_run_asks_the_broker_and_changes_nothing(bootstrap, make_topic, tmp_path):
    topic = make_topic(partitions=3)
    path = tmp_path / "p.toml"
    text = GOOD.replace("h:9092", bootstrap).replace('"t"', f'"{topic}"')
    path.write_text(
        text.replace("/lake/", f"{tmp_path}/lake").replace("/c", f"{tmp_path}/c")
    )
    # Without Java: nothing is started.
    done = _mpbroker("run", "--dry-run", str(path), PATH="", JAVA_HOME="")
    assert done.returncode == 0, done.stderr
    assert f"reads {topic}: 3 partitions, 0 offsets, from the start" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["p.toml"]
    real = _mpbroker("run", str(path), PATH="", JAVA_HOME="")
    assert "apt-get install openjdk-17" in real.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["p.toml"]
    other = _mpbroker("run", "--dry-run", "--master", "sparc://h:1", str(path))
    assert "Spark knows no master 'sparc://h:1'" in other.stderr


def test_a_missing_topic_is_named_before_spark_is_started(bootstrap, tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(GOOD.replace("h:9092", bootstrap).replace('"t"', '"no-such-topic"'))
    done = _mpbroker("run", "--dry-run", str(path))
    assert done.returncode == 10
    assert "no-such-topic does not exist; create it first" in done.stderr


def test_a_preview_counts_what_will_be_read(bootstrap, make_topic):
    topic = make_topic(partitions=2)
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(10):
        producer.produce(topic, b"x", partition=number % 2)
    assert producer.flush(90) == 0

    def says(**source):
        found = preview(
            parse(
                {
                    "pipeline": {"job": "ingest", "checkpoint": "/nowhere/c"},
                    "source": {"bootstrap": bootstrap} | source,
                    "table": {"path": "/nowhere/t"},
                }
            )
        )
        return list(found)[1].partition(": ")[2]

    assert says(subscribe=topic) == "2 partitions, 10 offsets, from the start"
    options = "from where the source's options say"
    assert says(subscribe=topic, startingOffsets="latest") == (
        f"2 partitions, 0 offsets, {options}"
    )
    some = f'{{"{topic}":{{"0":1,"1":4}}}}'
    assert says(subscribe=topic, startingOffsets=some) == (
        f"2 partitions, 5 offsets, {options}"
    )
    with pytest.raises(ApiError, match="one of no-such-topic does not exist"):
        says(assign='{"no-such-topic":[0]}')


def test_a_topic_for_windows_that_is_missing_is_named_before_spark_is_started(
    bootstrap, make_topic
):
    topic = make_topic()
    source = {"bootstrap": bootstrap, "subscribe": topic}
    described = WINDOWS | {"source": source, "topic": {"topic": "no-such-topic"}}
    with pytest.raises(ApiError, match="no-such-topic does not exist; create it first"):
        list(preview(parse(described)))
    described["topic"] = {"topic": topic}
    assert f"results go to topic {topic} (1 partitions)" in preview(parse(described))


def test_a_topic_that_is_gone_is_no_other_checkpoint_if_that_is_allowed(
    bootstrap, make_topic, tmp_path
):
    topic = make_topic()
    offsets = tmp_path / "c" / "offsets"
    offsets.mkdir(parents=True)
    content = f'v1\n{{}}\n{{"gone":{{"0":5}},"{topic}":{{"0":0}}}}'
    (offsets / "0").write_text(content)
    described = {
        "pipeline": {"job": "ingest", "checkpoint": str(tmp_path / "c")},
        "source": {"bootstrap": bootstrap, "subscribe": topic},
        "table": {"path": str(tmp_path / "t")},
    }
    with pytest.raises(PipelineError, match="is of another topic: gone"):
        list(preview(parse(described)))
    described["source"] |= {"failOnDataLoss": False}
    assert "0 offsets since the checkpoint" in list(preview(parse(described)))[1]


def test_a_checkpoint_of_another_topic_is_refused(bootstrap, make_topic, tmp_path):
    topic = make_topic(partitions=1)
    offsets = tmp_path / "c" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "0").write_text('v1\n{"batchWatermarkMs":0}\n{"other":{"0":5}}')
    path = tmp_path / "p.toml"
    text = GOOD.replace("h:9092", bootstrap).replace('"t"', f'"{topic}"')
    path.write_text(text.replace('"/c"', f'"{tmp_path}/c"'))
    done = _mpbroker("run", "--dry-run", str(path))
    assert done.returncode == 1
    assert "is of another topic: other" in done.stderr


def test_once_ends_a_pipeline_that_would_go_on(bootstrap, make_topic, tmp_path):
    path = tmp_path / "p.toml"
    text = GOOD.replace("h:9092", bootstrap).replace('"t"', f'"{make_topic()}"')
    path.write_text(
        text.replace("/lake/", f"{tmp_path}/lake").replace('"/c"', f'"{tmp_path}/c"')
    )
    for more, until in (([], "until it is stopped"), (["--once"], "all there is now")):
        done = _mpbroker("run", "--dry-run", *more, str(path))
        assert done.returncode == 0, done.stderr
        assert f"checkpoint {tmp_path}/c; {until}" in done.stderr


def test_exit_codes_say_whether_starting_again_can_help(tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(GOOD.replace("ingest", "digest"))
    option = tmp_path / "option.toml"
    option.write_text(GOOD.replace('subscribe = "t"', 'subscribePattern = "("'))
    away = tmp_path / "away.toml"
    port = reusable_port()
    away.write_text(GOOD.replace("h:9092", f"127.0.0.1:{port}"))
    for path, code in (
        (tmp_path / "none.toml", ExitCode.CONFIG),
        (wrong, ExitCode.CONFIG),
        (option, ExitCode.CONFIG),
        (away, ExitCode.UNAVAILABLE),
    ):
        done = _mpbroker("run", "--dry-run", str(path))
        assert done.returncode == code, done.stderr


def test_sigterm_stops_a_pipeline_as_ctrl_c_does(monkeypatch):
    def run_files(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(runner, "run_files", run_files)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            pipeline.run.callback(("f",), False, None, False, False)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.heavy
def test_the_runner_is_a_script_for_spark_submit(bootstrap, make_topic, tmp_path):
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        pytest.skip("Spark needs Java 17 or newer, and there is none")
    path = tmp_path / "p.toml"
    text = GOOD.replace("h:9092", bootstrap).replace('"t"', f'"{make_topic()}"')
    path.write_text(
        text.replace("/lake/", f"{tmp_path}/lake").replace("/c", f"{tmp_path}/c")
    )
    submit = [
        str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
        *("--master", "local[1]", "--driver-memory", "512m", runner.__file__),
    ]
    done = _run([*submit, str(path), "--dry-run"])
    assert done.returncode == 0, done.stderr
    # All that a script says comes out there.
    assert "1 partitions, 0 offsets, from the start" in done.stdout


def test_the_script_names_what_is_wrong_in_one_line(tmp_path):
    script = [sys.executable, runner.__file__]
    done = _run([*script, str(tmp_path / "none.toml")])
    assert done.returncode == 1
    assert done.stderr.startswith("mpbroker: ")
    assert done.stderr.count("\n") == 1
    done = _run(script)
    assert (done.returncode, done.stderr[:19]) == (2, "usage: spark-submit")


def _run(command):
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root, "PYSPARK_PYTHON": sys.executable},
    )


def _mpbroker(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "mpbroker", "pipeline", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, **environ},
    )
