"""Read the state of a process from /proc.

Source: proc_pid_stat(5), field 3.
"""

from __future__ import annotations

import os


def process_state(pid: int, proc: str = "/proc") -> str:
    """Return the letter of a process's state: T is stopped, D waits for a device.

    Returns:
        "" if there is no such process, or no descriptor left to look with.
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


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    return process_state(pid) not in ("", "Z", "X")
