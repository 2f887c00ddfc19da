"""What is missing for Spark is said in one line, before anything is started."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from mpbroker.spark.session import (
    SparkSetupError,
    check_java,
    check_master,
    reach_master,
    session,
)


def test_no_java_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SparkSetupError, match="apt-get install openjdk-17"):
        session()


def test_a_java_home_without_java_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkSetupError, match=r"JAVA_HOME=.* has no bin/java"):
        check_java()


@pytest.mark.parametrize(
    "master",
    ["local", "local[2]", "local[*]", "spark://h:7077", "spark://a:1,b:2", "yarn"],
)
def test_masters_that_spark_knows_pass(master):
    check_master(master)


@pytest.mark.parametrize(
    "master", ["", "spark://h", "h:7077", "local[0]", "mesos://h:1"]
)
def test_a_master_that_spark_does_not_know_is_named(master):
    with pytest.raises(SparkSetupError, match=f"(?s){master!r}".replace("[", r"\[")):
        check_master(master)


def test_a_master_that_nobody_runs_is_named_before_spark_is_started():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reach_master(f"spark://127.0.0.1:1,127.0.0.1:{port}")  # one of them answers
    master = f"spark://127.0.0.1:{port},127.0.0.1:99999"
    with pytest.raises(SparkSetupError) as caught:
        session(master=master)
    text = str(caught.value)
    assert f"no Spark master answers at {master}" in text
    assert f"127.0.0.1:{port}: " in text
    assert "127.0.0.1:99999: " in text


def test_masters_of_others_are_not_asked_for():
    for master in ("local[2]", "yarn", "k8s://https://127.0.0.1:1"):
        reach_master(master)


def test_the_process_that_names_a_format_imports_nothing_that_reads():
    """Spark starts one for each query, and it needs the columns only."""
    asked = "import sys, mpbroker.spark.source; print(*sys.modules)"
    found = subprocess.check_output([sys.executable, "-c", asked], text=True).split()
    assert "mpbroker.spark.source" in found
    assert not [name for name in found if name.startswith("mpbroker.client")]
