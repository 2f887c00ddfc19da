"""Apache Kafka passes tests of ours: what they ask of a broker is what Kafka does.

A few quick ones, each time; CONTRIBUTING.md says how to run any test against Kafka.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Final

import pytest

from tests.support.apache_kafka import BOOTSTRAP_VARIABLE
from tests.support.fetch_clients import fetch_java_tools

TESTS: Final = (
    "tests/client/test_consumer.py",
    "tests/client/test_share_consumer.py",
    "tests/compat/test_answers.py",
    "tests/compat/test_met_by_outsiders.py",
    # Its other test needs Spark.
    "tests/spark/test_every_range.py::"
    "test_every_range_has_the_rows_that_a_whole_read_has_there",
)
LEAST: Final = 90  # so many of them ask a broker


@pytest.mark.timeout(900)
def test_apache_kafka_passes_tests_of_ours() -> None:
    if BOOTSTRAP_VARIABLE in os.environ:
        pytest.skip("this is such a run")
    if reason := fetch_java_tools():
        pytest.skip(reason)
    module = "tests.support.apache_kafka"
    done = subprocess.run(
        [sys.executable, "-m", module, "--test", "-q", *TESTS],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= LEAST
