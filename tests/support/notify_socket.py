"""The other end of sd_notify(3): what systemd would have heard."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.support.patience import LONGEST_S

_MAX_FDS: Final = 8


class NotifySocket:
    """A bound notify socket, and all that has been read from it.

    Attributes:
        address: for NOTIFY_SOCKET.
        heard: every message, as states by name; in order.
        stored: descriptors by FDNAME, as systemd's store would hold them.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Bind to a file, or to a name in the abstract name space if there is none."""
        self.address = str(path) if path else f"@mpbroker-test-{os.getpid()}-{id(self)}"
        self.heard: list[dict[str, str]] = []
        self.stored: dict[str, int] = {}
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + self.address[1:] if path is None else self.address)

    def close(self) -> None:
        self._sock.close()
        for fd in self.stored.values():
            os.close(fd)
        self.stored.clear()

    def __enter__(self) -> NotifySocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self, timeout_s: float = LONGEST_S) -> dict[str, str]:
        """The next message; acts on it as systemd would.

        Raises:
            TimeoutError: there is none in time.
        """
        # Not select(): the tests before may have left a thousand descriptors in use.
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise TimeoutError(f"no state within {timeout_s} s; heard: {self.heard}")
        message, fds, _, _ = socket.recv_fds(self._sock, 4096, _MAX_FDS)
        states = dict(line.split("=", 1) for line in message.decode().split("\n"))
        self.heard.append(states)
        name = states.get("FDNAME", "")
        if states.get("FDSTORE") == "1":
            assert len(fds) == 1 and name
            old = self.stored.get(name)
            self.stored[name] = fds.pop()
            if old is not None:
                os.close(old)
        elif states.get("FDSTOREREMOVE") == "1" and name in self.stored:
            os.close(self.stored.pop(name))
        for fd in fds:
            os.close(fd)
        return states

    def wait_for(
        self, wanted: Callable[[dict[str, str]], object], timeout_s: float = LONGEST_S
    ) -> dict[str, str]:
        """Read until a message has what is wanted; return that message.

        Raises:
            TimeoutError: it does not come in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.next(max(0.0, deadline - time.monotonic()))
            if wanted(states):
                return states

    def drain(self) -> list[dict[str, str]]:
        """Read what is there already, and return it."""
        got = []
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while poll.poll(0):
            got.append(self.next())
        return got
