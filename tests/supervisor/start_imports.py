"""A broker that writes down what had been imported when it forked each child.

python -m tests.supervisor.start_imports FILE serve ...
"""

from __future__ import annotations

import os
import sys

_fork = os.fork


def main() -> int:
    fd = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def fork() -> int:
        os.write(fd, " ".join(sys.modules).encode() + b"\n")
        return _fork()

    os.fork = fork
    from mpbroker.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
