"""What a broker's processes have open, to be compared with a fresh broker's."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from typing import Final

from tests.bench.processes import title_of
from tests.support.broker import Broker
from tests.support.footprint import Footprint, open_files

_TITLE: Final = "mpbroker: "  # of every child that has begun
_UNTITLED: Final = "a process that has just been forked, or runs something aside"
_SETTLED_S: Final = 1.0
CLEANER: Final = "kafka-log-cleaner-thread"
_NUMBER = re.compile(r"\d+")
_LAST_NUMBER = re.compile(r"-\d+$")
_NAMED = re.compile(r"^(/dev/shm/mpbroker)-\d+-\d+")


def census(broker: Broker) -> dict[str, Counter[str]]:
    """Open descriptors by role, each as what it is, and the names in /dev/shm.

    Files of logs are left out: which of them a process has touched is chance. None may
    be there twice, or be deleted, which ``excess_files`` looks for.
    """
    found: dict[str, Counter[str]] = {}
    for pid in broker.processes():
        opened = Counter(
            _kind(target)
            for target in open_files(pid)
            if not target.startswith(str(broker.data_dir))
        )
        # Without its number: who replaces another may have another.
        role = _LAST_NUMBER.sub("", role_of(pid, broker))
        found.setdefault(role, Counter()).update(opened + Counter(["processes"]))
    found["names"] = Counter(
        _kind(name) for name in Footprint.of_session(broker.pid).shared_memory
    )
    return found


def settled_census(broker: Broker) -> dict[str, Counter[str]]:
    """The census, once it has stayed the same for a while: all have started."""
    before = census(broker)
    while True:
        time.sleep(_SETTLED_S)
        now = census(broker)
        if now == before and _UNTITLED not in now:
            return now
        before = now


def role_of(pid: int, broker: Broker) -> str:
    if pid == broker.pid:
        return "supervisor"
    title = title_of(pid)
    return title.removeprefix(_TITLE) if title.startswith(_TITLE) else _UNTITLED


def excess_files(broker: Broker) -> list[str]:
    """Log files that a process has open more than once, or after their removal.

    A log's active segment is open once to read and once to write, at most; of the
    directories each log opens its own.
    """
    found = []
    for pid in broker.processes():
        files = Counter(
            target
            for target in open_files(pid)
            if target.startswith(str(broker.data_dir)) and not os.path.isdir(target)
        )
        for target, count in files.items():
            if count > 2 or target.endswith(" (deleted)"):
                found.append(f"{role_of(pid, broker)}: {target} x {count}")
    return found


def differences(
    fresh: dict[str, Counter[str]], now: dict[str, Counter[str]]
) -> list[str]:
    """What is there now and was not, or was and is not."""
    found = []
    for process in sorted(fresh.keys() | now.keys()):
        before, after = fresh.get(process, Counter()), now.get(process, Counter())
        found += [f"{process}: {n} more {what}" for what, n in (after - before).items()]
        found += [f"{process}: {n} less {what}" for what, n in (before - after).items()]
    return found


def _kind(target: str) -> str:
    """What it is, without the numbers that differ from one broker to the next."""
    target = _NAMED.sub(r"\1", target)
    if target.startswith(("socket:", "pipe:", "anon_inode:")):
        return _NUMBER.sub("", target)
    return target
