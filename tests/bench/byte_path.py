"""What the machine itself can do: a broker's byte path, with no broker around it.

A 1 MiB produce has to be received into memory that two processes share, summed with
CRC-32C and written to the page cache; a 1 MiB fetch has to be sent from there. Here
processes do that and nothing else: no framing, no validation, no answers. A broker that
comes near these figures has nothing left to gain but from the kernel and the memory.

What a write costs is mostly where its pages come from. On a virtual machine a page that
the host has not given yet can cost several times one that was freed a moment ago; so
files are rolled and removed here as the benchmark's topic does it.
"""

from __future__ import annotations

import mmap
import os
import resource
import socket
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from mpbroker.protocol.records.crc32c import crc32c

MIB: Final = 1 << 20
_BUFFERS: Final = 8
_FILE_MIB: Final = 256
_FILES_KEPT: Final = 2
_END: Final = b"\1"  # in a pipe that else says how many buffers are full
_REPORT: Final = struct.Struct("qd")  # MiB done, CPU seconds


class Bound(NamedTuple):
    """How fast, and the CPU of those who do a broker's part of it."""

    mb_per_s: float
    cpu_us: float  # a MiB


def produce_bound(directory: Path, seconds: float) -> Bound:
    """Receive, sum and write: one process for the socket, one for the file."""
    shared = mmap.mmap(-1, _BUFFERS * MIB)
    shared.write(bytes(len(shared)))
    client, server = _connected()
    full, free = os.pipe(), os.pipe()
    os.write(free[1], bytes(_BUFFERS))
    until = time.monotonic() + seconds

    def send() -> int:
        return _send_until(client, until)

    def receive() -> int:
        view = memoryview(shared)
        for number in range(1 << 62):
            os.read(free[0], 1)
            start = number % _BUFFERS * MIB
            if not _fill(server, view[start : start + MIB]):
                os.write(full[1], _END)
                return number
            os.write(full[1], b"\0")
        raise AssertionError("it ends before")

    def write() -> int:
        return _write_all(memoryview(shared), directory, full[0], free[1])

    reports = _run([send, receive, write], [client, server])
    for fd in (*full, *free):
        os.close(fd)
    done, receive_cpu = reports[1]
    return Bound(
        done * MIB / seconds / 1e6, (receive_cpu + reports[2][1]) / max(1, done) * 1e6
    )


def fetch_bound(directory: Path, seconds: float) -> Bound:
    """Send a file that is in the page cache to somebody who only receives it."""
    path = directory / "bound"
    path.write_bytes(bytes(64 * MIB))
    client, server = _connected()
    until = time.monotonic() + seconds

    def send() -> int:
        done = 0
        with path.open("rb") as file:
            while done == 0 or time.monotonic() < until:
                at, end = done % 64 * MIB, (done % 64 + 1) * MIB
                while at < end:
                    at += os.sendfile(server.fileno(), file.fileno(), at, end - at)
                done += 1
        server.shutdown(socket.SHUT_WR)
        return done

    def receive() -> int:
        buffer = memoryview(bytearray(MIB))
        done = 0
        while _fill(client, buffer):
            done += 1
        return done

    reports = _run([send, receive], [client, server])
    path.unlink()
    done, cpu = reports[0]
    return Bound(done * MIB / seconds / 1e6, cpu / max(1, done) * 1e6)


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    return client, server


def _send_until(sock: socket.socket, until: float) -> int:
    chunk, done = os.urandom(MIB), 0
    while done == 0 or time.monotonic() < until:
        sock.sendall(chunk)
        done += 1
    sock.shutdown(socket.SHUT_WR)
    return done


def _fill(sock: socket.socket, view: memoryview) -> bool:
    """Receive as much as fits; False at the end of the stream."""
    have = 0
    while have < len(view):
        count = sock.recv_into(view[have:])
        if count == 0:
            return False
        have += count
    return True


def _write_all(shared: memoryview, directory: Path, full: int, free: int) -> int:
    number, files = 0, 0
    fd = -1
    while os.read(full, 1) != _END:
        if number % _FILE_MIB == 0:
            if fd >= 0:
                os.close(fd)
            fd = os.open(directory / f"bound-{files}", os.O_RDWR | os.O_CREAT, 0o600)
            files += 1
            (directory / f"bound-{files - 1 - _FILES_KEPT}").unlink(missing_ok=True)
        start = number % _BUFFERS * MIB
        chunk = shared[start : start + MIB]
        crc32c(chunk)
        at = number % _FILE_MIB * MIB
        while chunk:
            written = os.pwrite(fd, chunk, at)
            chunk, at = chunk[written:], at + written
        os.write(free, b"\0")
        number += 1
    for left in directory.glob("bound-*"):
        left.unlink()
    return number


def _run(
    works: list[Callable[[], int]], sockets: list[socket.socket]
) -> list[tuple[int, float]]:
    """Do each in a process of its own; return the MiB and CPU seconds of each."""
    pids, pipes = [], []
    for work in works:
        report = os.pipe()
        with warnings.catch_warnings():
            # We may have threads; none of their locks is taken in the child.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            status = 1
            try:
                before = resource.getrusage(resource.RUSAGE_SELF)
                done = work()
                after = resource.getrusage(resource.RUSAGE_SELF)
                cpu = after.ru_utime + after.ru_stime
                cpu -= before.ru_utime + before.ru_stime
                os.write(report[1], _REPORT.pack(done, cpu))
                status = 0
            finally:
                os._exit(status)
        os.close(report[1])
        pids.append(pid)
        pipes.append(report[0])
    for sock in sockets:
        sock.close()
    reports = []
    for pid, pipe in zip(pids, pipes, strict=True):
        content = os.read(pipe, _REPORT.size)
        os.close(pipe)
        os.waitpid(pid, 0)
        if len(content) != _REPORT.size:
            raise OSError("a process of the byte path has failed")
        reports.append(_REPORT.unpack(content))
    return reports
