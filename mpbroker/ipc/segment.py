"""Anonymous shared memory: memfd segments, mapped once and inherited by fork.

Source: memfd_create(2), mmap(2).
"""

import ctypes
import errno
import fcntl
import mmap
import os
import sys
from typing import Final

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FALLOC_FL_KEEP_SIZE: Final = 1
FALLOC_FL_PUNCH_HOLE: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Segment:
    """A segment of anonymous shared memory: a sealed memfd and its one mapping.

    It is sparse: a page costs memory once it has been touched. It has no name, so no
    death leaves anything behind, and the size of /dev/shm does not matter.

    Attributes:
        view: the bytes.
        words: the same memory as signed 8-byte native words. Every shared word is
            read and written through this.
        address: address of the mapping, for ctypes.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.view = memoryview(self._map)
        self.words = self.view.cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, name: str, size_bytes: int) -> "Segment":
        """Make a zeroed segment; its size can never change afterwards.

        Raises:
            OSError: EMFILE, ENOMEM, or EFBIG when RLIMIT_FSIZE is below its size.
        """
        if size_bytes > sys.maxsize:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise

    def give_back(self, offset: int, length: int) -> None:
        """Return the whole pages in a range to the kernel; then they read as zeros.

        Args:
            offset: where the range begins, in bytes.
            length: bytes.
        """
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            flags = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
            _fallocate(self.fd, flags, start, end - start)
