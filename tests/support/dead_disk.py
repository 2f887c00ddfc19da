"""A disk that fails as a whole, and comes back: one of a broker's log directories."""

from __future__ import annotations

from pathlib import Path


def kill_disk(directory: Path) -> None:
    """Have all system calls below a log directory fail: by ELOOP, in life by EIO."""
    directory.rename(f"{directory}.away")
    directory.symlink_to(directory)


def revive_disk(directory: Path) -> None:
    directory.unlink()
    Path(f"{directory}.away").rename(directory)
