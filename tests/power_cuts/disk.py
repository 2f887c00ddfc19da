"""A disk whose power can be cut: ext4 in a file, in a private mount namespace.

The cut is ext4's own EXT4_IOC_SHUTDOWN without a flush of the journal. From then on
every call fails with EIO, and the next mount finds what was forced to disk, and what
the kernel happened to write: options keep it from writing by itself. The image lies on
a tmpfs, so neither the machine's disk nor its page cache plays a part.

Source: Linux's fs/ext4/ioctl.c, ext4(5); generic/04x of xfstests use it like this.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

_EXT4_IOC_SHUTDOWN: Final = 0x8004_587D  # _IOR('X', 125, __u32)
_NOLOGFLUSH: Final = 2
_CLONE_NEWNS: Final = 0x0002_0000
_IMAGE_BYTES: Final = 192 << 20
# The journal is written by itself after 5 min and not 5 s; a file that is renamed over
# another one is not forced to disk by ext4 in the place of its owner.
_OPTIONS: Final = "loop,commit=300,noauto_da_alloc"
_BUSY_S: Final = 60.0


class NoDiskError(Exception):
    """This machine does not let this process have a disk of its own."""


def enter_private_mounts() -> None:
    """Move this process to a mount namespace of its own; its mounts end with it.

    Raises:
        NoDiskError: it is not permitted here.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise NoDiskError(f"unshare: {os.strerror(ctypes.get_errno())}")
    _run("mount", "--make-rprivate", "/")


def _run(*command: str | Path) -> None:
    if shutil.which(command[0]) is None:
        raise NoDiskError(f"there is no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoDiskError(f"{command[0]}: {done.stderr.strip()}")


class Disk:
    """One ext4 file system, mounted at ``path`` while it has power.

    Attributes:
        path: where it is mounted.
        kind: what kind of ext4 it is.

    Args:
        folder: a directory; a tmpfs is mounted over it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._image = folder / "image"
        self.path = folder / "disk"
        self._fd = -1
        self._options = ""
        self.kind = ""
        _run("mount", "-t", "tmpfs", "none", folder)
        self.path.mkdir()

    def make(self, chance: random.Random, *, fast_commit: bool = False) -> None:
        """Make a new, empty file system, with a random mode of data, and mount it.

        Args:
            fast_commit: an option that mkfs leaves off: an fsync stores its own file,
                and not all others as well.
        """
        self._unmount()
        self._image.unlink(missing_ok=True)
        with self._image.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        features = ("-O", "fast_commit") if fast_commit else ()
        _run("mkfs.ext4", "-q", "-F", "-b", "4096", *features, self._image)
        data = chance.choice(["ordered", "writeback"])
        self._options = f"{_OPTIONS},data={data}"
        self.kind = " ".join((*features, f"data={data}"))
        self._mount()

    def cut(self) -> None:
        """Cut the power: forget all that was not forced to disk."""
        fcntl.ioctl(self._fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NOLOGFLUSH))

    def restore(self) -> None:
        """Mount it again. No process uses it any more."""
        self._unmount()
        self._mount()

    def close(self) -> None:
        self._unmount()
        _run("umount", self._folder)

    def _mount(self) -> None:
        _run("mount", "-o", self._options, self._image, self.path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _unmount(self) -> None:
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                _run("umount", self.path)
            except NoDiskError:
                # The last descriptor of a killed process, or its io_uring, goes later.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return


def why_not() -> str | None:
    """Return why no power can be cut here; None: it can.

    The attempt is made in a child: this process keeps its mounts.
    """
    read, write = os.pipe()
    if not (pid := os.fork()):
        folder = Path(tempfile.mkdtemp(prefix="power-cut-"))
        text = ""
        try:
            enter_private_mounts()
            disk = Disk(folder)
            disk.make(random.Random(0))
            disk.cut()
            disk.restore()
            disk.close()
        except (NoDiskError, OSError) as error:
            text = str(error) or repr(error)
        with contextlib.suppress(OSError):
            folder.rmdir()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        said = file.read().decode()
    os.waitpid(pid, 0)
    return said or None
