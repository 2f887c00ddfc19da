"""Check the machine that a broker runs on: limits, clock, disks, shared memory.

A check returns findings; a finding that is a warning or a failure tells what to do.
"""

from __future__ import annotations

import ctypes
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from mpbroker.cli.ctl.ctl_text import duration, size

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
# A broker has about 300 descriptors of its own. Each connection has two: one in its
# processor, and one in the keeper or the supervisor.
_OWN_FILES: Final = 300
_FEW_FILES: Final = 10_000
_SHM_NEEDED: Final = 1 * _MIB
_SHM_COMFORTABLE: Final = 16 * _MIB
_DISK_NEEDED: Final = 100 * _MIB
_DISK_COMFORTABLE: Final = 0.1  # of the disk's size
_SYNCS: Final = 16
_SYNC_BYTES: Final = 4096
_SLOW_SYNC_S: Final = 0.05
# Faster than any disk or its cache, so it must be memory.
_IMPOSSIBLE_SYNC_S: Final = 15e-6
_TIME_ERROR: Final = 5  # adjtimex(2): the clock is not synchronised
_TIMEX_BYTES: Final = 256
_LAST_SYSTEM_UID: Final = 999  # SYS_UID_MAX of login.defs(5)
_VOLATILE: Final = ("tmpfs", "ramfs")
_REMOTE: Final = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "ceph",
    "glusterfs",
    "fuse.sshfs",
)
_LOCAL: Final = ("ext4", "xfs", "btrfs", "zfs", "ext3", "f2fs", "bcachefs")


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
        level: OK, WARN or FAIL.
        check: the name of the check.
        text: what was found.
        fix: advice; "": none.
    """

    level: str
    check: str
    text: str
    fix: str = ""


def check_open_files(pid: int, connections: int) -> Finding:
    """Check a broker's limit of open files, for its number of connections now."""
    name = "open files"
    soft = _limit_of(pid, "Max open files")
    if soft is None:
        return Finding(
            WARN,
            name,
            f"/proc/{pid}/limits cannot be read",
            "run the command as the broker's user",
        )
    text = f"{soft:,} allowed, {connections:,} connections now"
    fix = "raise it: LimitNOFILE= in the unit, or ulimit -n before mpbroker serve"
    if soft < _OWN_FILES + connections * 2:
        return Finding(FAIL, name, text, fix)
    return Finding(WARN if soft < _FEW_FILES else OK, name, text, fix)


def _limit_of(pid: int, name: str) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
            if line.startswith(name):
                soft = line[len(name) :].split()[0]
                return 1 << 62 if soft == "unlimited" else int(soft)
    except OSError:
        return None
    return None


def check_shared_memory(path: str = "/dev/shm") -> Finding:
    """Check that /dev/shm exists, and has room for the broker's file there."""
    name = path
    try:
        found = os.statvfs(path)
    except OSError as error:
        return Finding(
            FAIL, name, f"missing: {error.strerror}", f"mount a tmpfs at {path}"
        )
    free = found.f_bavail * found.f_frsize
    text = f"{size(free)} free of {size(found.f_blocks * found.f_frsize)}"
    fix = f"free some, or mount -o remount,size=64m {path} (docker: --shm-size)"
    if free < _SHM_NEEDED:
        return Finding(FAIL, name, text, fix)
    return Finding(WARN if free < _SHM_COMFORTABLE else OK, name, text, fix)


def check_clock(jumps: Sequence[float] | None) -> Iterator[Finding]:
    """Check that the wall clock is synchronised, and has not jumped since the start.

    Args:
        jumps: the size in seconds of each jump that the supervisor has noticed; None:
            not known.
    """
    name = "clock"
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes 0: change nothing
    if ctypes.CDLL(None).adjtimex(buffer) == _TIME_ERROR:
        yield Finding(
            WARN,
            name,
            "not synchronised: times of records may be wrong",
            "run chrony or systemd-timesyncd, on the host if this is a container",
        )
    else:
        yield Finding(OK, name, "synchronised")
    if jumps:
        largest = max(jumps, key=abs)
        yield Finding(
            WARN,
            name,
            f"has jumped {len(jumps)} times since the start, by up to {largest:+.1f} s;"
            " retention and offsets by time depend on it",
            "slew the clock instead of stepping it (chrony: makestep 1 3)",
        )


def check_disk_space(path: str) -> Finding:
    """Check the free space of a data directory."""
    name = f"disk of {path}"
    try:
        found = os.statvfs(path)
    except OSError as error:
        return Finding(FAIL, name, f"{error.strerror}", "mount it, or stop the broker")
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{size(free)} free of {size(total)}"
    fix = "lower log.retention.bytes or .hours, delete topics, or add disk"
    if free < _DISK_NEEDED:
        return Finding(FAIL, name, text, fix)
    scarce = free < _GIB or free < total * _DISK_COMFORTABLE
    return Finding(WARN if scarce else OK, name, text, fix)


def check_permissions(path: str) -> Finding:
    """Check that other users of the machine cannot read a data directory.

    Files and directories that the broker creates are closed to them, but an existing
    directory keeps its mode.
    """
    name = f"mode of {path}"
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        return Finding(FAIL, name, f"{error.strerror}", "mount it, or stop the broker")
    if mode & 0o007:
        return Finding(
            WARN,
            name,
            f"{mode:04o}: every user of this machine can reach the records in it",
            f"chmod -R o= {path}",
        )
    return Finding(OK, name, f"{mode:04o}: closed to other users")


def check_file_system(path: str) -> Finding:
    """Check the kind of file system that a data directory is on."""
    name = f"disk of {path}"
    kind = file_system_of(path, Path("/proc/self/mountinfo").read_text())
    if kind in _VOLATILE:
        return Finding(
            FAIL,
            name,
            f"{kind}: all data are lost when the machine stops",
            "set log.dirs to a directory on a disk",
        )
    if kind in _REMOTE:
        return Finding(
            WARN,
            name,
            f"{kind}: on a network; if it is cut, every partition stops",
            "prefer a local disk",
        )
    if kind in _LOCAL:
        return Finding(OK, name, f"{kind}")
    return Finding(
        WARN,
        name,
        f"{kind}: it is not known whether its fdatasync reaches a disk",
        "prefer ext4 or xfs; in a container, a volume instead of its own layer",
    )


def file_system_of(path: str, mount_info: str) -> str:
    """Return the type of the file system that holds a path.

    Source: proc_pid_mountinfo(5).
    """
    path = os.path.realpath(path)
    best, kind = "", "unknown"
    for line in mount_info.splitlines():
        before, _, after = line.partition(" - ")
        # The kernel writes a space or a backslash as a backslash and octal digits.
        mount = before.split()[4].encode().decode("unicode_escape")
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind


def check_sync(path: str) -> Finding:
    """Measure how long 4 KiB and an fdatasync take, which acks=all waits for."""
    name = f"disk of {path}"
    file = os.path.join(path, f".doctor-{os.getpid()}")
    times = []
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for number in range(_SYNCS):
                os.pwrite(fd, b"\0" * _SYNC_BYTES, number * _SYNC_BYTES)
                started = time.monotonic()
                os.fdatasync(fd)
                times.append(time.monotonic() - started)
        finally:
            os.close(fd)
            os.unlink(file)
    except PermissionError:
        return Finding(
            WARN,
            name,
            "fdatasync was not tried: this user may not write there",
            "run the command as the broker's user",
        )
    except OSError as error:
        return Finding(
            FAIL,
            name,
            f"cannot be written: {error.strerror}",
            "see the log; check dmesg",
        )
    times.sort()
    middle, worst = times[len(times) // 2], times[-1]
    text = f"fdatasync takes {duration(middle)}, at worst {duration(worst)}"
    if middle < _IMPOSSIBLE_SYNC_S:
        return Finding(
            WARN,
            name,
            f"fdatasync takes {middle * 1e6:.0f} us: it does not reach a disk",
            "a power cut may lose records that acks=all acknowledged; check the volume",
        )
    return Finding(
        WARN if worst > _SLOW_SYNC_S else OK,
        name,
        text,
        "acks=all waits for it: use a faster disk, or less load on this one",
    )


def check_remove_ipc(uid: int, etc: Path = Path("/etc/systemd")) -> Finding | None:
    """Check that logind keeps the broker's file in /dev/shm when its user logs out.

    Returns:
        None if no check is needed: for a system user, or without logind.
    """
    if uid <= _LAST_SYSTEM_UID or not (etc / "logind.conf").exists():
        return None
    name = "RemoveIPC"
    files = [etc / "logind.conf", *sorted((etc / "logind.conf.d").glob("*.conf"))]
    value = "yes"  # systemd's default
    for file in files:
        for line in file.read_text(errors="replace").splitlines():
            key, equals, text = line.strip().partition("=")
            if key.strip() == "RemoveIPC" and equals:
                value = text.strip().lower()
    if value in ("no", "false", "0", "off"):
        return Finding(OK, name, f"{value}: files of a user in /dev/shm stay")
    return Finding(
        WARN,
        name,
        f"{value}, and the broker's user {uid} is no system user: when that user logs"
        " out, the broker's name in /dev/shm is removed, and ctl cannot find it",
        "set RemoveIPC=no in /etc/systemd/logind.conf, or use a system user",
    )


def check_python(python: str, core: str, machine: str) -> Iterator[Finding]:
    """Check that a broker's processes use the compiled core, which is in C.

    Args:
        python: the version of the interpreter.
        core: "compiled core", or a text that says what is used instead.
        machine: the machine's architecture, such as x86_64.
    """
    compiled = core == "compiled core"
    if not compiled and machine != "x86_64":
        yield Finding(
            FAIL,
            "python",
            f"{python}, {core}, on {machine}: shared memory needs x86-64's order of"
            " stores, or the compiled core",
            "install a C compiler and Python's headers, and mpbroker again",
        )
    else:
        yield Finding(
            OK if compiled else WARN,
            "python",
            f"{python}, {core}",
            "install a C compiler and Python's headers, and mpbroker again",
        )
