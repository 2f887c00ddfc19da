"""Compose one broker: build every role from the configuration and run it."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

from mpbroker.supervisor import TAKEOVER_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

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
        ready_fd: receives one line of JSON when the broker serves, and is closed.
        daemon: go to the background; the caller returns once the broker serves.
        pid_file: receives the supervisor's process id.

    Raises:
        MpbrokerError: the broker cannot start; nothing is left behind.
    """
    gc.disable()  # until the start has imported and made everything; see _freeze()
    from mpbroker.broker.broker import Broker

    # A program that takes over runs in the process of the one before it, which is in
    # the background already if that was asked for.
    if daemon and TAKEOVER_VARIABLE not in os.environ:
        from mpbroker.broker.daemon import serve_as_daemon

        return serve_as_daemon(config, ready_fd=ready_fd, pid_file=pid_file)
    return Broker(config).serve(ready_fd=ready_fd, pid_file=pid_file)
