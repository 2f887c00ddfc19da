"""Force the names in a directory to disk."""

import os


def sync_directory(directory: str) -> None:
    """Force the names in a directory (creations, renames, removals) to disk.

    Raises:
        OSError: the directory cannot be opened, or the disk failed.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
