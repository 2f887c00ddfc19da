"""Answer requests that are equal to earlier ones of the same connection.

A member's heartbeats are equal byte by byte, apart from their correlation ids, and so
is what a monitor sends that asks for a group's offsets again and again. A state machine
that has executed such a request may leave a function in ``Call.again``. This module
keeps the encoded answer with that function, and calls it in place of the state machine
when an equal request comes. So such a request is neither decoded nor authorized again,
and its answer is not encoded again.

What the answer depends on of the client is the connection's: its address, listener and
principal. So the connection is a part of the key. The rest the function looks at; it
returns False if the answer may be another one by now.

Answers are kept when they are sent, so what they show is on disk. Not kept are errors
of whole requests, answers to which an authorization rule has added something, and
answers of a cluster's nodes, which may lose a group without a record. While any client
has a quota, no answer is repeated, since each request is charged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mpbroker.ipc.layout import (
    CONNECTION_PRINCIPAL,
    CONNECTION_SLOT,
    CONNECTION_STATE,
    GENERATION_SHIFT,
    connection_row,
)

if TYPE_CHECKING:
    from mpbroker.coordinator.outbox import Again, Call
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.server.quotas.client_quotas import ClientQuotas
    from mpbroker.server.request import Request

# A bound of memory, with about 1 KiB for each member of groups; for long requests and
# answers less is saved.
MAX_BYTES: Final = 16 * 1024 * 1024
MAX_FRAME_BYTES: Final = 2048
_ENTRY_BYTES: Final = 1024  # of the objects of an entry, beside the two frames
_API_KEY: Final = 1  # the low byte: no API has a key above 127
# In a request these bytes are behind its API and version, in an answer behind its size.
_CORRELATION_ID: Final = slice(4, 8)

# Connection, its generation, its principal, and the request in two parts.
_Key = tuple[int, int, int, bytes, bytes]


class Rules(Protocol):
    """Says whether the authorizer's rules have changed; see Authorization."""

    @property
    def version(self) -> int | None: ...


class _Answered(NamedTuple):
    size: bytes  # the frame's size field
    rest: bytes  # what comes behind the correlation id
    again: Again
    rules: int | None


class RepeatedCalls:
    """Keeps answers of the coordinator, and gives them to equal requests.

    Args:
        words: the control segment (shared memory of all processes), in 64-bit words.
        channel: has the requests, and sends answers.
        quotas: say whether requests are charged; None: there are no quotas.
        rules: the authorizer's; None: there is no authorizer.
    """

    def __init__(
        self,
        words: memoryview,
        channel: HandlerEnd,
        quotas: ClientQuotas | None,
        rules: Rules | None,
    ) -> None:
        self._words = words
        self._channel = channel
        self._quotas = quotas
        self._rules = rules
        self._table: dict[_Key, _Answered] = {}
        self._bytes = 0
        self._apis: set[int] = (
            set()
        )  # API keys in the table: a look before a key is made

    def __len__(self) -> int:
        return len(self._table)

    def repeat(
        self, slot: int, connection: int, frame: memoryview, now_ms: int
    ) -> bool:
        """Answer a request, if it is equal to one whose answer may be repeated.

        Args:
            slot: the request's slot, its entry in shared memory.
            connection: the number of the connection's row there.
            frame: the request, with its header.
            now_ms: the time.

        Returns:
            False if nothing was done: the request is to be executed.
        """
        if frame[_API_KEY] not in self._apis:
            return False
        key = self._key(slot, connection, frame)
        found = self._table.get(key) if key is not None else None
        if key is None or found is None:
            return False
        if not self._may_repeat(found.rules) or not found.again(now_ms):
            self._forget(key)
            return False
        answer = b"".join((found.size, frame[_CORRELATION_ID], found.rest))
        self._channel.send_bytes(slot, answer)
        return True

    def keep(self, call: Call, answer: bytes) -> None:
        """Keep the answer to a call, if it may be repeated.

        To be called before the answer is sent: until then its slot has the request.

        Args:
            call: the request.
            answer: the answer, with its size field.
        """
        request: Request = call.request
        rules = None if call.access is None else call.access.version
        if (
            call.again is None
            or call.amend is not None
            or request.throttle_ms
            or not self._may_repeat(rules)
        ):
            return
        _, connection, frame, _ = self._channel.request(request.slot)
        if len(frame) > MAX_FRAME_BYTES or len(answer) > MAX_FRAME_BYTES:
            return
        key = self._key(request.slot, connection, frame)
        if key is None:
            return
        self._forget(key)
        made = _Answered(
            answer[: _CORRELATION_ID.start],
            answer[_CORRELATION_ID.stop :],
            call.again,
            rules,
        )
        size = _size_of(key, made)
        if self._bytes + size > MAX_BYTES:
            self._table.clear()
            self._bytes = 0
        self._bytes += size
        self._table[key] = made
        self._apis.add(frame[_API_KEY])

    def _may_repeat(self, rules: int | None) -> bool:
        """Return whether answers under these rules of the authorizer still hold.

        None is returned by an authorizer whose decisions must not be kept.
        """
        if self._quotas is not None and self._quotas.count_requests:
            return False
        if self._rules is None:
            return True
        return rules is not None and rules == self._rules.version

    def _key(self, slot: int, connection: int, frame: memoryview) -> _Key | None:
        """Return the key of a slot's request; None: its client has disconnected."""
        words, row = self._words, connection_row(connection)
        key = (
            connection,
            words[row + CONNECTION_STATE] >> GENERATION_SHIFT,
            words[row + CONNECTION_PRINCIPAL],
            bytes(frame[: _CORRELATION_ID.start]),
            bytes(frame[_CORRELATION_ID.stop :]),
        )
        # Read last: the slot is cleared before the row is another connection's.
        return key if words[row + CONNECTION_SLOT] == slot + 1 else None

    def _forget(self, key: _Key) -> None:
        found = self._table.pop(key, None)
        if found is not None:
            self._bytes -= _size_of(key, found)


def _size_of(key: _Key, answered: _Answered) -> int:
    return _ENTRY_BYTES + len(key[4]) + len(answered.rest)
