"""Go to the background, and tell the caller when the broker serves.

Source: daemon(7), "SysV Daemons".
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mpbroker.base.errors import MpbrokerError

if TYPE_CHECKING:
    from mpbroker.config import BrokerConfig

_LOG_NAME: Final = "mpbroker.log"


def serve_as_daemon(
    config: BrokerConfig, *, ready_fd: int | None, pid_file: Path | None
) -> int:
    """Fork a broker into the background; return 0 once it serves, 1 if it cannot start.

    The broker's log goes to ``mpbroker.log`` in its first data directory. The caller
    prints the reason of a failed start to its own standard error as well. The broker
    keeps none of the caller's descriptors open: a program that reads the caller's
    output to its end does not wait for the broker's end.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        return _await_broker(reader, ready_fd)
    os.close(reader)
    if ready_fd is not None:
        os.close(ready_fd)
    os.setsid()
    if os.fork():
        os._exit(0)
    os._exit(_serve_detached(config, writer, pid_file))


def _await_broker(reader: int, ready_fd: int | None) -> int:
    with os.fdopen(reader, "rb") as pipe:
        # One line, not to the end: the broker's children inherit the other end.
        line = pipe.readline()
        if not line.startswith(b"{"):
            reason = (line + pipe.read()).decode(errors="replace").rstrip()
            print(reason or "mpbroker: the broker died", file=sys.stderr)
            return 1
    if ready_fd is not None:
        os.write(ready_fd, line)
        os.close(ready_fd)
    return 0


def _serve_detached(config: BrokerConfig, writer: int, pid_file: Path | None) -> int:
    from mpbroker.broker.broker import Broker

    try:
        directory = Path(config.log_dirs[0])
        directory.mkdir(parents=True, exist_ok=True)
        log = os.open(
            directory / _LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640
        )
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        return Broker(config).serve(ready_fd=writer, pid_file=pid_file)
    except (MpbrokerError, OSError) as error:
        os.write(writer, f"mpbroker: {error}\n".encode())
        print(f"mpbroker: {error}", file=sys.stderr)
        return 1
