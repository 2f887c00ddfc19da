"""The plug-in, as a project that uses it sees it: pytest in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from mpbroker.testing import cluster_fixture
from mpbroker.testing.postgresql import PostgreSQL, postgresql, programs, what_lacks
from mpbroker.testing.pytest_plugin import MpbrokerServer
from tests.support.children import wait_until

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


@pytest.mark.mpbroker_topics("parted:2")
@pytest.mark.parametrize("time", [0, 1])
def test_the_session_has_topics_of_markers(mpbroker_session_server, time):
    with Producer(bootstrap_servers=mpbroker_session_server.bootstrap) as producer:
        assert producer.partitions_for("parted") == 2


@pytest.mark.mpbroker_config({"log.retentoin.ms": 5})
@pytest.mark.xfail(raises=RuntimeError, strict=True)
def test_a_wrong_setting_is_told(mpbroker_server):
    pass
"""


def start(directory: Path, tests: str, *options: str) -> subprocess.Popen[str]:
    (directory / "test_theirs.py").write_text(tests)
    # Of their own, and not what the broker means by that name.
    (directory / "mmap.py").write_text("raise ImportError('this is the user s')")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:randomly"),
            *("-p", "no:cacheprovider", "-p", "no:mpbroker", "--strict-markers"),
            *("-p", "mpbroker.testing.pytest_plugin", *options),
        ],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[1])},
    )


def run(directory: Path, tests: str, *options: str) -> tuple[int, str]:
    with start(directory, tests, *options) as process:
        said, _ = process.communicate(timeout=300)
    return process.returncode, said


@pytest.mark.parametrize("options", [["-n", "0"], ["-n", "2", "--dist", "loadgroup"]])
def test_tests_get_brokers_topics_and_settings_alone_and_in_parallel(
    tmp_path: Path, options: list[str]
) -> None:
    if options[1] == "2":
        # Which worker runs which test is chance; the shared broker's test counts.
        options = [*options, "-k", "not session"]
    code, said = run(tmp_path, TESTS, *options)
    assert code == 0, said
    assert "passed" in said


CLUSTER = """
import pytest
from mpbroker import Consumer, Producer


@pytest.mark.mpbroker_topics("orders:3")
def test_another_node_has_what_a_dead_one_has_taken(mpbroker_cluster):
    first, second, third = mpbroker_cluster.nodes
    with Producer(bootstrap_servers=first.bootstrap) as producer:
        sent = [
            producer.send("orders", b"%d" % number, partition=number % 3)
            for number in range(30)
        ]
        assert [each.result(60).offset for each in sent[-3:]] == [9, 9, 9]
    first.kill()
    with Producer(bootstrap_servers=mpbroker_cluster.bootstrap) as producer:
        assert producer.send("orders", b"30", partition=0).result(60).offset == 10
    found = []
    settings = {"bootstrap.servers": third.bootstrap, "auto.offset.reset": "earliest"}
    with Consumer(settings) as consumer:
        consumer.assign([("orders", partition) for partition in range(3)])
        while len(found) < 31:
            for records in consumer.poll(1000).values():
                found += [int(record.value) for record in records]
    assert sorted(found) == list(range(31))


def test_each_test_has_a_cluster_of_its_own(mpbroker_cluster):
    mpbroker_cluster.create_topic("orders")
    assert len(set(mpbroker_cluster.bootstrap.split(","))) == 3


@pytest.mark.mpbroker_config({"num.partitions": "many"})
def test_a_node_that_does_not_start(mpbroker_cluster): ...
"""


@pytest.mark.skipif(programs() is None, reason="no PostgreSQL (Debian: postgresql)")
@pytest.mark.parametrize("has_server", [False, True])
def test_tests_get_clusters_and_leave_no_database(
    tmp_path: Path, has_server: bool
) -> None:
    with contextlib.ExitStack() as stack:
        options = ["-n", "0"]
        if has_server:
            server = stack.enter_context(postgresql())
            options += ["--mpbroker-database-url", server.url("postgres")]
        code, said = run(tmp_path, CLUSTER, *options)
        assert code == 1, said
        assert re.search(r"\b2 passed,.* 1 error\b", said), said
        assert "num.partitions" in said
        if has_server:
            assert databases_of(server) == ["postgres"]


def databases_of(server: PostgreSQL) -> list[str]:
    async def ask() -> list[str]:
        connection = await asyncpg.connect(server.url("postgres"))
        rows = await connection.fetch(
            "SELECT datname FROM pg_database WHERE NOT datistemplate"
        )
        await connection.close()
        return [row["datname"] for row in rows]

    return asyncio.run(ask())


def test_a_cluster_without_postgresql_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_fixture, "programs", lambda: None)
    with (
        pytest.raises(
            RuntimeError, match=r"needs PostgreSQL 15 .*--mpbroker-database-url"
        ),
        cluster_fixture.databases(None, tmp_path, print),
    ):
        pass


MISTAKEN = """
import pytest


@pytest.mark.mpbroker_topics("orders:many")
def test_topic(mpbroker_server): ...


@pytest.mark.mpbroker_config("num.partitions=5")
def test_config(mpbroker_server): ...


@pytest.mark.mpbroker_config({"num.partitions": 5})
def test_shared_config(mpbroker_session_server): ...


def test_that_fails(mpbroker_session_server):
    assert 0
"""


def test_mistakes_are_told_and_a_failure_shows_what_the_broker_said(
    tmp_path: Path,
) -> None:
    code, said = run(tmp_path, MISTAKEN, "-n", "0")
    assert code == 1, said
    assert "1 failed, 3 errors" in said
    assert "mpbroker_topics('orders:many'): a topic is" in said
    assert "mpbroker_config takes one dict" in said
    assert "mpbroker_config is for mpbroker_server" in said
    assert "log of mpbroker_session_server" in said
    assert "serving PLAINTEXT on 127.0.0.1" in said


HANGING = """
import time


def test_that_hangs(mpbroker_server, mpbroker_session_server):
    for number, server in enumerate((mpbroker_server, mpbroker_session_server)):
        with open(f"server-{number}", "w") as file:
            print(server._process.pid, server.data_dir.parent, file=file)
    for _ in range(6000):  # a signal just before a sleep begins does not end it
        time.sleep(0.1)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_behind_however_pytest_ends(tmp_path: Path, how: int) -> None:
    notes = [tmp_path / f"server-{number}" for number in range(2)]
    # In the background of a shell interrupts are ignored, also by whom we start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = start(tmp_path, HANGING, "-n", "0")
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            wait_until(lambda: all(n.exists() and n.read_text() for n in notes), 180)
        finally:
            process.send_signal(how)
        process.communicate()
    for note in notes:
        pid, directory = note.read_text().split()
        wait_until(lambda pid=pid: not Path("/proc", pid).exists())
        wait_until(lambda directory=directory: not Path(directory).exists())
        wait_until(lambda pid=pid: not list(Path("/dev/shm").glob(f"mpbroker-{pid}-*")))


def test_a_broker_that_is_killed_leaves_no_shared_memory(tmp_path: Path) -> None:
    server = MpbrokerServer(tmp_path, {})
    pid = server._process.pid
    assert list(Path("/dev/shm").glob(f"mpbroker-{pid}-*"))
    server.kill()
    assert not list(Path("/dev/shm").glob(f"mpbroker-{pid}-*"))
    server.kill()
    server.stop()


def test_a_broker_that_has_not_begun_to_serve_can_be_stopped(tmp_path: Path) -> None:
    server = MpbrokerServer(tmp_path, {}, wait=False)
    server.stop()
    assert not Path(f"/proc/{server._process.pid}").exists()


IMPORTS = """
import sys
from mpbroker.base.errors import MpbrokerError
from mpbroker.testing import pytest_plugin

if sys.argv[1] == "early":
    pytest_plugin._import_client()
before = set(sys.modules)
server = object.__new__(pytest_plugin.MpbrokerServer)
server.bootstrap = "127.0.0.1:1"  # where nothing listens
try:
    server.create_topic("flights")
except MpbrokerError:
    pass
print(*(name for name in set(sys.modules) - before if name.startswith("mpbroker")))
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_the_client_is_imported_while_the_broker_starts(when: str) -> None:
    command = [sys.executable, "-c", IMPORTS, when]
    later = subprocess.check_output(command, text=True).split()
    assert bool(later) is (when == "late")


@pytest.mark.parametrize(
    ("told", "version", "is_new"),
    [
        ("postgres (PostgreSQL) 14.12 (Debian 14.12-1)", "14", False),
        ("postgres (PostgreSQL) 9.6.24", "9", False),
        ("postgres (PostgreSQL) 15.0", "", True),
        ("postgres (PostgreSQL) 18beta1", "", True),
        ("what is this", "", False),
    ],
)
def test_a_server_on_the_path_that_is_too_old_is_not_taken_and_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: str,
    version: str,
    is_new: bool,
) -> None:
    server = tmp_path / "postgres"
    server.write_text(f"#!/bin/sh\necho '{told}'\n")
    server.chmod(0o755)
    monkeypatch.setattr("mpbroker.testing.postgresql._DEBIAN", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert (programs() == tmp_path.resolve()) is is_new
    assert "needs PostgreSQL 15 or newer" in what_lacks()
    assert (f"; version {version} is installed" in what_lacks()) is bool(version)
