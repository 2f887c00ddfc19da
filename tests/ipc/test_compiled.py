"""A process chooses between the compiled core and its Python twins, and says which."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpbroker.ipc.compiled import IS_COMPILED, PURE_PYTHON_VARIABLE

in_core = pytest.mark.skipif(not IS_COMPILED, reason="the compiled core is not there")


def description(before: str = "", **environ: str) -> str:
    """Return what a new process says of its choice, after it has executed `before`."""
    script = f"{before}\nfrom mpbroker.ipc import compiled\nprint(compiled.DESCRIPTION)"
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {PURE_PYTHON_VARIABLE: ""} | environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@in_core
def test_a_core_that_fits_is_used():
    assert description() == "compiled core"


@in_core
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("from mpbroker.ipc import layout\ndel layout.RING_TAIL", "RING_TAIL"),
        ("from mpbroker.ipc import layout\nlayout.SLOT_WORDS = 8", "a layout that"),
        ("from mpbroker.native import _core\n_core.VERSION = 1", "version 1"),
    ],
    ids=["a-name-is-gone", "numbers-do-not-fit", "other-functions"],
)
def test_a_core_of_another_build_is_noticed_and_not_used(change, why):
    said = description(change)
    assert said.startswith("pure Python; the compiled core is from another build: ")
    assert why in said


def test_a_process_without_a_core_says_that_a_compiler_makes_it_faster():
    said = description("import sys\nsys.modules['mpbroker.native._core'] = None")
    assert said.startswith("pure Python; install with a C compiler")


def test_the_twins_are_used_if_the_environment_asks_for_them():
    said = description(**{PURE_PYTHON_VARIABLE: "1"})
    assert said == f"pure Python, because {PURE_PYTHON_VARIABLE} is set"
