"""Read the state of a process from /proc.

Source: proc_pid_stat(5), field 3; proc_pid_syscall(5).
"""

from __future__ import annotations

import os
from typing import Final

# A process that sleeps in one of these system calls waits for a file system whose waits
# can be interrupted (NFS, FUSE). By number, as the kernel shows them.
_DISK_CALLS: Final = {
    # read, write, open, fsync, fdatasync, pread64, pwrite64, preadv, pwritev, openat...
    "x86_64": {"0", "1", "2", "74", "75", "76", "77", "17", "18", "40", "82", "87"}
    | {"257", "285", "295", "296", "263", "264"},
    "aarch64": {"63", "64", "82", "83", "46", "67", "68", "69", "70", "71", "56"}
    | {"47", "35", "38", "276"},
}
_DISK: Final = _DISK_CALLS.get(os.uname().machine, set())


def process_state(pid: int, proc: str = "/proc") -> str:
    """Return the letter of a process's state: T is stopped, D waits for a device.

    Returns:
        "" if there is no such process, or no descriptor left to read /proc.
    """
    try:
        # open() would make twice as many system calls, and leases look often.
        fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The command's name, in parentheses, may contain anything.
            return os.read(fd, 4096).rpartition(b")")[2].split()[0].decode()
        finally:
            os.close(fd)
    except OSError:
        return ""


def children_of(pid: int, proc: str = "/proc") -> list[int]:
    """Return the ids of a process's children, if it has one thread.

    Returns:
        [] if there is no such process, or the kernel does not tell.

    Source: proc_pid_task(5), children.
    """
    try:
        with open(f"{proc}/{pid}/task/{pid}/children", encoding="ascii") as file:
            return list(map(int, file.read().split()))
    except OSError:
        return []


def is_running(pid: int) -> bool:
    """Whether there is a process with this id that has not ended."""
    return process_state(pid) not in ("", "Z", "X")


def waits_for_disk(pid: int) -> bool:
    """Whether a process sleeps for a device, or in a system call on files."""
    return process_state(pid) == "D" or _waits_in_file_call(pid)


def _waits_in_file_call(pid: int) -> bool:
    """Whether a process sleeps in a system call on files; False: /proc is hidden."""
    try:
        with open(f"/proc/{pid}/syscall") as file:
            return file.read().partition(" ")[0] in _DISK
    except OSError:
        return False
