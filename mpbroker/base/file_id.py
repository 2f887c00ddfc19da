"""Identify an open file by a number that no later file is given.

A file system gives the inode number of a removed file to the next new one: ext4 does so
at once. The generation, which it chooses anew for each file, tells the two apart. Where
there is none, as in tmpfs, the inode number must do; tmpfs uses none again.

Source: ioctl_iflags(2) and linux/fs.h, FS_IOC_GETVERSION.
"""

from __future__ import annotations

import os
from fcntl import ioctl
from typing import Final

# _IOR('v', 1, long); the kernel stores an int of 32 bits.
_GET_GENERATION: Final = 0x80087601
_GENERATION_SHIFT: Final = 31  # the number has 63 bits, and fits a word


def file_id(fd: int) -> int:
    """Return the number that identifies an open file.

    Raises:
        OSError: the descriptor is not open.
    """
    return os.fstat(fd).st_ino ^ _generation(fd) << _GENERATION_SHIFT


def has_id(fd: int, number: int) -> bool:
    """Return whether an open file is the one that had this number.

    A broker with shared memory of layout 10 or before, from which this one may have
    taken over, has used the inode number alone. It is accepted, too.
    """
    return number in (file_id(fd), os.fstat(fd).st_ino)


def _generation(fd: int) -> int:
    try:
        return int.from_bytes(ioctl(fd, _GET_GENERATION, bytes(8))[:4], "little")
    except OSError:
        return 0  # this file system has none
