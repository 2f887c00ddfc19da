"""Pages run from top to bottom as they stand; that of symptoms quotes what is said."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
START, TROUBLE = ROOT / "docs/start.md", ROOT / "docs/trouble.md"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


def run_page(page: Path, folder: Path) -> list[str]:
    """Run all shell commands of a page; return what they printed, by lines.

    The ports that it names are replaced by free ones.
    """
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S))
    ports = free_ports(3)
    for named, free in zip((9092, 9093, 9404), ports, strict=True):
        script = script.replace(str(named), str(free))
    programs = folder / "bin"
    programs.mkdir()
    command = programs / "mpbroker"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m mpbroker "$@"\n')
    command.chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MPBROKER_GROUP_INITIAL_REBALANCE_DELAY_MS": "0",
    }
    if "listeners=PLAINTEXT" not in script and "listeners=SASL" not in script:
        address = f"127.0.0.1:{ports[0]}"
        environ["MPBROKER_LISTENERS"] = f"PLAINTEXT://{address}"
        environ["MPBROKER_BOOTSTRAP"] = address
    try:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        # If it failed half-way a broker may serve yet.
        for name in ("data", "restored"):
            stop = [str(command), "ctl", "stop", "--data-dir", name]
            subprocess.run(stop, cwd=folder, env=environ, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "data/mpbroker.log").read_text().endswith("stopped\n")
    return done.stdout.splitlines()


def test_the_page_for_newcomers_runs_from_top_to_bottom(tmp_path):
    # Read at once, by the group, again after the reset, and from the backup.
    lines = run_page(START, tmp_path)
    assert (lines.count("alice:tea"), lines.count("coffee")) == (2, 2)
    assert (tmp_path / "restored/mpbroker.log").read_text().endswith("stopped\n")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_a_broker_is_secured_as_is_shown(tmp_path):
    lines = run_page(ROOT / "docs/secure.md", tmp_path)
    # Bob has read what Alice wrote, before and after the authorizer came.
    assert lines.count("hello") == 2 and lines.count("again") == 1
    assert "no" not in lines
    log = (tmp_path / "data/mpbroker.log").read_text()
    assert "User:bob" in log and "User:alice" in log  # refusals


def test_a_broker_is_upgraded_as_is_shown(tmp_path):
    lines = run_page(ROOT / "docs/upgrade.md", tmp_path)
    assert sum(line.startswith("upgrade done: ") for line in lines) == 2


def test_a_broker_is_sized_as_is_shown(tmp_path):
    lines = run_page(ROOT / "docs/sizing.md", tmp_path)
    assert any(line.startswith("handler 2 ") for line in lines)  # after the resize


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_a_broker_is_monitored_as_is_shown(tmp_path):
    lines = run_page(ROOT / "docs/monitoring.md", tmp_path)
    assert any(line.startswith("mpbroker_") for line in lines)


SOURCES = "\n".join(path.read_text() for path in (ROOT / "mpbroker").rglob("*.py"))
# Two literals that Python joins.
JOINED = re.sub(r'"\s*\n\s*f?"', "", SOURCES)


@pytest.mark.parametrize(
    "words", re.findall(r"^\| `([^`]+)`(?: in the log)? \|", TROUBLE.read_text(), re.M)
)
def test_a_message_of_the_page_of_symptoms_is_one_that_is_said(words):
    for part in words.split(": ", 1):
        assert part.strip() in JOINED
