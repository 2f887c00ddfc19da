"""HostNames: find the addresses of hosts that limits name, beside the loop.

A DNS server that does not answer keeps getaddrinfo() waiting for half a minute, and the
supervisor would handle no death meanwhile. So another process looks the names up, with
a thread for each, and is killed if it takes too long. Its answers are lines of JSON in
a memfd. Until there is one, a limit is for the addresses that its name had before.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.ipc.limits_page import Address
from mpbroker.network.connection_rows import address_words

_LOG = get_logger(__name__)

# Source: resolv.conf(5): two attempts of 5 s, at each of up to three servers.
_PATIENCE_S: Final = 30.0
# A name that could not be looked up is tried again after that time.
_RETRY_S: Final = 30.0


class Loop(Protocol):
    """The part of the supervisor's loop that is needed here."""

    def fork_aside(
        self, run: Callable[[], None], ended: Callable[[int], None]
    ) -> Callable[[], None] | None:
        """Run something in a process of its own; return what kills it."""


class HostNames:
    """The addresses of the hosts that limits name.

    As in Kafka, a name is looked up when it is set.

    Attributes:
        has_news: whether addresses were found since the last call of ``addresses()``.
    """

    def __init__(self) -> None:
        self.has_news = False
        self._known: dict[str, list[Address]] = {}
        self._due: dict[str, float] = {}  # names without an answer; when to ask
        self._failed: set[str] = set()  # names whose failure the log has
        self._kill: Callable[[], None] | None = None  # ends what looks names up now
        self._give_up_at = 0.0

    def addresses(self, hosts: Collection[str]) -> dict[str, list[Address]]:
        """Return the addresses of hosts, as far as they are known; never wait.

        Args:
            hosts: all that limits name now; others are forgotten.
        """
        self.has_news = False
        numeric = {host: _numeric(host) for host in hosts}
        names = {host for host, address in numeric.items() if address is None}
        self._known = {host: self._known[host] for host in names & self._known.keys()}
        self._due = {
            host: self._due.get(host, 0.0) for host in names - self._known.keys()
        }
        self._failed &= names
        return {
            host: self._known.get(host, []) if address is None else [address]
            for host, address in numeric.items()
        }

    def look_up(self, loop: Loop) -> None:
        """Begin to look up the names that are due; end a process that hangs.

        Raises:
            OSError: EMFILE: no descriptor is free; call it again later.
        """
        now = time.monotonic()
        if self._kill is not None:
            if now > self._give_up_at:
                self._kill()
            return
        hosts = [host for host, due in self._due.items() if due <= now]
        if not hosts:
            return
        answers = os.memfd_create("mpbroker-host-names")
        self._give_up_at = now + _PATIENCE_S
        self._kill = loop.fork_aside(
            partial(_answer, hosts, answers), partial(self._ended, hosts, answers)
        )

    def _ended(self, hosts: Collection[str], answers: int, status: int) -> None:
        """Take the answers of the process; what has none is tried again later."""
        self._kill = None
        found = _read(answers)
        os.close(answers)
        for host in hosts:
            if host not in self._due:
                continue  # no limit names it any more
            answer = found.get(host, "there is no answer")
            if not isinstance(answer, str):
                del self._due[host]
                self._failed.discard(host)
                self._known[host] = answer
                self.has_news = True
                continue
            self._due[host] = time.monotonic() + _RETRY_S
            if host not in self._failed:
                self._failed.add(host)
                _LOG.warning(
                    "%s cannot be looked up (%s): a quota for it has no effect",
                    host,
                    answer,
                )


def _numeric(host: str) -> Address | None:
    """Return the address that a text is itself; None: it is a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except (OSError, ValueError):
            continue
        return address_words(family, (host, 0))[0]
    return None


def _answer(hosts: Collection[str], answers: int) -> None:
    """Look up names at the same time, in a process of its own; write what is found."""
    import json  # the supervisor itself may not need them
    import threading

    def look_up(host: str) -> None:
        found: list[Address] | str
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = [address_words(family, name)[0] for family, *_, name in infos]
        except (OSError, UnicodeError) as error:  # UnicodeError: it cannot be a name
            found = str(error)
        os.write(answers, json.dumps([host, found]).encode() + b"\n")

    # Daemons: this process ends without a look at them if it is interrupted.
    threads = [
        threading.Thread(target=look_up, args=(host,), daemon=True) for host in hosts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read(answers: int) -> Mapping[str, list[Address] | str]:
    """Return the answers that were written, by name; a text says why there is none."""
    import json

    data = os.pread(answers, os.fstat(answers).st_size, 0)
    whole = data[: data.rfind(b"\n") + 1].splitlines()  # it may have been killed
    return {
        host: found if isinstance(found, str) else [(high, low) for high, low in found]
        for host, found in map(json.loads, whole)
    }
