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
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Self

from tests.bench.wire import AnswerError

_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 4096
_END: Final = b"\0"


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
        self.send(message)
        received, arrived = self.receive(_TIMEOUT_S)
        if received != message:
            raise AnswerError("another message was passed on")
        return arrived - sent

    def send(self, message: bytes) -> None:
        self._producer.sendall(message)

    def receive(self, timeout_s: float | None) -> tuple[bytes, float]:
        """Return what the consumer had, once the producer was answered, and when.

        By `perf_counter`. An empty message: there is nobody any more to pass any on.

        Raises:
            AnswerError: nothing came in time.
        """
        arrived: dict[int, float] = {}
        message = b""
        while len(arrived) < 2:
            events = self._poll.poll(None if timeout_s is None else timeout_s * 1e3)
            if not events:
                raise AnswerError("a message was not passed on")
            for fd, _ in events:
                arrived.setdefault(fd, time.perf_counter())
                sock = self._consumer if fd == self._consumer.fileno() else None
                message = (sock or self._producer).recv(_MAX_BYTES)
                if not message:
                    return message, arrived[fd]
        return message, arrived[self._consumer.fileno()]


class HandedOverPath:
    """The same for a client whose own threads speak to the network, as librdkafka's do.

    Who sends wakes a thread that writes to the socket, by a pipe; the thread that reads
    wakes who receives. Nothing is batched, encoded or counted.
    """

    def __init__(self, path: WakePath, message: bytes) -> None:
        self._path = path
        self._message = message
        self._asked, self._ask = os.pipe()
        self._received: SimpleQueue[bytes] = SimpleQueue()
        self._threads = [
            threading.Thread(target=work) for work in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ask)
        for thread in self._threads:
            thread.join()
        os.close(self._asked)

    def pass_on(self) -> float:
        """Return the seconds until who receives had the message.

        Raises:
            AnswerError: it did not come, or another did.
        """
        sent = time.perf_counter()
        os.write(self._ask, b"1")
        try:
            message = self._received.get(timeout=_TIMEOUT_S)
        except Empty:
            raise AnswerError("a message was not passed on") from None
        arrived = time.perf_counter()
        if message != self._message:
            raise AnswerError("another message was passed on")
        return arrived - sent

    def _send(self) -> None:
        while os.read(self._asked, 1):
            self._path.send(self._message)
        self._path.send(_END)

    def _receive(self) -> None:
        message = self._message
        while message not in (b"", _END):
            message, _ = self._path.receive(None)
            self._received.put(message)


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
