"""End brokers and remove directories that a killed pytest process leaves behind.

The plug-in runs this as a process in a session of its own; it needs the standard
library alone. It reads lines from its standard input: `broker PID` and `directory PATH`
name something that exists, `-broker PID` and `-directory PATH` something that is gone.
The input ends whenever pytest ends, killed or not. Then the process ends all brokers
that are left, and removes the directories.
"""

import glob
import os
import select
import shutil
import signal
import sys
import time

STOP_TIMEOUT_S = 10.0


def remove_shared_memory(pid: int) -> None:
    """Remove a dead broker's shared memory; see `mpbroker.ipc.named_segment`.

    Args:
        pid: the process id of the broker's first process.
    """
    for path in glob.glob(f"/dev/shm/mpbroker-{pid}-*"):
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass


def _end(brokers: "dict[int, int]") -> None:
    """End brokers by SIGTERM, and by SIGKILL after 10 s.

    Args:
        brokers: the pidfd (file descriptor) of each broker, by its process id; those
            that have ended are removed.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        for descriptor in brokers.values():
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + STOP_TIMEOUT_S
        left = dict(brokers)
        for pid, descriptor in left.items():
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                remove_shared_memory(pid)
                del brokers[pid]
        if not brokers:
            return


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    brokers: dict[int, int] = {}
    directories: dict[str, None] = {}
    for line in sys.stdin:
        what, _, name = line.rstrip("\n").partition(" ")
        if what == "broker":
            try:
                brokers[int(name)] = os.pidfd_open(int(name))
            except ProcessLookupError:
                remove_shared_memory(int(name))
        elif what == "-broker":
            descriptor = brokers.pop(int(name), -1)
            if descriptor >= 0:
                os.close(descriptor)
        elif what == "directory":
            directories[name] = None
        else:
            directories.pop(name, None)
    _end(brokers)
    for path in directories:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
