"""Build the documentation's site, with references made of what the code says.

    python -m deploy.site FOLDER

The documents keep their places in a copy of the tree, so their links need no change.
MkDocs refuses a page without a place in docs/mkdocs.yml, and a link or an anchor that
leads nowhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from deploy.manuals import command_reference, setting_reference
from deploy.python_reference import python_reference

ROOT: Final = Path(__file__).resolve().parents[1]
_LINK: Final = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def documents() -> list[Path]:
    """Return all documents, relative to the checkout."""
    patterns = (
        "*.md",
        "docs/**/*.md",
        "mpbroker/**/README.md",
        "tests/bench/README.md",
    )
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(path.relative_to(ROOT) for path in found)


def write_tree(folder: Path) -> None:
    """Write what the site is built of: documents, files they link to, references."""
    for name in documents():
        _copy(name, folder)
        for link in _LINK.findall((ROOT / name).read_text()):
            target = (ROOT / name).parent / link
            if target.is_file() and target.suffix != ".md":
                _copy(target.resolve().relative_to(ROOT), folder)
    (folder / "reference").mkdir()
    (folder / "reference/commands.md").write_text(command_reference())
    (folder / "reference/settings.md").write_text(setting_reference())
    (folder / "reference/python.md").write_text(python_reference())


def _copy(name: Path, folder: Path) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / name, folder / name)


def build_site(output: Path) -> None:
    """Build the site into a folder.

    Raises:
        subprocess.CalledProcessError: MkDocs has refused something, and has said what.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tree(folder / "tree")
        shutil.copy(ROOT / "docs/mkdocs.yml", folder)
        # Not --quiet: it hides warnings from the strict mode, too.
        command = [sys.executable, "-m", "mkdocs", "build", "--site-dir"]
        # Of a later MkDocs, which the version range excludes.
        environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        command.append(str(output.resolve()))
        subprocess.run(command, cwd=folder, env=environ, check=True)


if __name__ == "__main__":
    (where,) = sys.argv[1:]
    try:
        build_site(Path(where))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
