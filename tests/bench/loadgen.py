"""loadgen.c in Python, for machines without a compiler: same arguments, same output.

Costs the machine some 15 us a request where the C one costs 3, so on few cores it
lowers the rates it reports; the broker's CPU per request stays comparable.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence

from tests.bench.load import Template, load_script

CORRELATION_AT = 8
SIZE = struct.Struct(">i")
CHUNK = 1 << 20
PATIENCE_S = 30.0


class LoadError(Exception):
    """The broker answered something else than the script says, or hung up."""


class _Connection:
    """One connection and its requests under way."""

    def __init__(
        self,
        address: tuple[str, int],
        index: int,
        stride: int,
        templates: Sequence[Template],
    ) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._index = index
        self._stride = stride
        self._templates = templates
        self._sent = 0
        self.in_flight: deque[tuple[int, Template, int]] = deque()
        self._unsent: memoryview | None = None
        self._received = bytearray()
        self.was_answered = False

    def send(self, depth: int) -> None:
        """Write until `depth` requests are under way or the socket is full."""
        while True:
            if self._unsent is None:
                if len(self.in_flight) >= depth:
                    return
                self._unsent = self._next_request()
            try:
                wrote = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            self._unsent = self._unsent[wrote:] if wrote < len(self._unsent) else None

    def _next_request(self) -> memoryview:
        chosen = (self._index + self._sent * self._stride) % len(self._templates)
        template = self._templates[chosen]
        framed = bytearray(template.request)
        SIZE.pack_into(framed, CORRELATION_AT, self._sent)
        self.in_flight.append((self._sent, template, time.monotonic_ns()))
        self._sent += 1
        return memoryview(framed)

    def receive(self) -> list[tuple[int, int]]:
        """Check what has come; return (payload bytes, nanoseconds) of each answer."""
        answers: list[tuple[int, int]] = []
        while True:
            try:
                data = self.socket.recv(CHUNK)
            except BlockingIOError:
                return answers
            if not data:
                raise LoadError("the broker closed a connection")
            self._received += data
            self._take_answers(answers)
            if len(data) < CHUNK:
                return answers

    def _take_answers(self, answers: list[tuple[int, int]]) -> None:
        at = 0
        received = self._received
        while len(received) - at >= 4:
            (size,) = SIZE.unpack_from(received, at)
            end = at + 4 + size
            if end > len(received):
                break
            correlation_id, template, sent_ns = self.in_flight.popleft()
            if SIZE.unpack_from(received, at + 4)[0] != correlation_id:
                raise LoadError("wrong correlation id")
            template.verify(memoryview(received)[at + 4 : end])
            answers.append((size, time.monotonic_ns() - sent_ns))
            self.was_answered = True
            at = end
        del received[:at]


def _percentile_us(ordered: Sequence[int], share: float) -> float:
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e3


def _run(
    address: tuple[str, int],
    connection_count: int,
    depth: int,
    warmup_s: float,
    measure_s: float,
    templates: Sequence[Template],
) -> dict[str, float]:
    poll = select.epoll()
    connections: dict[int, _Connection] = {}
    for index in range(connection_count):
        connection = _Connection(address, index, connection_count, templates)
        connections[connection.socket.fileno()] = connection
        events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
        poll.register(connection.socket, events)
    began = time.monotonic()
    measured_from: float | None = None
    cpu_from = 0.0
    answers: list[tuple[int, int]] = []
    while True:
        now = time.monotonic()
        past_s = now - began
        if measured_from is None and _is_warm(past_s, warmup_s, connections.values()):
            measured_from = now
            answers = []
            cpu_from = time.process_time()
            print("measure", flush=True)
        elif measured_from is not None and now - measured_from >= measure_s:
            cpu = time.process_time() - cpu_from
            return _summary(answers, now - measured_from, cpu)
        for fd, _event in poll.poll(0.001):
            connection = connections[fd]
            answers += connection.receive()
            connection.send(depth)


def _is_warm(
    past_s: float, warmup_s: float, connections: Iterable[_Connection]
) -> bool:
    if past_s < warmup_s:
        return False
    return (
        not warmup_s
        or past_s >= warmup_s + PATIENCE_S
        or all(connection.was_answered for connection in connections)
    )


def _summary(
    answers: Sequence[tuple[int, int]], seconds: float, cpu: float
) -> dict[str, float]:
    ordered = sorted(ns for _, ns in answers)
    return {
        "answered": len(answers),
        "seconds": seconds,
        "received_bytes": sum(size for size, _ in answers),
        "own_cpu_s": cpu,
        "p50_us": _percentile_us(ordered, 0.5),
        "p90_us": _percentile_us(ordered, 0.9),
        "p99_us": _percentile_us(ordered, 0.99),
        "p999_us": _percentile_us(ordered, 0.999),
        "max_us": ordered[-1] / 1e3 if ordered else 0.0,
    }


def main(arguments: Sequence[str]) -> int:
    """Run as loadgen.c does; return the exit code."""
    host, port, connections, depth, warmup_ms, measure_ms, script = arguments
    try:
        result = _run(
            (host, int(port)),
            int(connections),
            int(depth),
            int(warmup_ms) / 1e3,
            int(measure_ms) / 1e3,
            load_script(script),
        )
    except (LoadError, AssertionError) as error:
        print(f"loadgen: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "error")
        print(f"loadgen: {name}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result), flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
