"""The shared rows of one processor's connections, and their printable names."""

import socket
import struct
from typing import Final

from mpbroker.ipc.layout import (
    CONNECTION_ACCEPT_SEQUENCE,
    CONNECTION_ACTIVE,
    CONNECTION_EXTENT,
    CONNECTION_FD,
    CONNECTION_LISTENER,
    CONNECTION_LOCAL_ADDRESS,
    CONNECTION_LOCAL_PORT,
    CONNECTION_OPENED,
    CONNECTION_PEER_ADDRESS,
    CONNECTION_PEER_PORT,
    CONNECTION_STATE,
    CONNECTION_WORDS,
    CONNECTIONS_PER_PROCESSOR,
    PROCESSOR_ROWS_USED,
    STATE_MASK,
    ConnectionState,
    connection_row,
    processor_row,
)
from mpbroker.ipc.segment import Segment

_GENERATION_STEP: Final = 1 << 24
_KEEP_GENERATION: Final = ~STATE_MASK
_ADDRESS: Final = struct.Struct("=qq")
_V4_PREFIX: Final = b"\0" * 10 + b"\xff\xff"
_NO_ADDRESS: Final = (b"\0" * 16, 0)


class ConnectionRows:
    """Rows of one processor: its own to write, everyone's to read."""

    def __init__(self, processor: int, control: Segment) -> None:
        self._words = control.words
        first = processor * CONNECTIONS_PER_PROCESSOR
        rows = range(first, first + CONNECTIONS_PER_PROCESSOR)
        self._first = first
        self._used_word = processor_row(processor) + PROCESSOR_ROWS_USED
        for row in rows[: self._words[self._used_word]]:
            word = connection_row(row)
            if self._words[word + CONNECTION_STATE] & STATE_MASK:
                # A dead predecessor's: its socket died with it.
                self._words[word + CONNECTION_STATE] &= _KEEP_GENERATION
        self._free = list(reversed(rows))

    def take(self) -> int | None:
        """Return a free row's index, or None when all are in use."""
        if not self._free:
            return None
        row = self._free.pop()
        if row - self._first >= self._words[self._used_word]:
            self._words[self._used_word] = row - self._first + 1
        return row

    def word(self, connection: int) -> int:
        return connection_row(connection)

    def describe(
        self,
        connection: int,
        sock: socket.socket,
        listener: int,
        accept_sequence: int,
        now_ns: int,
    ) -> None:
        """Fill a taken row in; its state comes last.

        Raises:
            OSError: the peer has gone.
        """
        words, word = self._words, connection_row(connection)
        words[word + CONNECTION_LISTENER] = listener
        words[word + CONNECTION_FD] = sock.fileno()
        words[word + CONNECTION_ACCEPT_SEQUENCE] = accept_sequence
        words[word + CONNECTION_OPENED] = now_ns
        for address_word, port_word, name in (
            (CONNECTION_LOCAL_ADDRESS, CONNECTION_LOCAL_PORT, sock.getsockname()),
            (CONNECTION_PEER_ADDRESS, CONNECTION_PEER_PORT, sock.getpeername()),
        ):
            packed, port = _pack_address(sock.family, name)
            high, low = _ADDRESS.unpack(packed)
            words[word + address_word] = high
            words[word + address_word + 1] = low
            words[word + port_word] = port
        generation = (words[word + CONNECTION_STATE] & _KEEP_GENERATION) + (
            _GENERATION_STEP
        )
        words[word + CONNECTION_STATE] = generation | ConnectionState.READING

    def set_state(self, word: int, state: ConnectionState, now_ns: int) -> None:
        words = self._words
        words[word + CONNECTION_ACTIVE] = now_ns
        words[word + CONNECTION_STATE] = (
            words[word + CONNECTION_STATE] & _KEEP_GENERATION | state
        )

    def release(self, connection: int) -> None:
        word = connection_row(connection)
        self._words[word + CONNECTION_EXTENT] = 0
        self._words[word + CONNECTION_STATE] &= _KEEP_GENERATION
        self._free.append(connection)

    def name(self, connection: int) -> str:
        """Kafka's form of a connection id: local-peer-index."""
        return connection_name(self._words, connection)


def connection_name(words: memoryview, connection: int) -> str:
    """Return ``local:port-peer:port-row``."""
    local, peer = local_address(words, connection), peer_address(words, connection)
    return f"{local[0]}:{local[1]}-{peer[0]}:{peer[1]}-{connection}"


def local_address(words: memoryview, connection: int) -> tuple[str, int]:
    """The address that the client dialled, as it arrived here."""
    return _address(words, connection, CONNECTION_LOCAL_ADDRESS, CONNECTION_LOCAL_PORT)


def peer_address(words: memoryview, connection: int) -> tuple[str, int]:
    """Where the client's end is."""
    return _address(words, connection, CONNECTION_PEER_ADDRESS, CONNECTION_PEER_PORT)


def listener_index(words: memoryview, connection: int) -> int:
    return int(words[connection_row(connection) + CONNECTION_LISTENER])


def _pack_address(family: int, name: object) -> tuple[bytes, int]:
    if family == socket.AF_INET and isinstance(name, tuple):
        return _V4_PREFIX + socket.inet_aton(name[0]), name[1]
    if family == socket.AF_INET6 and isinstance(name, tuple):
        host = str(name[0]).partition("%")[0]
        return socket.inet_pton(socket.AF_INET6, host), name[1]
    return _NO_ADDRESS


def _address(
    words: memoryview, connection: int, address_word: int, port_word: int
) -> tuple[str, int]:
    word = connection_row(connection)
    packed = _ADDRESS.pack(words[word + address_word], words[word + address_word + 1])
    if packed.startswith(_V4_PREFIX):
        host = socket.inet_ntoa(packed[len(_V4_PREFIX) :])
    else:
        host = socket.inet_ntop(socket.AF_INET6, packed)
    return host, int(words[word + port_word])


assert CONNECTION_PEER_PORT < CONNECTION_WORDS
