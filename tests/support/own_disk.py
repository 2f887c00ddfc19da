"""File systems of a test's own: one that is small, and one that hangs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_IMAGE_BYTES: Final = 64 << 20


@contextlib.contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of this size; skip the test where that is not permitted."""
    with _mounted(path, "-t", "tmpfs", "-o", f"size={size_bytes}", "none"):
        yield path


def resize(disk: Path, size_bytes: int) -> None:
    """Give a small disk another size."""
    subprocess.run(["mount", "-o", f"remount,size={size_bytes}", disk], check=True)


@contextlib.contextmanager
def freezable_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system in a folder; skip the test where that is not to be had."""
    for command in ("mkfs.ext4", "fsfreeze"):
        if shutil.which(command) is None:
            pytest.skip(f"there is no {command}")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    with _mounted(folder / "disk", "-o", "loop", str(image)) as path:
        yield path


@contextlib.contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """Let every call that writes to a freezable disk wait until the end."""
    subprocess.run(["fsfreeze", "-f", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", disk], check=True)


@contextlib.contextmanager
def _mounted(path: Path, *arguments: str) -> Iterator[Path]:
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("only root can mount a disk of a test's own")
    path.mkdir()
    command = ["mount", *arguments, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a disk of a test's own: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
