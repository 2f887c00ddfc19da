"""Real brokers whose processes die at any point, under a verified load.

Any source line of the Python twins, and any step of the compiled core.

A hundred times as many seams as a timer's kills meet.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import pytest

from mpbroker.ipc.compiled import IS_COMPILED
from tests.supervisor.load import Load, create_topic, read_log
from tests.support.broker import Broker

# How many records are acknowledged; more with MPBROKER_TEST_LINE_RECORDS=20000.
RECORDS: Final = int(os.environ.get("MPBROKER_TEST_LINE_RECORDS", "150"))

compiled = pytest.mark.skipif(not IS_COMPILED, reason="the compiled core is not there")


@pytest.mark.parametrize(
    ("role", "points", "mean", "acks"),
    [
        ("handler", "lines", 1500, 1),
        ("handler", "lines", 1500, -1),
        ("processor", "lines", 1500, 1),
        ("both", "lines", 3000, 1),
        pytest.param("handler", "steps", 300, 1, marks=compiled),
        pytest.param("processor", "steps", 200, 1, marks=compiled),
        pytest.param("both", "steps", 400, 1, marks=compiled),
    ],
)
def test_nothing_acknowledged_is_lost_or_doubled(tmp_path, role, points, mean, acks):
    broker = Broker(
        tmp_path / "data",
        {"num.network.threads": 2, "num.io.threads": 2},
        command=[
            *(sys.executable, "-m", "tests.supervisor.dying_by_line"),
            *(role, points, str(mean)),
        ],
    )
    with broker:
        create_topic(broker)
        with Load(broker, 6, acks) as load:
            load.run(RECORDS)
        deaths = broker.log_path.read_text().count("died: signal 9")
    load.verify(read_log(broker.data_dir))
    assert deaths > 3
    assert sum(load.losses) == 0
