"""Run a command without what a systemd unit takes away, where no systemd does it.

    python -m tests.support.unit_sandbox UNIT COMMAND...

Kept are the system calls of SystemCallFilter=, the address families, no namespaces, no
memory that is writable and executable, no capabilities, no new privileges, and the
umask. Not imitated is the view of the file system, and the user.

Source: systemd.exec(5); seccomp_rule_add(3).
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

_ALLOW: Final = 0x7FFF_0000
_ERRNO: Final = 0x0005_0000
_MASKED_EQUAL: Final = 7
_EQUAL: Final = 4
_WRITE_EXECUTE: Final = 6
_EXECUTE: Final = 4
# CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET and TIME.
_NEW_NAMESPACES: Final = 0x7E02_0080
_PR_SET_NO_NEW_PRIVS: Final = 38


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Every value of every setting, whatever its section; in order."""
    settings: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if line and line[0] not in "#;[":
            key, _, value = line.partition("=")
            settings.setdefault(key.strip(), []).append(value.strip())
    return settings


def why_not() -> str:
    """What is missing here; empty if nothing is."""
    if shutil.which("systemd-analyze") is None:
        return "no systemd-analyze (Debian: apt-get install systemd)"
    if shutil.which("setpriv") is None:
        return "no setpriv (Debian: apt-get install util-linux)"
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return "no libseccomp.so.2 (Debian: apt-get install libseccomp2)"
    return ""


def allowed_calls(lines: list[str]) -> set[str]:
    """What SystemCallFilter= lets through: names of system calls.

    The first line says what is allowed; those that begin with ~ take away from it.
    """
    allowed = _members("@default")
    for line in lines:
        named: set[str] = set()
        for word in line.removeprefix("~").split():
            named |= _members(word)
        allowed = allowed - named if line.startswith("~") else allowed | named
    return allowed


def _members(word: str) -> set[str]:
    if not word.startswith("@"):
        return {word}
    shown = subprocess.run(
        ["systemd-analyze", "--no-pager", "syscall-filter", word],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    members: set[str] = set()
    for line in shown.splitlines()[1:]:
        name = line.strip()
        if name and not name.startswith("#"):
            members |= _members(name)
    return members


class _Comparison(ctypes.Structure):
    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    ]


class _Filter:
    """A seccomp filter in the making: what is not allowed fails with EPERM."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libseccomp.so.2")
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(
            self._library.seccomp_init(ctypes.c_uint32(_ERRNO | errno.EPERM))
        )
        assert self._context

    def allow(self, name: str, *comparisons: _Comparison) -> None:
        """Allow a call, of these arguments only."""
        self._add(_ALLOW, name, comparisons)

    def fail(self, name: str, number: int) -> None:
        self._add(_ERRNO | number, name, ())

    def _add(
        self, action: int, name: str, comparisons: tuple[_Comparison, ...]
    ) -> None:
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return  # of another kind of machine
        array = (_Comparison * len(comparisons))(*comparisons)
        error = self._library.seccomp_rule_add_array(
            self._context, ctypes.c_uint32(action), number, len(comparisons), array
        )
        assert error == 0, (name, os.strerror(-error))

    def load(self) -> None:
        error = self._library.seccomp_load(self._context)
        assert error == 0, os.strerror(-error)


def apply(unit: Path) -> None:
    """Restrict this process, and all that it starts, as the unit does."""
    settings = settings_of(unit)
    names = allowed_calls(settings["SystemCallFilter"])
    families = settings["RestrictAddressFamilies"][0].split()
    assert settings["MemoryDenyWriteExecute"] == ["yes"]
    assert settings["RestrictNamespaces"] == ["yes"]
    assert settings["CapabilityBoundingSet"] == [""]
    os.umask(int(settings["UMask"][0], 8))
    assert ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    filter_ = _Filter()
    for name in names - {"socket", "mmap", "mprotect", "clone", "clone3"}:
        filter_.allow(name)
    for family in families:
        number = getattr(socket, family)
        filter_.allow("socket", _Comparison(0, _EQUAL, number, 0))
    for protection in (0, 2, 4):  # none or read, write, execute; never both of them
        filter_.allow("mmap", _Comparison(2, _MASKED_EQUAL, _WRITE_EXECUTE, protection))
    filter_.allow("mprotect", _Comparison(2, _MASKED_EQUAL, _EXECUTE, 0))
    filter_.allow("clone", _Comparison(0, _MASKED_EQUAL, _NEW_NAMESPACES, 0))
    # Its flags are in memory, where no filter can look; the C library tries clone then.
    filter_.fail("clone3", errno.ENOSYS)
    filter_.load()


def command_in(unit: Path, *command: str) -> list[str]:
    """The command that runs a command as the unit would."""
    capabilities = []
    if os.geteuid() == 0:
        capabilities = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"]
    here = [sys.executable, "-m", "tests.support.unit_sandbox", str(unit)]
    return [*capabilities, *here, *command]


if __name__ == "__main__":
    apply(Path(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
