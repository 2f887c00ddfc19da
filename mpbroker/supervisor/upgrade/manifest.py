"""Manifest: the list of all that a supervisor's program leaves to the next program.

It holds descriptors, children and the broker's identity, as a msgpack map in a memfd.
For a program with another layout of memory it names the leaver as well, a process that
ends the children and describes what they leave: see generation.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import msgpack

from mpbroker import __version__
from mpbroker.base.errors import MpbrokerError
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.config import BrokerConfig
from mpbroker.ipc.arena import ArenaLayout
from mpbroker.ipc.layout import LAYOUT_VERSION
from mpbroker.ipc.parts import Parts
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.supervisor.child import ChildRecord
from mpbroker.supervisor.listen_sockets import STORED_PREFIX
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.systemd import InheritedSocket, listening_socket


class TakeoverError(MpbrokerError):
    """A program cannot take over from the previous program."""


class Manifest(NamedTuple):
    """All that a supervisor's program leaves to the next one in an upgrade."""

    layout: int
    version: str
    command: list[str]  # starts this program, if the next one has to go back
    going_back: str  # the reason of a program that goes back; "": it goes forward
    parts: dict[str, list[int]]  # the descriptors of shared memory, by name
    max_request_bytes: int
    queued_bytes_each: int
    node_id: int
    listeners: list[tuple[str, str, int, bool]]  # name, endpoint, descriptor, passed
    log_dirs: list[str]  # as configured
    directories: list[tuple[str, int, bool]]  # those in use: path, lock, clean
    children: list[tuple[Any, ...]]
    started: float  # when the broker was started, in seconds of the wall clock
    # For a new generation: a socket to the leaver, and its process id. -1: there is
    # none, and memory is shared.
    generation: int = -1
    leaver: int = 0

    @property
    def fds(self) -> set[int]:
        """The file descriptors that must stay open for the next program."""
        found = {fd for fds in self.parts.values() for fd in fds}
        found.update(fd for _, _, fd, _ in self.listeners)
        found.update(fd for _, fd, _ in self.directories)
        if self.is_generation:
            found.add(self.generation)
        return found

    @property
    def is_generation(self) -> bool:
        """Whether the next program needs shared memory and children of its own."""
        return self.generation >= 0

    @property
    def step(self) -> str:
        """What the next program does first, as text for ``ctl status``."""
        if self.going_back:
            return f"going back to {__version__}: {self.going_back}"
        return f"replacing the processes of {self.version}"

    def untouched(self, command: list[str], going_back: str) -> Manifest:
        """Kill the process that was to end the children; return the old manifest.

        With this manifest (the list of all that is handed over) the old program can go
        on.

        Call this only while the new program has changed nothing.

        Args:
            command: the command that starts the new program.
            going_back: the reason for which the new program goes back.
        """
        self.dismiss_leaver()
        return self._replace(
            command=command, going_back=going_back, generation=-1, leaver=0
        )

    def dismiss_leaver(self) -> None:
        """Kill the process that was to end the old children, if there is one."""
        if self.leaver:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.leaver, signal.SIGKILL)
                os.waitpid(self.leaver, 0)

    def write(self) -> int:
        """Write this list into a memfd for the next program; the caller closes it."""
        fd = os.memfd_create("mpbroker-takeover", os.MFD_CLOEXEC)
        data = msgpack.packb(self._asdict())
        os.pwrite(fd, data, 0)
        return fd

    @classmethod
    def read(cls, fd: int) -> Manifest:
        """Read what the previous program has left, from a descriptor.

        Raises:
            TakeoverError: another version has written it in a form not known here.
        """
        data = os.pread(fd, os.fstat(fd).st_size, 0)
        try:
            return cls(**msgpack.unpackb(data, use_list=True))
        except (TypeError, ValueError) as error:
            raise TakeoverError(
                f"the running version writes a manifest that is not known here:"
                f" {error}; restart the service instead"
            ) from error

    def check(self, config: BrokerConfig) -> None:
        """Raise TakeoverError if a program with this config cannot take over."""
        for what, here, there in (
            ("node.id", config.node_id, self.node_id),
            ("log.dirs", list(config.log_dirs), self.log_dirs),
            (
                "listeners",
                [each.connection_string for each in config.endpoints],
                [endpoint for _, endpoint, _, _ in self.listeners],
            ),
        ):
            if here != there:
                raise TakeoverError(
                    f"{what}: {here} in the newcomer, {there} in the running broker;"
                    " that cannot change while connections are open: restart the"
                    " service instead"
                )

    def changed_layout(self, config: BrokerConfig) -> str:
        """Return why this config needs memory of its own; "": it does not."""
        if self.layout != LAYOUT_VERSION:
            return f"layout of shared memory {self.layout} to {LAYOUT_VERSION}"
        here, there = (
            ArenaLayout(largest, self.queued_bytes_each).size_bytes
            for largest in (config.socket_request_max_bytes, self.max_request_bytes)
        )
        if here != there:
            return (
                f"socket.request.max.bytes {self.max_request_bytes} to"
                f" {config.socket_request_max_bytes}"
            )
        return ""

    # -- the objects that it describes -------------------------------------------------

    def memory(self, config: BrokerConfig) -> BrokerMemory:
        return BrokerMemory(
            config.socket_request_max_bytes,
            config.queued_max_requests,
            self.queued_bytes_each,
            Parts(self.parts),
        )

    def open_directories(self) -> list[LogDirectory]:
        return [
            # Another generation has written to them since the clean stop.
            LogDirectory.taken_over(path, fd, clean=clean and not self.is_generation)
            for path, fd, clean in self.directories
        ]

    def sockets(self) -> list[InheritedSocket]:
        return [
            InheritedSocket(
                name if passed else STORED_PREFIX + name, listening_socket(fd, name)
            )
            for name, _, fd, passed in self.listeners
        ]

    def records(self) -> list[ChildRecord]:
        return [ChildRecord(*record) for record in self.children]

    def keep_private(self) -> None:
        """Set close-on-exec on the inherited descriptors: other programs get none."""
        for fd in self.fds:
            os.set_inheritable(fd, False)
