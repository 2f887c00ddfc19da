"""The parent process of a broker: it builds everything below, and serves no client."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpbroker.config import BrokerConfig


def serve(
    config: BrokerConfig,
    *,
    ready_fd: int | None = None,
    daemon: bool = False,
    pid_file: Path | None = None,
) -> int:
    """Run a broker to its end; return the exit code.

    Args:
        config: the settings.
        ready_fd: gets one line of JSON when every process serves, and is closed.
        daemon: go to the background; the caller returns once the broker serves.
        pid_file: gets the supervisor's process id.

    Raises:
        MpbrokerError: it cannot start; nothing is left behind.
    """
    gc.disable()  # until all is imported and made, and then frozen
    from mpbroker.supervisor.broker import Broker
    from mpbroker.supervisor.daemon import serve_as_daemon
    from mpbroker.supervisor.takeover import is_taking_over

    # A program that takes over from another is a daemon already, if that was one.
    if daemon and not is_taking_over():
        return serve_as_daemon(config, ready_fd=ready_fd, pid_file=pid_file)
    return Broker(config).serve(ready_fd=ready_fd, pid_file=pid_file)
