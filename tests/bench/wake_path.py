"""What the machine itself takes to pass a message on, with no broker around it.

On its way from a produce to a fetch a message wakes a processor, a handler, the
processor once more, and the client. Here processes wake each other as often and as a
broker does it, in Python, over TCP and a pipe; the one in the middle writes the bytes
to a file. Nothing is parsed, checked or waited for. Measured message by message in
between a broker's own, it says what there was to be had at that moment: where a machine
halts for a quarter of a second, it halts both.
"""

from __future__ import annotations

import os
import select
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from tests.bench.wire import AnswerError

_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 4096


class WakePath:
    """A front process with a producer's and a consumer's connection, and a back one.

    Args:
        directory: where the back process keeps its file.
    """

    def __init__(self, directory: Path) -> None:
        self._producer, front_producer = _connected()
        self._consumer, front_consumer = _connected()
        ask, answer = os.pipe(), os.pipe()
        ours = (self._producer, self._consumer)
        fronts = (front_producer, front_consumer)

        def front() -> None:
            for end in (ask[0], answer[1]):
                os.close(end)
            for sock in ours:
                sock.close()
            _front(front_producer, front_consumer, ask[1], answer[0])

        def back() -> None:
            for end in (ask[1], answer[0]):
                os.close(end)
            for sock in (*ours, *fronts):
                sock.close()
            _back(directory / "wake-path", ask[0], answer[1])

        self._children = [_fork(front), _fork(back)]
        for end in (*ask, *answer):
            os.close(end)
        for sock in fronts:
            sock.close()
        self._poll = select.poll()
        for sock in ours:
            self._poll.register(sock, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.close()  # the front process ends at that, and then the back one
        self._consumer.close()
        for pid in self._children:
            os.waitpid(pid, 0)

    def pass_on(self, message: bytes) -> float:
        """Send a message; return the seconds until the consumer had it.

        Raises:
            AnswerError: it did not come, or another did.
        """
        sent = time.perf_counter()
        self._producer.sendall(message)
        arrived: dict[int, float] = {}
        while len(arrived) < 2:
            events = self._poll.poll(_TIMEOUT_S * 1e3)
            if not events:
                raise AnswerError("a message was not passed on")
            for fd, _ in events:
                arrived.setdefault(fd, time.perf_counter())
                sock = self._consumer if fd == self._consumer.fileno() else None
                if (sock or self._producer).recv(_MAX_BYTES) != message:
                    raise AnswerError("another message was passed on")
        return arrived[self._consumer.fileno()] - sent


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    for sock in (client, server):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client, server


def _fork(work: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        # We may have threads; none of their locks is taken in the child.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def _front(
    producer: socket.socket, consumer: socket.socket, ask: int, answer: int
) -> None:
    poll = select.epoll()
    poll.register(producer, select.EPOLLIN)
    poll.register(answer, select.EPOLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == answer:
                message = os.read(answer, _MAX_BYTES)
                producer.sendall(message)
                consumer.sendall(message)
                continue
            message = producer.recv(_MAX_BYTES)
            if not message:
                return
            os.write(ask, message)


def _back(path: Path, ask: int, answer: int) -> None:
    at = 0
    with path.open("wb", buffering=0) as file:
        while message := os.read(ask, _MAX_BYTES):
            at += os.pwrite(file.fileno(), message, at)
            os.write(answer, message)
    path.unlink()
