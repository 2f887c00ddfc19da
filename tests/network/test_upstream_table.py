"""UPSTREAM.md names modules and tests: they must be there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "UPSTREAM.md").read_text()
TESTS = HERE.parent


def test_every_test_that_the_table_names_is_there():
    paths = list(TESTS.rglob("test_*.py"))
    texts = "".join(path.read_text() for path in paths)
    defined = set(re.findall(r"def (test_\w+)", texts))
    named = set(re.findall(r"test_[a-z0-9_]+", TABLE))
    named |= {f"test_{rest}" for rest in re.findall(r"\.\.\._([a-z0-9_]+)", TABLE)}
    assert len(named) > 100
    missing = named - defined - {path.stem for path in paths}
    assert not missing
    for file, name in re.findall(r"(test_\w+)::(test_\w+)", TABLE):
        holders = [path for path in paths if path.stem == file]
        assert any(f"def {name}(" in each.read_text() for each in holders), name


def test_every_module_that_the_table_names_is_there():
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", TABLE))
    assert len(named) > 20
    roots = (TESTS.parent, TESTS.parent / "mpbroker")
    missing = {each for each in named if not any((r / each).exists() for r in roots)}
    assert not missing
