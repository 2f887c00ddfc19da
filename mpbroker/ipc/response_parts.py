"""The parts of an answer that is not one run of bytes, as fetch responses are.

A fetch response has headers in shared memory and records in log files. A handler writes
the list of such parts into shared memory (its extent); the processor that sends the
answer reads it.

    word 0        number of parts
    then for each part PART_WORDS words:
      0  kind     0 bytes, 1 file
      1  where    bytes: offset in the arena; file: position in the file
      2  length   bytes
      3  name     file: arena offset of its path
      4  name length
      5  id       file: a file at this path with another id must not be sent (see
                  base/file_id.py)
"""

from collections.abc import Sequence
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.errors import DamagedSegmentError
from mpbroker.ipc.segment import Segment

PART_WORDS: Final = 6
_BYTES: Final = 0
_FILE: Final = 1


class FilePart(NamedTuple):
    """A range of a log segment, to be sent from the file."""

    path: str
    file_id: int
    position: int
    length: int


class BytesPart(NamedTuple):
    """A range of bytes in the arena, the shared memory that has the answers."""

    offset: int
    length: int


def parts_size_bytes(parts: Sequence[bytes | FilePart]) -> int:
    """Return the bytes of the arena that ``write_parts`` needs for these parts."""
    table = 8 * (1 + PART_WORDS * len(parts))
    return table + sum(
        len(part.path.encode()) if isinstance(part, FilePart) else len(part)
        for part in parts
    )


def write_parts(
    arena: Segment, offset: int, parts: Sequence[bytes | FilePart]
) -> tuple[int, int]:
    """Write the table of an answer's parts, and their bytes, into the arena.

    Args:
        arena: the arena.
        offset: an arena offset that is a multiple of 8.
        parts: the parts of the answer, in order.

    Returns:
        The table's offset, and the number of bytes that the client will receive.
    """
    words, view = arena.words, arena.view
    word = offset >> 3
    words[word] = len(parts)
    word += 1
    where = offset + 8 * (1 + PART_WORDS * len(parts))
    total = 0
    for part in parts:
        if isinstance(part, FilePart):
            name = part.path.encode()
            view[where : where + len(name)] = name
            values = (_FILE, part.position, part.length, where, len(name), part.file_id)
            where += len(name)
            total += part.length
        else:
            view[where : where + len(part)] = part
            values = (_BYTES, where, len(part), 0, 0, 0)
            where += len(part)
            total += len(part)
        for value in values:
            words[word] = value
            word += 1
    return offset, total


def read_parts(arena: Segment, offset: int) -> list[BytesPart | FilePart]:
    """Return the parts of an answer, from a table that ``write_parts`` wrote.

    Raises:
        DamagedSegmentError: the number of parts is impossible.
    """
    words = arena.words
    word = offset >> 3
    count = words[word]
    if not 0 <= count <= (arena.size_bytes - offset) // (8 * PART_WORDS):
        raise DamagedSegmentError(f"a response of {count} parts")
    parts: list[BytesPart | FilePart] = []
    for start in range(word + 1, word + 1 + count * PART_WORDS, PART_WORDS):
        kind, where, length, name, name_length, number = words[
            start : start + PART_WORDS
        ].tolist()
        if kind == _FILE:
            path = bytes(arena.view[name : name + name_length]).decode()
            parts.append(FilePart(path, number, where, length))
        else:
            parts.append(BytesPart(where, length))
    return parts
