"""How the C is ordered: its floors, its headers, and its build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[1] / "mpbroker/native"
FILES = sorted(NATIVE.glob("*/*.[ch]"))
# A folder's sources include headers of these, beside their own.
FLOORS = {
    "base": set(),
    "ipc": {"base"},
    "protocol": {"base"},
    "storage": {"base", "ipc", "protocol"},
    "network": {"base", "ipc", "protocol"},
    "server": {"base", "ipc", "protocol", "storage"},
    "coordinator": {"base", "ipc", "protocol", "storage"},
}
COMPILER = shutil.which("cc") or shutil.which("gcc")


def test_includes_go_down_only():
    assert {path.parent.name for path in FILES} == set(FLOORS)
    for path in FILES:
        floor = path.parent.name
        for included in re.findall(r'#include "([^"]*)"', path.read_text()):
            assert included.split("/")[0] in {floor} | FLOORS[floor], (path, included)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_every_header_can_be_included_alone_and_warns_of_nothing(tmp_path):
    assert COMPILER is not None
    python = sysconfig.get_path("include")
    if not (Path(python) / "Python.h").exists():
        pytest.skip("no headers of Python")
    sources = []
    for header in NATIVE.glob("*/*.h"):
        name = str(header.relative_to(NATIVE))
        sources.append(tmp_path / f"{name.replace('/', '_')}.c")
        sources[-1].write_text(f'#include "{name}"\n')
    flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    done = subprocess.run(
        [COMPILER, *flags, f"-I{python}", f"-I{NATIVE}", "-fsyntax-only", *sources],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_python_file_that_a_comment_names_is_there():
    root = NATIVE.parents[1]
    for path in [*FILES, NATIVE / "_core.c"]:
        for name in re.findall(r"[\w/]+\.py\b", path.read_text()):
            found = (root / name).exists() or any((root / "mpbroker").rglob(name))
            assert found, (path, name)


def test_no_function_is_longer_than_80_lines():
    for path in [*FILES, NATIVE / "_core.c"]:
        for body in re.findall(r"^\{\n(.*?)^\}", path.read_text(), re.M | re.S):
            assert body.count("\n") <= 78, (path, body[:80])
