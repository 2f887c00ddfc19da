"""The one named segment of a broker, by which tools outside its processes find it.

It is ``/mpbroker-<supervisor pid>-<its start time>`` in /dev/shm. A name is a leftover
if there is no such process, or if that process was started at another time. The segment
is small, and the broker itself does not need it; tools attach it read-only.

Containers may share /dev/shm but not their process ids (docker's --ipc=host, a pod).
There the name of a live broker looks like a leftover, or even like our own name. So its
supervisor holds a lock on the file, which is visible in all containers and ends with
the supervisor.

    word  field       notes
    0     magic       written last
    1     version     of this layout
    2     sequence    odd while the text is being replaced
    3     length      of the text, in bytes
    4..   text        a msgpack map: pid, listeners, children...

Source: shm_overview(7); flock(2); /proc/<pid>/stat field 22 for the start time.
"""

import contextlib
import fcntl
import mmap
import os
import time
from typing import Any, Final

import msgpack

from mpbroker.ipc import posix_memory
from mpbroker.ipc.errors import IpcError
from mpbroker.ipc.layout import MAGIC
from mpbroker.ipc.posix_memory import DIRECTORY

_VERSION: Final = 1
_PREFIX: Final = "mpbroker-"
_SIZE_BYTES: Final = 64 * 1024
_TEXT: Final = 32  # bytes
_DEAD: Final = (b"Z", b"X")  # states in /proc/PID/stat
_ATTEMPTS: Final = 100
_PAUSE_S: Final = 0.001


class Telemetry:
    """The named segment of a broker, in which its supervisor publishes its state."""

    def __init__(self) -> None:
        """Make the segment.

        It takes the place of one that an earlier program of this process has made.
        """
        self.name = f"/{_PREFIX}{os.getpid()}-{start_time(os.getpid())}"
        self.close()
        try:
            fd = posix_memory.create(self.name)
        except PermissionError as error:
            raise IpcError(
                f"cannot make {DIRECTORY}{self.name}: {error.strerror};"
                f" all users must be able to write in {DIRECTORY} (mode 1777)"
            ) from error
        except OSError as error:
            raise IpcError(
                f"cannot make {DIRECTORY}{self.name}: {error.strerror}"
            ) from error
        try:
            # The lock lasts as long as the mapping, which keeps a duplicate of this
            # descriptor.
            fcntl.flock(fd, fcntl.LOCK_EX)
            # If /dev/shm is full, this fails; with ftruncate alone, the first store
            # would kill us.
            os.posix_fallocate(fd, 0, _SIZE_BYTES)
            self._map = mmap.mmap(fd, _SIZE_BYTES)
        except OSError as error:
            remove_name(self.name)
            raise IpcError(
                f"/dev/shm has no room for {_SIZE_BYTES} bytes: {error.strerror};"
                " free some space there, or give it more (mount -o remount,size=)"
            ) from error
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")
        self._words[1] = _VERSION
        self._words[0] = MAGIC

    def publish(self, state: dict[str, Any]) -> None:
        """Replace the broker's state that tools read in the segment.

        Raises:
            IpcError: the state is too long for the segment.
        """
        text = msgpack.packb(state)
        if len(text) > _SIZE_BYTES - _TEXT:
            raise IpcError(f"{len(text)} bytes of state in {_SIZE_BYTES - _TEXT}")
        words = self._words
        words[2] += 1
        self._map[_TEXT : _TEXT + len(text)] = text
        words[3] = len(text)
        words[2] += 1

    def unmap(self) -> None:
        """Unmap the segment in a child process, and close the mapping's descriptor.

        Otherwise the lock on the file would outlive the supervisor in the child.
        """
        self._words.release()
        self._map.close()

    def close(self) -> None:
        """Remove the segment's name from /dev/shm."""
        remove_name(self.name)


def remove_name(name: str) -> None:
    """Remove a segment's name, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        posix_memory.remove(name)


def read_telemetry(name: str) -> dict[str, Any] | None:
    """Return the state that a broker has published in its named segment.

    Returns:
        None if the segment is gone or not (yet) readable.
    """
    try:
        fd = posix_memory.attach(name)
    except OSError:  # it is gone, or not ours to read, or a link that somebody made
        return None
    try:
        if os.fstat(fd).st_size < _SIZE_BYTES:
            return None
        attached = mmap.mmap(fd, _SIZE_BYTES, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with attached, memoryview(attached) as view, view.cast("q") as words:
        if words[0] != MAGIC or words[1] != _VERSION:
            return None
        for _ in range(_ATTEMPTS):
            before, length = words[2], words[3]
            if not before % 2 and 0 < length <= _SIZE_BYTES - _TEXT:
                text = bytes(view[_TEXT : _TEXT + length])
                if words[2] == before:
                    state: dict[str, Any] = msgpack.unpackb(text)
                    return state
            # The writer may have been preempted in between: let it have our core.
            time.sleep(_PAUSE_S)
    return None


def start_time(pid: int) -> int:
    """Return a process's start time, in clock ticks since boot; 0: no such process."""
    return _state_and_start(pid)[1]


def _state_and_start(pid: int) -> tuple[bytes, int]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name, in parentheses, may contain anything.
            fields = file.read().rpartition(b")")[2].split()
            return fields[0], int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        return b"", 0


def broker_names() -> list[tuple[str, int, bool]]:
    """Return all named segments, also those of dead brokers.

    Returns:
        For each the name, the broker's process id, and whether the broker is alive.
    """
    return [(name, int(name.split("-")[1]), alive) for name, alive in _names()]


def brokers() -> list[str]:
    """Return the names of the segments of live brokers on this machine."""
    return [name for name, alive in _names() if alive]


def remove_leftovers() -> list[str]:
    """Remove the segments of brokers that are dead; return their names."""
    removed = []
    for name, alive in _names():
        if not alive:
            # It is gone, or not ours, or a link: no reason not to start.
            with contextlib.suppress(OSError):
                if _is_held(name):
                    continue  # its broker lives, in another PID namespace
                posix_memory.remove(name)
                removed.append(name)
    return removed


def _is_held(name: str) -> bool:
    fd = posix_memory.attach(name)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def _names() -> list[tuple[str, bool]]:
    found = []
    for entry in os.listdir(DIRECTORY):
        pid, _, started = entry.removeprefix(_PREFIX).partition("-")
        if entry.startswith(_PREFIX) and pid.isdigit() and started.isdigit():
            state, since = _state_and_start(int(pid))
            # A zombie counts as dead: in a container, process 1 may never reap it.
            alive = since == int(started) and state not in _DEAD
            found.append((f"/{entry}", alive))
    return found
