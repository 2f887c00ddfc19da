"""A TCP proxy in a thread that cuts connections: after so many bytes of answers."""

from __future__ import annotations

import random
import selectors
import socket
import threading
from contextlib import suppress


class CuttingProxy:
    """Forwards to a broker; clients must be told its address by the broker itself.

    Every connection is cut when a number of bytes has come back that ``next_cut`` says;
    None never cuts it. The byte that would be one too many is not passed on.
    """

    def __init__(self, upstream_port: int, seed: int = 0) -> None:
        self.upstream_port = upstream_port
        self.rng = random.Random(seed)
        self.cuts = 0
        self.limits: list[int | None] = []  # of connections to come; then chance
        self.average = 0  # bytes between cuts by chance; 0: none
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()

    def _limit(self) -> int | None:
        if self.limits:
            return self.limits.pop(0)
        if self.average:
            return self.rng.randrange(1, 2 * self.average)
        return None

    def _run(self) -> None:
        pairs: dict[socket.socket, tuple[socket.socket, list[int | None] | None]] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stop.is_set():
                for key, _ in selector.select(0.02):
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock is self._listener:
                        client, _ = sock.accept()
                        try:
                            server = socket.create_connection(
                                ("127.0.0.1", self.upstream_port)
                            )
                        except OSError:
                            client.close()
                            continue
                        pairs[client] = server, None
                        pairs[server] = client, [self._limit()]
                        selector.register(client, selectors.EVENT_READ)
                        selector.register(server, selectors.EVENT_READ)
                    elif sock in pairs and not self._forward(sock, *pairs[sock]):
                        other = pairs[sock][0]
                        for each in (sock, other):
                            selector.unregister(each)
                            del pairs[each]
                            each.close()
            for sock in pairs:
                sock.close()

    def _forward(
        self, sock: socket.socket, other: socket.socket, limit: list[int | None] | None
    ) -> bool:
        try:
            data = sock.recv(65536)
            if not data:
                return False
            if limit is None or limit[0] is None:
                other.sendall(data)
                return True
            other.sendall(data[: limit[0]])
            if len(data) > limit[0]:
                self.cuts += 1
                with suppress(OSError):
                    other.shutdown(socket.SHUT_RDWR)
                return False
            limit[0] -= len(data)
            return True
        except OSError:
            return False
