"""Ports that stay free while nobody listens: for brokers that come back."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

_LOWEST: Final = 20_000
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES: Final = 1000


def reusable_port() -> int:
    """Return a free port of loopback that the kernel gives to nobody by itself.

    One that port 0 gave may be another's as soon as nobody listens there: a test's
    beside this one, or a client's that dials it just then.

    Source: ip(7), ip_local_port_range.
    """
    highest = int(_EPHEMERAL.read_text().split()[0]) - 1
    for _ in range(_TRIES):
        # Not the seeded generator: tests that run side by side would choose alike.
        port = random.SystemRandom().randint(_LOWEST, highest)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port from {_LOWEST} to {highest}")
