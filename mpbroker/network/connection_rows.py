"""Take, write and free the shared rows of one processor's connections.

A row is a connection's record in shared memory. A connection keeps its row from its
first byte to its last, although its processor may change. A processor takes rows for
new connections from its own range of the table, may be given rows from the ranges of
other processors, and gives rows away. So a row names its owner. When a row becomes
free, the processor with its range finds it again.
"""

import socket
import struct
from collections.abc import Iterator
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import (
    CONNECTION_ACCEPT_SEQUENCE,
    CONNECTION_ACTIVE,
    CONNECTION_BY_TOKEN,
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
    SLOT_STATE,
    STATE_MASK,
    ConnectionSecurity,
    ConnectionState,
    connection_row,
    processor_row,
    slot_row,
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
    """Counts a connection's bytes up to the end of its last answered request.

    They are read from the connection's record in shared memory, so that another process
    can continue the connection.
    """

    base: int  # bytes of the client's stream in front of the block
    start: int  # bytes from the block's start: first byte not yet consumed
    sent: int  # bytes of all answers so far


class ConnectionRows:
    """Takes, writes and frees the records (rows) of one processor's connections."""

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
        # Whether other processors may free rows of our range.
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
        """Yield the indexes of the connections' records that this processor owns.

        They may be in any processor's range of the table.
        """
        mine = self._processor + 1
        for row in live_rows(self._words):
            if self._words[connection_row(row) + CONNECTION_OWNER] == mine:
                yield row

    @property
    def free(self) -> int:
        """How many records of this processor's range are free, as far as is known."""
        return len(self._free)

    def take(self) -> int | None:
        """Take a free record of this processor's range for a connection.

        Return its index, or None if all records of the range are in use.
        """
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
        """Fill in the record of a new connection, and set its state to READING.

        The state is written last, and makes the record valid.

        Raises:
            OSError: the client has closed the connection.
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
        # Remove the values of the row's last connection.
        words[word + CONNECTION_SLOT] = 0
        words[word + CONNECTION_POSITION] = 0
        words[word + CONNECTION_EXTENT] = 0
        words[word + CONNECTION_SENT] = 0
        words[word + CONNECTION_PRINCIPAL] = 0
        words[word + CONNECTION_MUTED_UNTIL] = 0
        words[word + CONNECTION_ENCRYPTION] = 0
        words[word + CONNECTION_BY_TOKEN] = 0
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
        *,
        by_token: bool = False,
    ) -> None:
        """Note who the client is, how it has authenticated, and when its session ends.

        From the last store of this method on, another process may continue the
        connection if this one dies, unless it is PRIVATE. The caller has stored its
        byte counts before (``begin``).

        Args:
            connection: the index of the connection's row (its record).
            principal: the number of its principal in the table of principals.
            security: PRIVATE, or the SASL mechanism.
            session_ends_ms: end of the session, monotonic; 0: it has no end.
            by_token: whether the client has authenticated by a delegation token.
        """
        words, word = self._words, connection_row(connection)
        words[word + CONNECTION_PRINCIPAL] = principal
        words[word + CONNECTION_BY_TOKEN] = by_token
        # Last: from here on a successor may continue the connection.
        words[word + CONNECTION_SECURITY] = session_ends_ms << SESSION_SHIFT | security

    def encrypted(self, connection: int, encryption: int) -> None:
        """Note a connection's version of TLS and cipher suite.

        Args:
            connection: the index of the connection's row (its record).
            encryption: both as one number: see encryption.py.
        """
        self._words[connection_row(connection) + CONNECTION_ENCRYPTION] = encryption

    def begin(self, word: int, base: int, sent: int) -> None:
        """Store how many bytes a connection received and sent up to its authentication.

        Until then it was PRIVATE; from here on another process can continue it.

        Args:
            word: the first word of the connection's row, its record in shared memory.
            base: the bytes received.
            sent: the bytes sent.
        """
        words = self._words
        copy = word + (words[word + CONNECTION_STATE] >> CONNECTION_COPY_SHIFT & 1)
        words[copy + CONNECTION_POSITION] = base << POSITION_SHIFT
        words[copy + CONNECTION_SENT] = sent

    def hold(self, connection: int, fd: int) -> None:
        """Note that this process has a connection's socket.

        So the keeper, which has a duplicate of every socket, need not send it.

        Args:
            connection: the index of the connection's row.
            fd: this process's descriptor of the socket.
        """
        word = connection_row(connection)
        self._words[word + CONNECTION_FD] = fd
        self._words[word + CONNECTION_HOLDER] = self._holder

    def set_state(self, word: int, state: ConnectionState, now_ns: int) -> None:
        words = self._words
        words[word + CONNECTION_ACTIVE] = now_ns
        words[word + CONNECTION_STATE] = (
            words[word + CONNECTION_STATE] & _KEEP_ALL_BUT_STATE | state
        )

    def finish(
        self,
        word: int,
        base: int,
        start: int,
        sent: int,
        now_ns: int,
        state: int = _READING,
    ) -> None:
        """Store a connection's progress after an answered request; set it to READING.

        The store of the state is the commit.

        Args:
            word: the first word of the connection's row.
            base: bytes of the client's stream in front of those in the block, the
                buffer of its slot in shared memory.
            start: bytes from the block's start to the first byte not yet consumed.
            sent: bytes of all answers so far.
            now_ns: the time (CLOCK_MONOTONIC).
            state: not READING if the next request is in flight already.
        """
        words = self._words
        before = words[word + CONNECTION_STATE] ^ _OTHER_COPY
        copy = word + (before >> CONNECTION_COPY_SHIFT & 1)
        words[copy + CONNECTION_POSITION] = base << POSITION_SHIFT | start
        words[copy + CONNECTION_SENT] = sent
        words[word + CONNECTION_ACTIVE] = now_ns
        # The commit. If we are killed before it, the answer is sent, and the successor
        # finds that out.
        words[word + CONNECTION_STATE] = before & _KEEP_ALL_BUT_STATE | state

    def release(self, connection: int) -> None:
        """Free a connection's record.

        The socket must be shut down already: see keeper.py.
        """
        words, word = self._words, connection_row(connection)
        if words[word + CONNECTION_SLOT] > 0:
            words[word + CONNECTION_SLOT] = 0
        words[word + CONNECTION_EXTENT] = 0
        words[word + CONNECTION_STATE] &= _KEEP_GENERATION
        if 0 <= connection - self._first < CONNECTIONS_PER_PROCESSOR:
            self._free.append(connection)

    def give_away(self, connection: int, processor: int) -> None:
        """Make another processor a connection's owner; the caller sends the socket."""
        self._given_away = True
        # No process has its socket until the new owner says so. That may be ourselves.
        self._words[connection_row(connection) + CONNECTION_HOLDER] = _NOBODY
        self._words[connection_row(connection) + CONNECTION_OWNER] = processor + 1

    def is_reading(self, connection: int) -> bool:
        """Return whether a connection has no request in flight and no unsent answer."""
        state = self._words[connection_row(connection) + CONNECTION_STATE]
        return bool(state & STATE_MASK == _READING)

    def await_socket(self, connection: int) -> None:
        """Note that no process has a connection's socket, so that the keeper sends it.

        The keeper is the process with a duplicate of every client's socket.
        """
        self._words[connection_row(connection) + CONNECTION_HOLDER] = _NOBODY

    def is_on_its_way(self, connection: int) -> bool:
        """Return whether this processor owns a connection but still lacks its socket.

        Then no process but the keeper has the socket.
        """
        words, word = self._words, connection_row(connection)
        return bool(
            words[word + CONNECTION_STATE] & STATE_MASK
            and words[word + CONNECTION_OWNER] == self._processor + 1
            and words[word + CONNECTION_HOLDER] == _NOBODY
        )

    def name(self, connection: int) -> str:
        """Return a connection's id in Kafka's form: local-peer-index.

        Local and peer are address and port; the index is that of the connection's
        record.
        """
        return connection_name(self._words, connection)


def live_rows(words: memoryview, *ranges: int) -> Iterator[int]:
    """Yield the indexes of the connections' records in shared memory that are in use.

    Args:
        words: the words of the control segment, which has the table of these rows.
        ranges: ids of processors: yield only rows from their ranges of the table.
            Without any, yield all rows.
    """
    for processor in ranges or range(MAX_PROCESSORS):
        first = processor * CONNECTIONS_PER_PROCESSOR
        used = words[processor_row(processor) + PROCESSOR_ROWS_USED]
        for row in range(first, first + used):
            if words[connection_row(row) + CONNECTION_STATE] & STATE_MASK:
                yield row


def principals_in_use(words: memoryview) -> set[int]:
    """Return the numbers of the principals of connections and of executed requests.

    A principal is a client's user, and rows (records of connections) have its number.
    If a connection closes while its request is executed, its row keeps the principal
    until another connection takes the row, and the request's slot as a negative number.
    Such a principal counts as long as the slot is in use.
    """
    found: set[int] = set()
    for processor in range(MAX_PROCESSORS):
        used = words[processor_row(processor) + PROCESSOR_ROWS_USED]
        first = connection_row(processor * CONNECTIONS_PER_PROCESSOR)
        end = first + used * CONNECTION_WORDS
        states, principals, slots = (
            words[first + word : end : CONNECTION_WORDS].tolist()
            for word in (CONNECTION_STATE, CONNECTION_PRINCIPAL, CONNECTION_SLOT)
        )
        found.update(
            principal
            for state, principal, slot in zip(states, principals, slots, strict=True)
            if state & STATE_MASK
            or (slot < 0 and words[slot_row(-slot - 1) + SLOT_STATE] & STATE_MASK)
        )
    return found


def has_cookie(words: memoryview, cookie: int) -> bool:
    """Return whether an open connection has the socket with this cookie.

    The cookie is the kernel's number of the socket. The table of the connections'
    records is read by columns. To read ten thousand records one by one took
    milliseconds for each new connection.
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
    """Return whether a record is still that of the connection with this cookie.

    The cookie is the kernel's number of a socket; the records are in shared memory.
    """
    word = connection_row(connection)
    return (
        words[word + CONNECTION_COOKIE] == cookie
        and words[word + CONNECTION_STATE] & STATE_MASK != 0
    )


def is_held(words: memoryview, connection: int) -> bool:
    """Return whether the processor that owns a connection has its socket.

    False if the socket was with a process of this processor that has died since, or is
    on the way to another owner.
    """
    word = connection_row(connection)
    owner = words[word + CONNECTION_OWNER] - 1
    incarnation = words[processor_row(owner) + PROCESSOR_INCARNATION]
    held: bool = words[word + CONNECTION_HOLDER] == incarnation << _HOLDER_SHIFT | owner
    return held


def security_of(words: memoryview, connection: int) -> ConnectionSecurity:
    """Return a connection's SASL mechanism, or NONE, or PRIVATE.

    PRIVATE means that no other process can continue the connection, for example because
    of TLS.
    """
    word = words[connection_row(connection) + CONNECTION_SECURITY]
    return ConnectionSecurity(word & SECURITY_MASK)


def is_by_token(words: memoryview, connection: int) -> bool:
    """Return whether a connection's client authenticated by a delegation token."""
    return bool(words[connection_row(connection) + CONNECTION_BY_TOKEN])


def session_end_ms(words: memoryview, connection: int) -> int:
    """Return when a connection's SASL session ends, in monotonic ms; 0: never."""
    return int(words[connection_row(connection) + CONNECTION_SECURITY] >> SESSION_SHIFT)


def is_private(words: memoryview, connection: int) -> bool:
    """Return whether a connection ends with the process that serves it.

    Such a connection is over TLS or a Unix socket, or has not authenticated yet, or has
    several requests in flight (pipelines.py).
    """
    row = connection_row(connection)
    return bool(
        words[row + CONNECTION_SECURITY] & SECURITY_MASK == _PRIVATE
        or words[row + CONNECTION_STATE] & STATE_MASK == ConnectionState.PIPELINED
    )


def progress(words: memoryview, connection: int) -> Progress:
    """Return the bytes received and sent before the current request and its answer."""
    word = connection_row(connection)
    copy = word + (words[word + CONNECTION_STATE] >> CONNECTION_COPY_SHIFT & 1)
    position = words[copy + CONNECTION_POSITION]
    return Progress(
        position >> POSITION_SHIFT,
        position & POSITION_MASK,
        words[copy + CONNECTION_SENT],
    )


def connection_name(words: memoryview, connection: int) -> str:
    """Return a connection's name: ``local:port-peer:port-row``."""
    local, peer = local_address(words, connection), peer_address(words, connection)
    return f"{local[0]}:{local[1]}-{peer[0]}:{peer[1]}-{connection}"


def local_address(words: memoryview, connection: int) -> tuple[str, int]:
    """Return the local address and port that the client has connected to."""
    return _address(words, connection, CONNECTION_LOCAL_ADDRESS, CONNECTION_LOCAL_PORT)


def peer_address(words: memoryview, connection: int) -> tuple[str, int]:
    """Return the client's address and port."""
    return _address(words, connection, CONNECTION_PEER_ADDRESS, CONNECTION_PEER_PORT)


def listener_index(words: memoryview, connection: int) -> int:
    return int(words[connection_row(connection) + CONNECTION_LISTENER])


def address_words(family: int, name: object) -> tuple[tuple[int, int], int]:
    """Return a socket's address as two words of its IPv6 form, and its port.

    The address and the port of a Unix socket are all 0.

    Args:
        family: AF_INET, AF_INET6 or AF_UNIX.
        name: what getsockname() or getpeername() has returned.
    """
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
