"""HostLookups: find out which hosts have no address, and never wait for long.

A DNS server that does not answer keeps getaddrinfo() waiting for half a minute, and a
handler would answer no other client meanwhile. So a thread looks names up, and the
handler waits for it for a second at most. A name that has no answer by then is taken
for a host. The supervisor looks it up again when a quota names it, and logs a warning
if it has no address (supervisor/host_names.py).

As long as a thread waits for a silent server, other names are not looked up at all. So
such a server costs a handler one second in half a minute, whatever clients ask for.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from threading import Thread

_PATIENCE_S: Final = 1.0
# Source: RFC 1123, 2.1; underscores are common, too.
_HOST_NAME: Final = re.compile(rb"(?=.{1,254}\Z)[\w-]{1,63}(\.[\w-]{1,63})*\.?")


class HostLookups:
    """Looks up the hosts that requests to one handler name.

    Args:
        patience_s: for how many seconds a call may wait.
    """

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._thread: Thread | None = None

    def unknown(self, hosts: Iterable[str]) -> Collection[str]:
        """Return those texts that are neither an IP address nor a host with an address.

        A name is not among them if it was not found out in time.
        """
        names = {host for host in hosts if not _is_numeric(host)}
        unknown = [host for host in names if not _may_be_name(host)]
        names.difference_update(unknown)
        if names and (self._thread is None or not self._thread.is_alive()):
            from threading import Thread  # most handlers never need one

            # A daemon: the process ends without a look at it.
            self._thread = Thread(target=_look_up, args=(names, unknown), daemon=True)
            self._thread.start()
            self._thread.join(self._patience_s)
        return tuple(unknown)  # the thread may still add to the list


def _look_up(names: Iterable[str], unknown: list[str]) -> None:
    for name in names:
        try:
            socket.getaddrinfo(name, None)
        except (OSError, ValueError):
            unknown.append(name)


def _is_numeric(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, ValueError):
        return False
    return True


def _may_be_name(host: str) -> bool:
    try:
        return _HOST_NAME.fullmatch(host.encode("idna")) is not None
    except ValueError:  # UnicodeError is one
        return False
