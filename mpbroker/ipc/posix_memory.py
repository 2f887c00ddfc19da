"""Open and remove POSIX shared memory by its name.

posix_ipc does it. It has no wheels for CPython 3.14: there a file in /dev/shm is
opened, as shm_open(3) of glibc does it.

Source: shm_open(3); shm_overview(7).
"""

import errno
import os
from typing import Final

try:
    import posix_ipc
except ImportError:
    posix_ipc = None

DIRECTORY: Final = "/dev/shm"
_MODE: Final = 0o640


def create(name: str) -> int:
    """Make an empty segment of shared memory with a name; return its descriptor.

    Raises:
        OSError: FileExistsError and PermissionError among others.
    """
    if posix_ipc is None:
        return _open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=_MODE, size=0)
    except posix_ipc.Error as error:  # this class is no OSError
        raise _as_os_error(name, error, errno.EEXIST) from error
    return int(made.fd)


def attach(name: str) -> int:
    """Open a named segment of shared memory for reading; return its descriptor.

    Raises:
        OSError: FileNotFoundError and PermissionError among others; ELOOP if the name
            is a symbolic link, which another user may have made.
    """
    if posix_ipc is None:
        return _open(name, os.O_RDONLY)
    try:
        return int(posix_ipc.SharedMemory(name, read_only=True).fd)
    except posix_ipc.Error as error:
        raise _as_os_error(name, error, errno.ENOENT) from error


def remove(name: str) -> None:
    """Remove the name of a segment of shared memory.

    Raises:
        OSError: FileNotFoundError and PermissionError among others.
    """
    if posix_ipc is None:
        os.unlink(DIRECTORY + name)
        return
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.Error as error:
        raise _as_os_error(name, error, errno.ENOENT) from error


def _open(name: str, flags: int) -> int:
    # Others may write there, too: their links are not followed.
    return os.open(DIRECTORY + name, flags | os.O_NOFOLLOW, mode=_MODE)


def _as_os_error(name: str, error: Exception, existential: int) -> OSError:
    """Return the OSError that stands for an error of posix_ipc.

    Args:
        name: the name of the segment.
        error: the error of posix_ipc.
        existential: the errno if the error is an ExistentialError.
    """
    denied = isinstance(error, posix_ipc.PermissionsError)
    number = errno.EACCES if denied else existential
    return OSError(number, os.strerror(number), DIRECTORY + name)
