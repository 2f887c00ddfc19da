"""The distribution's name, which is not that of the command and the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mpbroker.base.distribution import (
    DISTRIBUTION,
    WrongDistributionError,
    refuse_other_distribution,
)

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "mpbroker/**/*.py",
        "deploy/**/*",
        "systemd/*",
    )
    for path in ROOT.glob(pattern)
    if path.is_file()
]


def test_the_distribution_is_called_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    extras = project["optional-dependencies"]
    own = [each for extra in extras.values() for each in extra if "mpbroker" in each]
    assert own and all(each.startswith(f"{DISTRIBUTION}[") for each in own)
    assert set(project["scripts"]) == {"mpbroker"}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_says_to_install_the_other_program(path):
    text = path.read_text(errors="replace")
    names = re.findall(r"""pip install[\s"'`]*(mpbroker[\w-]*)(\[\w+\])?""", text)
    assert {name for name, _ in names} <= {DISTRIBUTION}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {extra.strip("[]") for _, extra in names if extra} <= set(extras)
    assert not re.search(r"mpbroker\[\w+\]", text)


def test_the_other_distribution_beside_the_package_is_refused(tmp_path):
    (tmp_path / f"{DISTRIBUTION.replace('-', '_')}-0.1.0.dist-info").mkdir()
    refuse_other_distribution(str(tmp_path))
    (tmp_path / "mpbroker-1.3.0.dist-info").mkdir()
    with pytest.raises(WrongDistributionError, match="pip uninstall mpbroker"):
        refuse_other_distribution(str(tmp_path))


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "mpbroker", "--version"],
        ["-m", "mpbroker", "serve", "--help"],
        ["-c", "from mpbroker import Producer"],
    ],
    ids=["command", "serve", "import"],
)
def test_neither_command_nor_import_goes_on_with_mixed_files(tmp_path, command):
    (tmp_path / "mpbroker").symlink_to(ROOT / "mpbroker")

    def run():
        return subprocess.run(
            [sys.executable, "-P", *command],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert run().returncode == 0
    (tmp_path / "mpbroker-1.3.0.dist-info").mkdir()
    refused = run()
    assert refused.returncode == 1
    assert "they exclude each other" in refused.stderr
