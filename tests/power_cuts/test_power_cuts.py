"""What was acknowledged outlives a power cut; and a campaign of cuts finds defects."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.power_cuts.broken import DEFECTS
from tests.power_cuts.disk import why_not
from tests.power_cuts.plain_files import content, losses
from tests.support.patience import LONGEST_S
from tests.support.promises import promised

CUTS = 6
# A defect may stay unseen for some cuts: what it does not wait for may be on disk.
MOST_CUTS = 60


@pytest.fixture(scope="module", autouse=True)
def _permitted() -> None:
    if reason := why_not():
        pytest.skip(f"no power can be cut here: {reason}")


def campaign(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a campaign in a process of its own, which has the mounts."""
    return subprocess.run(
        [sys.executable, "-m", "tests.power_cuts", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )


@pytest.mark.timeout(600)
def test_what_was_acknowledged_outlives_power_cuts() -> None:
    done = campaign(CUTS, "--seed", random.randrange(1 << 30))
    with promised("what was acknowledged outlives power cuts"):
        assert "NOT KEPT:" not in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1].split()[0]) >= CUTS


@pytest.mark.timeout(900)
@pytest.mark.parametrize("defect", DEFECTS)
def test_power_cuts_show_what_was_not_forced_to_disk(defect: str) -> None:
    done = campaign(MOST_CUTS, "--seed", 1, "--defect", defect)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT KEPT" in done.stdout


def test_what_plain_files_lose_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "writer-0"
    folder.mkdir()
    counts = memoryview(bytearray(4 * 5)).cast("I")
    for file, records in enumerate((3, 3, 2, 3)):
        counts[file] = 3
        (folder / f"{file:08d}").write_bytes(content(file, records))
    (folder / f"{1:08d}").unlink()
    (folder / f"{3:08d}").write_bytes(content(0, 3))
    disk = SimpleNamespace(path=tmp_path)
    found = losses(disk, [counts])  # type: ignore[arg-type]
    assert [text.partition(" ")[0] for text in found] == [
        f"{file:08d}" for file in (1, 2, 3)
    ]
    assert losses(disk, [counts]) == []  # type: ignore[arg-type]


def test_plain_files_outlive_power_cuts() -> None:
    module = [sys.executable, "-m", "tests.power_cuts.plain_files", "0.02"]
    assert subprocess.run(module, cwd=Path(__file__).parents[2]).returncode == 0


def test_a_broker_whose_disk_fails_acknowledges_nothing_more(tmp_path: Path) -> None:
    # Not in a fork of this process, which may have others' threads (JVM, gRPC).
    done = subprocess.run(
        [sys.executable, "-m", "tests.power_cuts.failing_disk", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stdout
