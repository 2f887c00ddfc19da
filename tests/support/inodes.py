"""Replace a file by another one that has its inode number, as chance does seldom."""

from __future__ import annotations

from pathlib import Path

import pytest

_TRIES = 200  # meanwhile other processes may make files, too


def replace_with_same_inode(path: Path, content: bytes) -> None:
    """Remove a file that nobody has open, and make one of the same name and inode.

    The calling test is skipped where the file system uses no inode number again, such
    as tmpfs.
    """
    inode = path.stat().st_ino
    path.unlink()
    made = []
    for number in range(_TRIES):
        made.append(path.with_name(f"{path.name}.{number}"))
        made[-1].write_bytes(content)
        if made[-1].stat().st_ino == inode:
            made.pop().rename(path)
            break
    for other in made:
        other.unlink()
    if not path.exists():
        pytest.skip("this file system does not use inode numbers again")
