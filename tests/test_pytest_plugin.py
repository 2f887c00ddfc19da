"""The plug-in, as a project that uses it sees it: pytest in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import socket
import pytest
from mpbroker.producer import Producer

seen = set()


@pytest.mark.mpbroker_topics("orders", "events:3")
def test_topics_are_there(mpbroker_server):
    with Producer(bootstrap_servers=mpbroker_server.bootstrap) as producer:
        assert producer.partitions_for("orders") == 1
        assert producer.partitions_for("events") == 3
        assert producer.send("orders", b"x").result(30).offset == 0
    seen.add(mpbroker_server.port)


def test_each_test_has_a_fresh_broker(mpbroker_server):
    with Producer(bootstrap_servers=mpbroker_server.bootstrap) as producer:
        assert producer.send("orders", b"x").result(30).offset == 0
    assert mpbroker_server.data_dir.is_dir()


def test_the_next_broker_is_another_one(mpbroker_server):
    assert mpbroker_server.port not in seen
    with Producer(bootstrap_servers=mpbroker_server.bootstrap) as producer:
        assert producer.send("orders", b"x").result(30).offset == 0


@pytest.mark.mpbroker_config({"message.max.bytes": "200"})
def test_settings_are_used(mpbroker_server):
    with Producer(bootstrap_servers=mpbroker_server.bootstrap) as producer:
        assert "TOO_LARGE" in str(producer.send("t", b"x" * 300).exception(30))


@pytest.mark.parametrize("offset", [0, 1])
def test_the_session_has_one_for_all(mpbroker_session_server, offset):
    with Producer(bootstrap_servers=mpbroker_session_server.bootstrap) as producer:
        assert producer.send("shared", b"x").result(30).offset == offset


@pytest.mark.mpbroker_config({"log.retentoin.ms": 5})
@pytest.mark.xfail(raises=RuntimeError, strict=True)
def test_a_wrong_setting_is_told(mpbroker_server):
    pass
"""


def run(directory: Path, *options: str) -> str:
    (directory / "test_theirs.py").write_text(TESTS)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:randomly"),
            *("-p", "no:cacheprovider", "-p", "no:mpbroker", "--strict-markers"),
            *options,
        ],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [["-n", "0"], ["-n", "2", "--dist", "loadgroup"]])
def test_tests_get_brokers_topics_and_settings_alone_and_in_parallel(
    tmp_path: Path, options: list[str]
) -> None:
    if options[1] == "2":
        # Which worker runs which test is chance; the shared broker's test counts.
        options = [*options, "-k", "not session"]
    assert "passed" in run(tmp_path, "-p", "mpbroker.pytest_plugin", *options)
