"""The shared rows of one processor's connections, and their printable names.

A row belongs to one connection from its first byte to its last, whoever carries it: a
processor takes rows for new connections from its own range of the table, may be given
rows of others' ranges, and gives its own away. So a row names its owner, and one that
comes free is found again by the processor whose range it lies in.
"""

import socket
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from mpbroker.ipc.layout import (
    CONNECTION_ACCEPT_SEQUENCE,
    CONNECTION_ACTIVE,
    CONNECTION_COOKIE,
    CONNECTION_COPY_SHIFT,
    CONNECTION_ENCRYPTION,
    CONNECTION_EXTENT,
    CONNECTION_FD,
    CONNECTION_HOLDER,
    CONNECTION_LISTENER,
    CONNECTION_LOCAL_ADDRESS,
    CONNECTION_LOCAL_PORT,
    CONNECTION_MUTED_UNTIL,
    CONNECTION_OPENED,
    CONNECTION_OWNER,
    CONNECTION_PEER_ADDRESS,
    CONNECTION_PEER_PORT,
    CONNECTION_POSITION,
    CONNECTION_PRINCIPAL,
    CONNECTION_SECURITY,
    CONNECTION_SENT,
    CONNECTION_SLOT,
    CONNECTION_STATE,
    CONNECTION_WORDS,
    CONNECTIONS_PER_PROCESSOR,
    MAX_PROCESSORS,
    POSITION_MASK,
    POSITION_SHIFT,
    PROCESSOR_INCARNATION,
    PROCESSOR_ROWS_USED,
    SECURITY_MASK,
    SESSION_SHIFT,
    STATE_MASK,
    ConnectionSecurity,
    ConnectionState,
    connection_row,
    processor_row,
)
from mpbroker.ipc.segment import Segment

_GENERATION_STEP: Final = 1 << 24
_KEEP_GENERATION: Final = ~((1 << 24) - 1)
_KEEP_ALL_BUT_STATE: Final = ~STATE_MASK
_OTHER_COPY: Final = 1 << CONNECTION_COPY_SHIFT
_FREE: Final = int(ConnectionState.FREE)
_READING: Final = int(ConnectionState.READING)
_PRIVATE: Final = int(ConnectionSecurity.PRIVATE)
_ADDRESS: Final = struct.Struct("=qq")
_V4_PREFIX: Final = b"\0" * 10 + b"\xff\xff"
_NO_ADDRESS: Final = (b"\0" * 16, 0)
_HOLDER_SHIFT: Final = 8
_NOBODY: Final = -1


class Progress(NamedTuple):
    """How far a connection had got when its last request was finished."""

    base: int  # bytes of the client's stream in front of the block
    start: int  # bytes from the block's start: first not yet consumed
    sent: int  # bytes of all answers so far


class ConnectionRows:
    """The rows that one processor takes, writes and gives back."""

    def __init__(self, processor: int, control: Segment) -> None:
        self._words = control.words
        self._processor = processor
        row = processor_row(processor)
        self._used_word = row + PROCESSOR_ROWS_USED
        self._holder = self._words[row + PROCESSOR_INCARNATION] << _HOLDER_SHIFT
        self._holder |= processor
        self._first = processor * CONNECTIONS_PER_PROCESSOR
        self._free: list[int] = []
        self._find_free()
        # Rows of our range that others may set free.
        self._given_away = any(
            self._words[connection_row(row) + CONNECTION_OWNER] != processor + 1
            for row in live_rows(self._words, processor)
        )

    def _find_free(self) -> None:
        words, first = self._words, self._first
        untouched = first + words[self._used_word]
        free = [
            row
            for row in range(first, untouched)
            if not words[connection_row(row) + CONNECTION_STATE] & STATE_MASK
        ]
        free.extend(range(untouched, first + CONNECTIONS_PER_PROCESSOR))
        free.reverse()  # the lowest is taken first
        self._free = free

    def owned(self) -> Iterator[int]:
        """The rows in use that are this processor's, in any range of the table."""
        mine = self._processor + 1
        for row in live_rows(self._words):
            if self._words[connection_row(row) + CONNECTION_OWNER] == mine:
                yield row

    def take(self) -> int | None:
        """Return a free row's index, or None when all are in use."""
        if not self._free:
            if not self._given_away:
                return None
            self._find_free()
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
        cookie: int,
        listener: int,
        accept_sequence: int,
        now_ns: int,
        security: ConnectionSecurity = ConnectionSecurity.NONE,
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
        words[word + CONNECTION_ACTIVE] = now_ns
        for address_word, port_word, name in (
            (CONNECTION_LOCAL_ADDRESS, CONNECTION_LOCAL_PORT, sock.getsockname()),
            (CONNECTION_PEER_ADDRESS, CONNECTION_PEER_PORT, sock.getpeername()),
        ):
            packed, port = _pack_address(sock.family, name)
            high, low = _ADDRESS.unpack(packed)
            words[word + address_word] = high
            words[word + address_word + 1] = low
            words[word + port_word] = port
        # What the row's last connection left there.
        words[word + CONNECTION_SLOT] = 0
        words[word + CONNECTION_POSITION] = 0
        words[word + CONNECTION_EXTENT] = 0
        words[word + CONNECTION_SENT] = 0
        words[word + CONNECTION_PRINCIPAL] = 0
        words[word + CONNECTION_MUTED_UNTIL] = 0
        words[word + CONNECTION_ENCRYPTION] = 0
        words[word + CONNECTION_SECURITY] = security
        words[word + CONNECTION_OWNER] = self._processor + 1
        words[word + CONNECTION_HOLDER] = self._holder
        words[word + CONNECTION_COOKIE] = cookie
        generation = words[word + CONNECTION_STATE] & _KEEP_GENERATION
        words[word + CONNECTION_STATE] = generation + _GENERATION_STEP | _READING

    def authenticated(
        self,
        connection: int,
        principal: int,
        security: ConnectionSecurity,
        session_ends_ms: int,
    ) -> None:
        """Note who it is, and how long; nothing else of the row changes.

        Args:
            principal: number in the principals table.
            security: PRIVATE, or the mechanism.
            session_ends_ms: monotonic; 0: never.
        """
        words, word = self._words, connection_row(connection)
        words[word + CONNECTION_PRINCIPAL] = principal
        # Last: from here on a successor may carry it on.
        words[word + CONNECTION_SECURITY] = session_ends_ms << SESSION_SHIFT | security

    def encrypted(self, connection: int, encryption: int) -> None:
        """Note by what TLS: see encryption.py."""
        self._words[connection_row(connection) + CONNECTION_ENCRYPTION] = encryption

    def begin(self, word: int, base: int, sent: int) -> None:
        """Say where both streams are, of a connection that is still PRIVATE."""
        words = self._words
        copy = word + (words[word + CONNECTION_STATE] >> CONNECTION_COPY_SHIFT & 1)
        words[copy + CONNECTION_POSITION] = base << POSITION_SHIFT
        words[copy + CONNECTION_SENT] = sent

    def hold(self, connection: int, fd: int) -> None:
        """Note that its socket has come; whoever looks need not send it again."""
        word = connection_row(connection)
        self._words[word + CONNECTION_FD] = fd
        self._words[word + CONNECTION_HOLDER] = self._holder

    def set_state(self, word: int, state: ConnectionState, now_ns: int) -> None:
        words = self._words
        words[word + CONNECTION_ACTIVE] = now_ns
        words[word + CONNECTION_STATE] = (
            words[word + CONNECTION_STATE] & _KEEP_ALL_BUT_STATE | state
        )

    def finish(self, word: int, base: int, start: int, sent: int, now_ns: int) -> None:
        """A request is answered: move on in both streams at once, and read again."""
        words = self._words
        state = words[word + CONNECTION_STATE] ^ _OTHER_COPY
        copy = word + (state >> CONNECTION_COPY_SHIFT & 1)
        words[copy + CONNECTION_POSITION] = base << POSITION_SHIFT | start
        words[copy + CONNECTION_SENT] = sent
        words[word + CONNECTION_ACTIVE] = now_ns
        # The commit: killed before it, the answer is out and its successor says so.
        words[word + CONNECTION_STATE] = state & _KEEP_ALL_BUT_STATE | _READING

    def release(self, connection: int) -> None:
        """Give a row back. Its socket must be shut down already: see the keeper."""
        words, word = self._words, connection_row(connection)
        if words[word + CONNECTION_SLOT] > 0:
            words[word + CONNECTION_SLOT] = 0
        words[word + CONNECTION_EXTENT] = 0
        words[word + CONNECTION_STATE] &= _KEEP_GENERATION
        if 0 <= connection - self._first < CONNECTIONS_PER_PROCESSOR:
            self._free.append(connection)

    def give_away(self, connection: int, processor: int) -> None:
        """From this store on the row, and its socket, are another processor's."""
        self._given_away = True
        # Nobody has its socket until the new owner says so, which may be ourselves.
        self._words[connection_row(connection) + CONNECTION_HOLDER] = _NOBODY
        self._words[connection_row(connection) + CONNECTION_OWNER] = processor + 1

    def is_reading(self, connection: int) -> bool:
        """Whether nothing of it is with the handlers, or being answered."""
        state = self._words[connection_row(connection) + CONNECTION_STATE]
        return bool(state & STATE_MASK == _READING)

    def await_socket(self, connection: int) -> None:
        """Say of a row of ours that nobody has its socket: the keeper is to send it."""
        self._words[connection_row(connection) + CONNECTION_HOLDER] = _NOBODY

    def is_on_its_way(self, connection: int) -> bool:
        """Whether it is this processor's, and was given by one that lives, or lived."""
        words, word = self._words, connection_row(connection)
        return bool(
            words[word + CONNECTION_STATE] & STATE_MASK
            and words[word + CONNECTION_OWNER] == self._processor + 1
            and words[word + CONNECTION_HOLDER] == _NOBODY
        )

    def name(self, connection: int) -> str:
        """Kafka's form of a connection id: local-peer-index."""
        return connection_name(self._words, connection)


def live_rows(words: memoryview, *ranges: int) -> Iterator[int]:
    """The rows of all connections there are, or those in some processors' ranges."""
    for processor in ranges or range(MAX_PROCESSORS):
        first = processor * CONNECTIONS_PER_PROCESSOR
        used = words[processor_row(processor) + PROCESSOR_ROWS_USED]
        for row in range(first, first + used):
            if words[connection_row(row) + CONNECTION_STATE] & STATE_MASK:
                yield row


def has_cookie(words: memoryview, cookie: int) -> bool:
    """Whether a connection there is has this socket.

    By columns: row by row it took milliseconds among ten thousand, which in a storm of
    connections each new one had to wait for.
    """
    for processor in range(MAX_PROCESSORS):
        used = words[processor_row(processor) + PROCESSOR_ROWS_USED]
        first = connection_row(processor * CONNECTIONS_PER_PROCESSOR)
        end = first + used * CONNECTION_WORDS
        cookies = words[first + CONNECTION_COOKIE : end : CONNECTION_WORDS].tolist()
        if used and cookie in cookies:
            states = words[first + CONNECTION_STATE : end : CONNECTION_WORDS].tolist()
            pairs = zip(cookies, states, strict=True)
            if any(each == cookie and state & STATE_MASK for each, state in pairs):
                return True
    return False


def is_open(words: memoryview, connection: int, cookie: int) -> bool:
    """Whether a row is still about the connection that had this cookie."""
    word = connection_row(connection)
    return (
        words[word + CONNECTION_COOKIE] == cookie
        and words[word + CONNECTION_STATE] & STATE_MASK != 0
    )


def is_held(words: memoryview, connection: int) -> bool:
    """Whether the owner's living process has the connection's socket."""
    word = connection_row(connection)
    owner = words[word + CONNECTION_OWNER] - 1
    incarnation = words[processor_row(owner) + PROCESSOR_INCARNATION]
    held: bool = words[word + CONNECTION_HOLDER] == incarnation << _HOLDER_SHIFT | owner
    return held


def security_of(words: memoryview, connection: int) -> ConnectionSecurity:
    """Whether others can carry it on, and how it has authenticated."""
    word = words[connection_row(connection) + CONNECTION_SECURITY]
    return ConnectionSecurity(word & SECURITY_MASK)


def session_end_ms(words: memoryview, connection: int) -> int:
    """When its client must have authenticated again, monotonic; 0: never."""
    return int(words[connection_row(connection) + CONNECTION_SECURITY] >> SESSION_SHIFT)


def is_private(words: memoryview, connection: int) -> bool:
    """Whether it ends with its processor's process."""
    word = words[connection_row(connection) + CONNECTION_SECURITY]
    return bool(word & SECURITY_MASK == _PRIVATE)


def progress(words: memoryview, connection: int) -> Progress:
    """Where the request that is being read or answered begins, and its answer."""
    word = connection_row(connection)
    copy = word + (words[word + CONNECTION_STATE] >> CONNECTION_COPY_SHIFT & 1)
    position = words[copy + CONNECTION_POSITION]
    return Progress(
        position >> POSITION_SHIFT,
        position & POSITION_MASK,
        words[copy + CONNECTION_SENT],
    )


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


def address_words(family: int, name: object) -> tuple[tuple[int, int], int]:
    """An address of a socket as two words of its IPv6 form, and its port."""
    packed, port = _pack_address(family, name)
    high, low = _ADDRESS.unpack(packed)
    return (high, low), port


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
    if packed == _NO_ADDRESS[0]:
        host = "unix"
    elif packed.startswith(_V4_PREFIX):
        host = socket.inet_ntoa(packed[len(_V4_PREFIX) :])
    else:
        host = socket.inet_ntop(socket.AF_INET6, packed)
    return host, int(words[word + port_word])


assert CONNECTION_COOKIE < CONNECTION_WORDS
