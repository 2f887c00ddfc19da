"""Find the client.id of requests, for the lines of the request log.

Processors do not note it: it is text, for which their notes in shared memory have no
room. But a request's bytes stay in shared memory, in the block of its slot (the entry
of one request in flight), until the connection's next request comes, and the slot says
which request they are. So a reader finds the header of the request itself, or of the
connection's latest request. The latter has the same client.id: clients do not change it
while they are connected.

    header                            is used if
    the request's own                 it has the request's API, version, correlation id
    the connection's latest request's it is at the beginning of the block: a newer
                                      request there begins with a header, too

No request is given another client's client.id: the connection's row (its record in
shared memory) says when its present client connected.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final

from mpbroker.ipc.counters.request_metrics import LoggedRequest
from mpbroker.ipc.layout import (
    CONNECTION_OPENED,
    CONNECTION_SLOT,
    SLOT_BLOCK,
    SLOT_CONNECTION,
    SLOT_RECEIVED,
    SLOT_REQUEST_OFFSET,
    SLOT_WORDS,
    connection_row,
    slot_row,
    slots_in_use,
)
from mpbroker.ipc.segment import Segment

# Size of the frame, API key, version, correlation id, length of client.id.
_HEAD: Final = Struct(">ihhih")
_SIZE_BYTES: Final = 4
# A client.id may have 32 KiB, which is too much for a line; real ones are short.
_MAX_BYTES: Final = 255
_MAX_KNOWN: Final = 65_536


class ClientIds:
    """Finds the client.id of logged requests.

    Args:
        words: the words of the control segment, the shared memory with the entries of
            requests and connections.
        arena: the segment with the bytes of requests. It is read by system calls: a
            read through the mapping would allocate pages that no process has touched.
    """

    def __init__(self, words: memoryview, arena: Segment) -> None:
        self._words = words
        self._arena = arena
        # By connection: when its client connected, ns, and its client.id.
        self._known: dict[int, tuple[int, str | None]] = {}

    def look(self, processor: int, requests: Sequence[LoggedRequest]) -> None:
        """Remember the client.id of logged requests whose headers are still in memory.

        Args:
            processor: the id of the processor that has served the requests.
            requests: the requests, as the processor has logged them.
        """
        slots = slots_in_use(self._words, processor)
        if not requests or not slots:
            return
        self._look_for_themselves(slots, requests)
        for each in {each.connection: each for each in requests}.values():
            if self.of(each) is None:
                self._look_for_the_latest(slots, each)

    def of(self, each: LoggedRequest) -> str | None:
        """Return the client.id that `look` has found for a request's connection.

        None: it has none, or it is not known.
        """
        came_ns, text = self._known.get(each.connection, (0, None))
        opened_ns = self._opened_ns(each.connection)
        if each.received_ns < came_ns or came_ns < opened_ns <= each.received_ns:
            return None  # the row had another client then
        return text

    def _look_for_themselves(
        self, slots: range, requests: Iterable[LoggedRequest]
    ) -> None:
        wanted = {(each.connection, each.received_ns): each for each in requests}
        words, first, end = self._words, slot_row(slots.start), slot_row(slots.stop)
        # A column at a time: a row at a time takes a hundred times as long.
        columns = (
            words[first + word : end : SLOT_WORDS].tolist()
            for word in (SLOT_CONNECTION, SLOT_RECEIVED, SLOT_REQUEST_OFFSET)
        )
        for connection, received_ns, offset in zip(*columns, strict=True):
            each = wanted.get((connection, received_ns))
            if each is None:
                continue
            opened_ns = self._opened_ns(connection)
            if opened_ns > received_ns:
                continue  # its row is another client's already
            found = self._read(offset)
            head = (each.api_key, each.api_version, each.correlation_id)
            if found is not None and found[0] == head:
                self._learn(connection, opened_ns, found[1])

    def _look_for_the_latest(self, slots: range, each: LoggedRequest) -> None:
        words, row = self._words, connection_row(each.connection)
        slot = words[row + CONNECTION_SLOT] - 1
        opened_ns = words[row + CONNECTION_OPENED]
        if slot not in slots or opened_ns > each.received_ns:
            return
        at = slot_row(slot)
        offset = words[at + SLOT_REQUEST_OFFSET]
        if (
            words[at + SLOT_CONNECTION] != each.connection
            or words[at + SLOT_RECEIVED] < opened_ns  # an earlier client's request
            or offset != words[at + SLOT_BLOCK] + _SIZE_BYTES
        ):
            return
        found = self._read(offset)
        is_still_its = (
            words[row + CONNECTION_SLOT] == slot + 1
            and words[row + CONNECTION_OPENED] == opened_ns
        )
        if found is not None and is_still_its:
            self._learn(each.connection, opened_ns, found[1])

    def _read(self, offset: int) -> tuple[tuple[int, int, int], str | None] | None:
        """Read a request's header from shared memory.

        Returns:
            API key, version and correlation id; and the client.id, None if the request
            has none. None if the bytes are no request header.
        """
        data = os.pread(
            self._arena.fd, _HEAD.size + _MAX_BYTES, max(0, offset - _SIZE_BYTES)
        )
        if len(data) < _HEAD.size:
            return None
        size, key, version, correlation_id, length = _HEAD.unpack_from(data)
        head = (key, version, correlation_id)
        if length < 0:
            return head, None
        if _HEAD.size + length > size + _SIZE_BYTES:
            return None  # longer than its frame
        name = data[_HEAD.size : _HEAD.size + length].decode(errors="replace")
        return head, name + "..." * (length > _MAX_BYTES)

    def _learn(self, connection: int, opened_ns: int, text: str | None) -> None:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[connection] = (opened_ns, text)

    def _opened_ns(self, connection: int) -> int:
        return self._words[connection_row(connection) + CONNECTION_OPENED]
