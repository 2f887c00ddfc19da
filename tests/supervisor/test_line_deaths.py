"""Real brokers whose processes die at any source line, under a verified load.

A hundred times as many seams as a timer's kills meet.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import pytest

from tests.supervisor.load import Load, create_topic, read_log
from tests.support.broker import Broker

# How many records are acknowledged; more with MPBROKER_TEST_LINE_RECORDS=20000.
RECORDS: Final = int(os.environ.get("MPBROKER_TEST_LINE_RECORDS", "150"))


@pytest.mark.parametrize(
    ("role", "mean_lines", "acks"),
    [
        ("handler", 1500, 1),
        ("handler", 1500, -1),
        ("processor", 1500, 1),
        ("both", 3000, 1),
    ],
)
def test_nothing_acknowledged_is_lost_or_doubled(tmp_path, role, mean_lines, acks):
    broker = Broker(
        tmp_path / "data",
        {"num.network.threads": 2, "num.io.threads": 2},
        command=[
            *(sys.executable, "-m", "tests.supervisor.dying_by_line"),
            *(role, str(mean_lines)),
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
