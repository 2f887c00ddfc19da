"""A disk that hangs: a file system of our own that can be frozen for a while."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def freezable_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system in a folder; skip the test where that is not to be had."""
    if os.geteuid() or not all(map(shutil.which, ("mkfs.ext4", "fsfreeze"))):
        pytest.skip("only root can freeze a file system")
    image, path = folder / "image", folder / "disk"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a disk of our own: {mounted.stderr.decode()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """Let every call that writes to the file system wait until the end."""
    subprocess.run(["fsfreeze", "-f", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", disk], check=True)
