"""What scripts/setup.sh says when it cannot set up."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parents[1] / "scripts" / "setup.sh"
RETRYING = "WARNING: Retrying (Retry(total=0)) after connection broken by "
NO_NAME = (
    "'NewConnectionError('<pip.HTTPSConnection object at 0x7f1>: Failed to establish"
    " a new connection: [Errno -3] Temporary failure in name resolution')':"
    " /simple/setuptools/"
)
NO_TRUST = (
    "'SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]"
    " certificate verify failed: unable to get local issuer certificate"
    " (_ssl.c:992)'))': /simple/x/"
)


def install(tmp_path: Path, pip_says: str) -> subprocess.CompletedProcess[str]:
    """Install with a pip that says this and fails."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(pip_says)}\nexit 1\n")
    python.chmod(0o755)
    script = 'source "$1"; venv=$2; _pip "$2/log" --editable somewhere'
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script, "bash", str(SETUP), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("broken_by", "told"),
    [
        (
            NO_NAME,
            [
                "package index cannot be reached",
                ": Failed to establish a new connection: [Errno -3] Temporary",
                "PIP_INDEX_URL",
            ],
        ),
        (
            NO_TRUST,
            [
                "certificate of the Python package index is not trusted: [SSL:",
                "unable to get local issuer certificate. PIP_CERT=FILE",
            ],
        ),
    ],
)
def test_a_package_index_that_cannot_be_used_is_told_in_a_line(
    tmp_path, broken_by, told
):
    done = install(tmp_path, f"{RETRYING}{broken_by}\nERROR: No matching distribution")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    for words in (*told, "/log"):
        assert words in done.stderr


def test_any_other_failure_of_pip_is_shown_as_pip_says_it(tmp_path):
    done = install(tmp_path, "ERROR: no space left on device")
    assert done.returncode == 1
    said, told = done.stderr.splitlines()
    assert said == "ERROR: no space left on device"
    assert "pip install --editable somewhere failed" in told
