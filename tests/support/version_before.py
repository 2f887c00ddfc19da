"""The sources of mpbroker as they were before the newest migration of a cluster.

Nodes of that version and of this one run side by side while a cluster is upgraded.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import pytest

from mpbroker.cluster import migrations

ROOT: Final = Path(__file__).parents[2]
_PARTS: Final = ("mpbroker", "tests", "pyproject.toml")


def version_before(directory: Path) -> Path:
    """Write the sources into a directory, and return that.

    They come from git's history: those before the commit that has added the newest
    migration, or the last commit, if that migration is in none yet. The C core is not
    built: the version before runs in pure Python.

    Raises:
        Skipped: there is no history here, or none of a cluster.
    """
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and the repository's history")
    newest = sorted(migrations.DIRECTORY.glob("*.sql"))[-1]
    added = _git("log", "--diff-filter=A", "--format=%H", "--", str(newest))
    commit = f"{added.decode().split()[-1]}^" if added else "HEAD"
    if not _git("ls-tree", commit, str(migrations.DIRECTORY.relative_to(ROOT))):
        pytest.skip("no version before the newest migration is in the history")
    try:
        archive = _git("archive", "--format=tar", commit, *_PARTS)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs the repository's history: {error.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(directory, filter="data")
    return directory


def python_of(tree: Path) -> list[str]:
    """Return a command that runs Python with the sources in a directory."""
    return ["env", "-C", str(tree), f"PYTHONPATH={tree}", sys.executable]


def _git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, check=True
    ).stdout
