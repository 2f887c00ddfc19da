"""systemd, the service manager: the sockets that it passes, the states that we send.

No library is used: the protocol is datagrams of ``NAME=value`` lines to a Unix socket.

Source: sd_notify(3), sd_listen_fds(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Final

from mpbroker.base.config_def import ConfigError
from mpbroker.base.named_tuple import NamedTuple

_FIRST_FD: Final = 3  # SD_LISTEN_FDS_START
# A manager that does not read for this long seems to hang, and is not waited for.
_PATIENCE_S: Final = 1.0
_USEC: Final = 1_000_000


class ServiceManager:
    """Sends the broker's states to the service manager; without one, drops them.

    The environment variable NOTIFY_SOCKET names the manager's socket.

    No call waits longer than a second, and a missing manager is not an error: a broker
    must not fail or hang because its manager does.

    Attributes:
        watchdog_s: WATCHDOG=1 is expected at least this often; 0.0: there is no
            watchdog.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _socket_address(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog_s = _watchdog_s(environ) if self.is_there else 0.0

    @property
    def is_there(self) -> bool:
        """Whether there is a service manager that receives the broker's states."""
        return self._address is not None

    def tell(self, *states: str, fds: Sequence[int] = (), wait: bool = False) -> bool:
        """Send systemd states such as ``READY=1``; return whether they were sent.

        Args:
            states: sent in one datagram, so that they are seen together.
            fds: descriptors to send with them; the manager receives duplicates.
            wait: whether to wait up to a second while the manager is behind; needless
                for states that are repeated soon.
        """
        if self._address is None:
            return False
        message = "\n".join(states).encode()
        rights = []
        if fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        with (
            contextlib.suppress(OSError),
            socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
            ) as sock,
        ):
            sock.settimeout(_PATIENCE_S if wait else 0.0)
            sock.sendmsg([message], rights, socket.MSG_NOSIGNAL, self._address)
            return True
        return False

    def reloading(self) -> None:
        """Tell the service manager that a reload begins; READY=1 ends it."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.tell("RELOADING=1", f"MONOTONIC_USEC={now_us}", wait=True)

    def extend_timeout(self, seconds: float, *states: str) -> None:
        """Ask the service manager to wait this many seconds more, from now on."""
        self.tell(f"EXTEND_TIMEOUT_USEC={int(seconds * _USEC)}", *states)

    def keep(self, name: str, fd: int) -> bool:
        """Leave a duplicate of a descriptor with the service manager.

        The next broker gets it. A socket that is left again is stored once.
        """
        return self.tell("FDSTORE=1", f"FDNAME={name}", fds=[fd], wait=True)

    def forget(self, name: str) -> bool:
        """Have the service manager drop the descriptors of this name that it keeps."""
        return self.tell("FDSTOREREMOVE=1", f"FDNAME={name}", wait=True)


def _socket_address(text: str) -> str | None:
    """Return the address of a socket's path, or of an abstract socket (@NAME).

    None: the text is neither.
    """
    if text.startswith("@"):
        return "\0" + text[1:]
    return text if text.startswith("/") else None


def _watchdog_s(environ: Mapping[str, str]) -> float:
    # Any process may have inherited the variables from the service's main process: the
    # process id in WATCHDOG_PID says which one is meant.
    pid = environ.get("WATCHDOG_PID", "")
    text = environ.get("WATCHDOG_USEC", "")
    if (pid and pid != str(os.getpid())) or not (text.isascii() and text.isdigit()):
        return 0.0
    return int(text) / _USEC


class InheritedSocket(NamedTuple):
    """A listening socket that the service manager passed, with its name."""

    name: str  # FileDescriptorName= of a socket unit, or FDNAME= of our own store
    sock: socket.socket


def take_inherited_sockets(
    environ: MutableMapping[str, str] = os.environ,
) -> list[InheritedSocket]:
    """Return the sockets passed by LISTEN_FDS; the caller closes them.

    The variables are removed, so that no process that we start applies them to itself.

    Raises:
        ConfigError: a descriptor is not a listening socket, or not open.
    """
    pid = environ.pop("LISTEN_PID", "")
    count = environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not (count.isascii() and count.isdigit()):
        return []
    # Bounded by the descriptors that can be open, not by the variable's number.
    end = _FIRST_FD + min(int(count), os.sysconf("SC_OPEN_MAX"))
    taken: list[InheritedSocket] = []
    try:
        for number, fd in enumerate(range(_FIRST_FD, end)):
            name = names[number] if number < len(names) else ""
            taken.append(InheritedSocket(name, listening_socket(fd, name)))
    except BaseException:
        for each in taken:
            each.sock.close()
        raise
    return taken


def listening_socket(fd: int, name: str) -> socket.socket:
    told = f"socket activation: descriptor {fd} ({name or 'without a name'})"
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError(f"{told} is not a socket: {error.strerror}") from None
    os.set_inheritable(fd, False)
    sock.setblocking(False)
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    if sock.family in families and sock.type == socket.SOCK_STREAM:
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return sock
        reason = "does not listen; a socket unit for mpbroker says Accept=no"
    else:
        reason = (
            "is no stream socket of TCP or Unix; a socket unit for mpbroker says"
            " ListenStream="
        )
    sock.close()
    raise ConfigError(f"{told} {reason}")
