"""Keep answers of handlers, so that the core (C code) gives them to equal requests.

Many clients send the same request again and again: ApiVersions and FindCoordinator when
they connect, Metadata of their topics every few minutes, ListOffsets while they measure
their lag. A handler that has answered such a request says in
``HandlerContext.repeatable`` that the answer holds for equal requests, and which
offsets in it are to be read anew for each. native/server/repeated_answers.h says what
the core compares before it repeats an answer, and draws the entries of its table.

An answer with an error is never repeated: errors are counted, and denials are logged.
Nor is one to which an authorization rule has added something, an answer of a throttled
request, or any Metadata, FindCoordinator or ListOffsets of a cluster, whose nodes come
and go without a record in the metadata log.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.ipc.arena import ANSWER_BYTES

if TYPE_CHECKING:
    from mpbroker.native import _core
    from mpbroker.server.repeated.repeatable import Repeatable

# Bounds of memory, for one handler process.
MAX_ANSWERS: Final = 1000
MAX_BYTES: Final = 1 << 20
# The core answers within the request's block: size field, correlation id, and this.
_MAX_ANSWER_BYTES: Final = ANSWER_BYTES - 8
_OFFSET: Final = Struct(">q")
_PLACE: Final = Struct("=4q")
# Stand for the offsets while their places are looked for. No offset is as large.
_FIRST_MARK: Final = 0x7D3A_91C6_5B2E_0000


class Answered(Protocol):
    """A request that Python has answered: see Request."""

    slot: int
    api_version: int
    flexible_response: bool


class RepeatedAnswers:
    """Fills the table of answers that the core of one handler process may repeat.

    Args:
        compiled: the object of the C core that has the table.
    """

    def __init__(self, compiled: _core.HandlerEnd) -> None:
        self._compiled = compiled
        self._table = compiled.repeatable
        self._bytes = 0

    def add(
        self, request: Answered, answer: bytes, repeatable: Repeatable | None = None
    ) -> None:
        """Let the core give an answer to each request that is equal to this one.

        If the table is full, it is emptied first. Do nothing if the request or the
        answer is too long for the core, or if the client has disconnected.

        Args:
            request: the request; its slot still names the client.
            answer: the encoded body of the answer.
            repeatable: has the offsets in it that are read anew; None: there are none.
        """
        head = b"\0" if request.flexible_response else b""
        if len(head) + len(answer) > _MAX_ANSWER_BYTES:
            return
        key = self._compiled.answer_key(request.slot)
        places: bytes | None = b""
        if repeatable is not None and repeatable.places:
            places = _find_places(repeatable, answer, request.api_version, len(head))
        if key is None or places is None:
            return
        size = len(key) + len(head) + len(answer) + len(places)
        table = self._table
        if not table:
            self._bytes = 0  # it was emptied
        if len(table) >= MAX_ANSWERS or self._bytes + size > MAX_BYTES:
            table.clear()
            self._bytes = 0
        self._bytes += size
        table[key] = head + answer, places


def _find_places(
    repeatable: Repeatable, answer: bytes, version: int, head: int
) -> bytes | None:
    """Find the places of offsets in an answer, and pack them for the core.

    Encode the response once more with a mark in place of each offset.

    Args:
        repeatable: the response, and which offsets are looked for.
        answer: the encoded response.
        version: the version in which it is encoded.
        head: how many bytes lie between the correlation id and the body.

    Returns:
        None if the marks are not found, each once and in place of its offset.
    """
    places = repeatable.places
    offsets = [place.part.offset for place in places]
    marks = [_FIRST_MARK + number for number in range(len(places))]
    for place, mark in zip(places, marks, strict=True):
        place.part.offset = mark
    marked = bytearray(repeatable.response.encode(version))
    for place, offset in zip(places, offsets, strict=True):
        place.part.offset = offset
    packed = b""
    for place, mark, offset in zip(places, marks, offsets, strict=True):
        at = marked.find(_OFFSET.pack(mark))
        if at < 0:
            return None
        _OFFSET.pack_into(marked, at, offset)
        packed += _PLACE.pack(head + at, place.row, place.kind, place.since)
    return packed if marked == answer else None
