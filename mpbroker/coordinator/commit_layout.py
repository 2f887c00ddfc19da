"""Read OffsetCommit requests by the layout of an earlier one, in one call.

The commits of a consumer differ in offsets and leader epochs, as long as it has the
same partitions. A CommitLayout has the bytes between these numbers. So a request is
compared with an earlier one, and its numbers are read, without decoding it.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from mpbroker.protocol.messages.offset_commit import OffsetCommitRequest
from mpbroker.protocol.primitives import Buffer

_LEADER_EPOCH_SINCE: Final = 6
_NO_EPOCH: Final = -1
# Stand for the offsets while their places are looked for. No offset is as large.
_FIRST_MARK: Final = 0x7D3A_91C6_5B2E_0000
_MARK: Final = Struct(">q")
# API and version, then the correlation id, in front of the rest of a request.
_HEAD: Final = ">4si"
_HEAD_BYTES: Final = 8


class CommitNumbers(NamedTuple):
    """The numbers in which commits differ: one of each for each partition."""

    offsets: Sequence[int]
    leader_epochs: Sequence[int]


class CommitLayout(NamedTuple):
    """Where a request has its numbers.

    Attributes:
        layout: API and version, correlation id; then pieces with numbers in between.
        step: the number of fields from one piece to the next.
    """

    layout: Struct
    step: int

    def read(self, frame: Buffer) -> tuple[tuple[bytes, ...], CommitNumbers]:
        """Split a request that has the size of the earlier one.

        If its numbers are in other places, neither part of the result is of use, and
        the first one is that of no request with its numbers in these places.

        Returns:
            All bytes except the correlation id and the numbers; and the numbers.
        """
        head, _, *fields = self.layout.unpack(frame)
        step = self.step
        fixed, offsets = (head, *fields[::step]), fields[1::step]
        if step == 2:
            return fixed, CommitNumbers(offsets, [_NO_EPOCH] * len(offsets))
        return fixed, CommitNumbers(offsets, fields[2::step])


def layout_of(
    frame: bytes, request: OffsetCommitRequest, version: int
) -> CommitLayout | None:
    """Return the layout of a request; None if its client encodes it in its own way.

    Args:
        frame: the request, with its header.
        request: the same, decoded. Offsets are replaced for a moment.
        version: the version of the request.
    """
    body = request.encode(version)
    body_at = len(frame) - len(body)
    if body_at < _HEAD_BYTES or frame[body_at:] != body:
        return None
    parts = [part for row in request.topics for part in row.partitions]
    offsets = [part.committed_offset for part in parts]
    for number, part in enumerate(parts):
        part.committed_offset = _FIRST_MARK + number
    marked = request.encode(version)
    for part, offset in zip(parts, offsets, strict=True):
        part.committed_offset = offset
    numbers = "q" if version < _LEADER_EPOCH_SINCE else "qi"
    layout, end = _HEAD, _HEAD_BYTES
    for number in range(len(parts)):
        mark = _MARK.pack(_FIRST_MARK + number)
        at = body_at + marked.find(mark)
        if marked.count(mark) != 1 or at < end:
            return None
        layout += f"{at - end}s{numbers}"
        end = at + Struct(f">{numbers}").size
    return CommitLayout(Struct(f"{layout}{len(frame) - end}s"), 1 + len(numbers))
