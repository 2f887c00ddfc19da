"""What a process tree holds in the system, and what of it is still there afterwards."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_SHM: Final = "/dev/shm/"
# Linux writes this behind the path of a mapped or open file that has lost its name.
_DELETED: Final = " (deleted)"


def session_processes(session: int) -> dict[int, str]:
    """Return the living processes of a session: a name by process id."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            # Asked first: to read about all processes of a machine takes ten times so
            # long.
            if os.getsid(int(entry)) != session:
                continue
            stat = Path("/proc", entry, "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # pid (name) state ...; the name may hold anything.
        name, _, rest = stat.partition("(")[2].rpartition(")")
        if rest.split()[0] != "Z":  # zombies are init's to reap
            found[int(entry)] = name
    return found


@dataclass
class Footprint:
    """Names that a process tree put where they outlive it."""

    shared_memory: set[str] = field(default_factory=set)
    socket_files: set[str] = field(default_factory=set)

    @classmethod
    def of_session(cls, session: int) -> Footprint:
        """Look at what the processes of a session map, open and listen on."""
        print_ = cls()
        inodes: set[str] = set()
        for pid in session_processes(session):
            print_.shared_memory.update(_mapped_names(pid))
            for target in open_files(pid):
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
                elif _is_name(target):
                    print_.shared_memory.add(target)
        print_.socket_files = _socket_paths(inodes)
        return print_

    def left_behind(self) -> list[str]:
        """Return the names that still exist."""
        names = self.shared_memory | self.socket_files
        return sorted(name for name in names if os.path.lexists(name))


def _mapped_names(pid: int) -> set[str]:
    try:
        maps = Path("/proc", str(pid), "maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    lines = (line for line in maps.splitlines() if _SHM in line)
    names = ("".join(line.partition("/")[1:]) for line in lines)
    return {name for name in names if _is_name(name)}


def _is_name(path: str) -> bool:
    """A name of shared memory; what lies in folders beside them is somebody's files."""
    name = path.removeprefix(_SHM)
    return name != path and "/" not in name and not name.endswith(_DELETED)


def open_files(pid: int) -> list[str]:
    """What its descriptors are; nothing if it has ended, or is somebody else's."""
    folder = f"/proc/{pid}/fd"
    targets = []
    try:
        for fd in os.listdir(folder):
            try:
                targets.append(os.readlink(f"{folder}/{fd}"))
            except FileNotFoundError:
                continue
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return targets


def _socket_paths(inodes: set[str]) -> set[str]:
    # Num RefCount Protocol Flags Type St Inode [Path]; @ is the abstract name space,
    # which needs no removal.
    table = Path("/proc/net/unix").read_text()
    rows = [row.split(maxsplit=7) for row in table.splitlines()]
    return {
        row[7]
        for row in rows
        if len(row) == 8 and row[6] in inodes and not row[7].startswith("@")
    }
