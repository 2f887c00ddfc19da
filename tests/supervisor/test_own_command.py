"""What an upgrade without a command starts: the script typed, or our Python."""

from __future__ import annotations

import sys

import pytest

from mpbroker.supervisor.own_command import installed_command, own_command

REST = ["serve", "listeners=PLAINTEXT://:9092"]


@pytest.mark.parametrize(
    ("first_line", "is_run_as_it_is"),
    [
        (b"#!/opt/mpbroker/bin/python\n", True),
        (b"#!/usr/bin/env python3\n", False),  # perhaps not the one it was given to
        (b"\x7fELF", False),
    ],
)
def test_a_script_that_names_its_python_is_run_as_it_is(
    tmp_path, monkeypatch, first_line, is_run_as_it_is
):
    script = tmp_path / "mpbroker"
    script.write_bytes(first_line)
    script.chmod(0o755)
    monkeypatch.setattr(
        sys, "orig_argv", ["python", str(script), *REST, "--ready-fd", "7"]
    )
    ours = [sys.executable, str(script), *REST]
    assert own_command() == ours
    assert installed_command() == ([str(script), *REST] if is_run_as_it_is else ours)
