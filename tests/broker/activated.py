"""Run mpbroker as systemd's socket activation does: descriptors from 3 on, and names.

python -m tests.broker.activated NAME=FD[,NAME=FD...] ARGUMENT...
"""

import fcntl
import os
import sys

passed, *arguments = sys.argv[1:]
# Away from where they go first, so that none is overwritten before it is moved. What
# `--ready-fd` names is open too, and stays where it is.
pairs = [pair.rpartition("=")[::2] for pair in passed.split(",") if pair]
moved = [(name, fcntl.fcntl(int(fd), fcntl.F_DUPFD, 100)) for name, fd in pairs]
ready = arguments.index("--ready-fd") + 1
arguments[ready] = str(fcntl.fcntl(int(arguments[ready]), fcntl.F_DUPFD, 100))
for number, (_, fd) in enumerate(moved):
    os.dup2(fd, 3 + number)
os.environ |= {
    "LISTEN_PID": str(os.getpid()),
    "LISTEN_FDS": str(len(moved)),
    "LISTEN_FDNAMES": ":".join(name for name, _ in moved),
}
os.execv(sys.executable, [sys.executable, "-m", "mpbroker", *arguments])
