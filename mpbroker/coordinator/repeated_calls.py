"""Answer requests that are equal to earlier ones of the same connection.

A member's heartbeats are equal byte by byte, apart from their correlation ids, and so
is what a monitor sends that asks for a group's offsets again and again. A state machine
that has executed such a request may leave a function in ``Call.again``. This module
keeps the encoded answer with that function, and calls it in place of the state machine
when an equal request comes. So such a request is neither decoded nor authorized again,
and its answer is not encoded again. The commits of a consumer are equal apart from
their offsets and leader epochs; commit_layout.py finds these.

What the answer depends on of the client is the connection's: its address, listener and
principal. So the connection is a part of the key. The rest the function looks at.

Answers are kept when they are sent, so what they show is on disk. Not kept are errors
of whole requests, answers to which an authorization rule has added something, and
answers of a cluster's nodes, which may lose a group without a record. While any client
has a quota, no answer is repeated, since each request is charged.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mpbroker.coordinator.commit_layout import (
    CommitLayout,
    CommitNumbers,
    layout_of,
)
from mpbroker.coordinator.outbox import Again, Call, EncodedResponse, Outbox
from mpbroker.ipc.layout import (
    CONNECTION_PRINCIPAL,
    CONNECTION_SLOT,
    CONNECTION_STATE,
    GENERATION_SHIFT,
    connection_row,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.server.request import parse_request

if TYPE_CHECKING:
    from mpbroker.network.request_channel import HandlerEnd, ReceivedRequest
    from mpbroker.protocol.message import Message
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

_NO_NUMBERS: Final = CommitNumbers((), ())

# Connection, its generation, its principal; and the request without its correlation id,
# of a commit without its numbers.
_Key = tuple[int, int, int, tuple[bytes, ...]]


class Rules(Protocol):
    """Says whether the authorizer's rules have changed; see Authorization."""

    @property
    def version(self) -> int | None: ...


class _Answered(NamedTuple):
    size: bytes  # the frame's size field
    rest: bytes  # what comes behind the correlation id
    again: Again
    rules: int | None
    response: type[Message]
    memory: int  # about how many bytes the entry has


class RepeatedCalls:
    """Keeps answers of the coordinator, and gives them to equal requests.

    Args:
        words: the control segment (shared memory of all processes), in 64-bit words.
        channel: has the requests, and sends answers.
        outbox: gets the answers that rest on records.
        quotas: say whether requests are charged; None: there are no quotas.
        rules: the authorizer's; None: there is no authorizer.
    """

    def __init__(
        self,
        words: memoryview,
        channel: HandlerEnd,
        outbox: Outbox,
        quotas: ClientQuotas | None,
        rules: Rules | None,
    ) -> None:
        self._words = words
        self._channel = channel
        self._out = outbox
        self._quotas = quotas
        self._rules = rules
        self._table: dict[_Key, _Answered] = {}
        self._bytes = 0
        # Of commits, by connection and size: where the numbers are.
        self._layouts: dict[tuple[int, int], CommitLayout] = {}
        # The API keys of the table, by which most other requests are told at once.
        self._apis: set[int] = set()

    def __len__(self) -> int:
        return len(self._table)

    def repeat(self, received: ReceivedRequest, now_ms: int) -> bool:
        """Execute a request, if it is equal to one whose answer may be repeated.

        Args:
            received: the request.
            now_ms: the time.

        Returns:
            False: the request is to be executed as any other.
        """
        slot, connection, frame, _ = received
        if frame[_API_KEY] not in self._apis:
            return False
        key, numbers = self._read(slot, connection, frame)
        found = None if key is None else self._table.get(key)
        if key is None or found is None:
            return False
        after = None
        if self._may_repeat(found.rules):
            after = found.again(numbers, now_ms)
        if after is None:
            self._forget(key)
            return False
        if after:
            self._answer_later(received, found, after)
        else:
            answer = b"".join((found.size, frame[_CORRELATION_ID], found.rest))
            self._channel.send_bytes(slot, answer)
        return True

    def _answer_later(
        self, received: ReceivedRequest, found: _Answered, after: tuple[int, ...]
    ) -> None:
        """Let a request be answered when logs are on disk."""
        request = parse_request(*received)
        body = found.rest[1:] if request.flexible_response else found.rest
        version = request.api_version
        call = Call(version, request.client_id or "", "", request)
        self._out.answer(call, EncodedResponse(found.response, version, body), after)
        self._channel.note_wait(request.slot, time.monotonic_ns())

    def keep(self, call: Call, response: type[Message], answer: bytes) -> None:
        """Keep the answer to a call, if it may be repeated.

        To be called before the answer is sent: until then its slot has the request.

        Args:
            call: the request.
            response: the class of the answer.
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
        if max(len(frame), len(answer)) > MAX_FRAME_BYTES:
            return
        if call.commit is not None:
            layout = layout_of(bytes(frame), call.commit, call.version)
            if layout is None:
                return
            self._add_bytes(len(frame))
            self._layouts[connection, len(frame)] = layout
        key, _ = self._read(request.slot, connection, frame)
        if key is None:
            return
        self._forget(key)
        made = _Answered(
            answer[: _CORRELATION_ID.start],
            answer[_CORRELATION_ID.stop :],
            call.again,
            rules,
            response,
            _ENTRY_BYTES + len(frame) + len(answer),
        )
        self._add_bytes(made.memory)
        self._table[key] = made
        self._apis.add(frame[_API_KEY])

    def _add_bytes(self, count: int) -> None:
        """Note that memory is used; before it becomes too much, forget everything."""
        if self._bytes + count > MAX_BYTES:
            self._table.clear()
            self._layouts.clear()
            self._bytes = 0
        self._bytes += count

    def _may_repeat(self, rules: int | None) -> bool:
        """Return whether answers under these rules of the authorizer still hold.

        None is returned by an authorizer whose decisions must not be kept.
        """
        if self._quotas is not None and self._quotas.count_requests:
            return False
        if self._rules is None:
            return True
        return rules is not None and rules == self._rules.version

    def _read(
        self, slot: int, connection: int, frame: memoryview
    ) -> tuple[_Key | None, CommitNumbers]:
        """Return the key of a slot's request, and the numbers of a commit.

        The key is None if the client has disconnected.
        """
        numbers = _NO_NUMBERS
        fixed: tuple[bytes, ...]
        layout = self._layouts.get((connection, len(frame)))
        if layout is not None and frame[_API_KEY] == ApiKey.OFFSET_COMMIT:
            fixed, numbers = layout.read(frame)
        else:
            head, rest = frame[: _CORRELATION_ID.start], frame[_CORRELATION_ID.stop :]
            fixed = bytes(head), bytes(rest)
        words, row = self._words, connection_row(connection)
        key = (
            connection,
            words[row + CONNECTION_STATE] >> GENERATION_SHIFT,
            words[row + CONNECTION_PRINCIPAL],
            fixed,
        )
        # Read last: the slot is cleared before the row is another connection's.
        is_connected = words[row + CONNECTION_SLOT] == slot + 1
        return key if is_connected else None, numbers

    def _forget(self, key: _Key) -> None:
        found = self._table.pop(key, None)
        if found is not None:
            self._bytes -= found.memory
