"""How long a test waits for `mpbroker_server`, beside a bare start of a broker.

pytest runs in a process of its own and writes down the time of each set-up. "cold" is a
broker with settings of the test's own, which nobody could start before; "fixture" is
the usual one, whose broker has started while the test before it ran.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.bench.brokers import BrokerStartError
from tests.bench.cases import Case, Context

TURNS: Final = 5
TEST_S: Final = 0.5  # a test that does something, while the next broker starts

_CONFTEST: Final = """
import json

def pytest_runtest_logreport(report):
    if report.when == "setup":
        name = report.nodeid.split("::")[1]
        with open("times", "a") as times:
            print(json.dumps([name, report.duration]), file=times)
"""

_TESTS: Final = f"""
import json, time
import pytest
from mpbroker.testing.pytest_plugin import MpbrokerServer

SETTINGS = {{"message.max.bytes": 1_000_000}}


def note(name, began):
    with open("times", "a") as times:
        print(json.dumps([name, time.perf_counter() - began]), file=times)


@pytest.mark.parametrize("turn", range({TURNS}))
@pytest.mark.mpbroker_config(SETTINGS)
def test_alternating(request, tmp_path, turn):
    began = time.perf_counter()
    server = MpbrokerServer(tmp_path, SETTINGS)
    note("bare", began)
    server.stop()
    began = time.perf_counter()
    request.getfixturevalue("mpbroker_server")
    note("cold", began)


@pytest.mark.parametrize("turn", range({TURNS} + 1))
def test_one_after_another(mpbroker_server, turn):
    time.sleep({TEST_S})
"""


def _fixture(context: Context) -> dict[str, float]:
    del context
    with tempfile.TemporaryDirectory(prefix="mpbroker-bench-") as scratch:
        directory = Path(scratch)
        (directory / "conftest.py").write_text(_CONFTEST)
        (directory / "test_theirs.py").write_text(_TESTS)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-n", "0"),
                *("-p", "no:randomly", "-p", "no:cacheprovider"),
            ],
            cwd=directory,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise BrokerStartError(done.stdout + done.stderr)
        times: dict[str, list[float]] = {}
        for line in (directory / "times").read_text().splitlines():
            name, seconds = json.loads(line)
            times.setdefault(name.partition("[")[0], []).append(seconds * 1000)
    return {
        "bare_ms": statistics.median(times["bare"]),
        "cold_ms": statistics.median(times["cold"]),
        # The first has nobody to start its broker before.
        "fixture_ms": statistics.median(times["test_one_after_another"][1:]),
    }


CASES: Final = [Case("pytest-plugin/fixture", _fixture, starts_brokers=True)]
