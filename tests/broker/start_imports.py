"""A broker that writes down what had been imported when it forked each child, until it
says that it is ready: on a slow machine it may have to fork others soon after.

python -m tests.broker.start_imports FILE serve ...
"""

from __future__ import annotations

import os
import sys

_fork, _write = os.fork, os.write


def main() -> int:
    fd = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ready_fd = int(sys.argv[sys.argv.index("--ready-fd") + 1])
    broker = os.getpid()

    def fork() -> int:
        if os.fork is fork and os.getpid() == broker:
            _write(fd, " ".join(sys.modules).encode() + b"\n")
        return _fork()

    def write(to: int, data: bytes) -> int:
        if to == ready_fd:
            os.fork, os.write = _fork, _write
        return _write(to, data)

    os.fork, os.write = fork, write
    from mpbroker.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
