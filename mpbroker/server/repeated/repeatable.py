"""Say that an answer holds for equal requests, too, and what in it is read anew.

Handlers say it, and repeated_answers.py tells the core (C code).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from mpbroker.base.named_tuple import NamedTuple

if TYPE_CHECKING:
    from mpbroker.protocol.message import Message


class OffsetKind(IntEnum):
    """Says which offset of a partition is meant: see native/server/repeated_answers.h.

    On one node the end offset is the high watermark.
    """

    LOG_START = 0
    LOG_END = 1
    LAST_STABLE = 2


class HasOffset(Protocol):
    """A part of a response, with a field that holds an offset."""

    offset: int


class OffsetPlace(NamedTuple):
    """Names an offset in a response that is read anew for each request.

    Attributes:
        part: the part of the response that has the offset, in its field ``offset``.
        row: the number of the partition's row (its entry in shared memory).
        kind: which of the partition's offsets it is.
        since: the rest of the answer holds while the offset is not below this one.
    """

    part: HasOffset
    row: int
    kind: OffsetKind
    since: int


class Repeatable(NamedTuple):
    """Says that the answer to a request holds for equal requests, too.

    Attributes:
        response: the response that was encoded.
        places: the offsets in it that are read anew for each request.
        metadata_version: ``TopicRegistry.version`` before the handler was called. An
            answer during which metadata has changed, perhaps by the request itself,
            may not be repeated.
        offline_changes: ``PartitionTable.offline_changes`` before the handler was
            called, for the same reason.
        rules: the version of the authorizer's rules; None: there is no authorizer, or
            it was not asked.
    """

    response: Message
    places: Sequence[OffsetPlace]
    metadata_version: int
    offline_changes: int
    rules: int | None
