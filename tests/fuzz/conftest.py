"""A broker that answers wrongly."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture
def liar() -> Iterator[tuple[str, int]]:
    """A server that answers everything with the correlation id plus one."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(65536)
                if len(request) < 12:
                    continue
                wrong = struct.unpack_from(">I", request, 8)[0] + 1 & 0x7FFFFFFF
                connection.sendall(struct.pack(">ii", 4, wrong))

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
