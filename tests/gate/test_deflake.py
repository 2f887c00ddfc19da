"""scripts/deflake finds a test that fails now and then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OFTEN = """
import random
def test_of_chance():
    assert random.random() < 0.5, "bad luck"
"""


def deflake(folder: Path, *arguments: str) -> tuple[int, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gate.deflake", *arguments],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(("text", "fails"), [(OFTEN, True), ("def test(): ...", False)])
def test_a_test_that_fails_now_and_then_is_found(
    text: str, fails: bool, tmp_path: Path
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(text)
    few = ("--runs", "6", "--workers", "2", "--busy", "0", "--seed", "1")
    code, said = deflake(tmp_path, *few, "test_it.py")
    assert code == int(fails), said
    # Of these six seeds some pass and some fail; each failure names its seed.
    marks = said.partition("\n")[0]
    assert len(marks) == 6 and "." in marks
    assert said.count("---- seed ") == marks.count("F")
    assert ("F" in marks and "bad luck" in said) == fails
