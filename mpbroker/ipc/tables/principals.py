"""Principals: a shared table that gives each principal a number, and only grows.

A connection's row has one word for its principal, and a text does not fit a word. So
the text of each authenticated principal has a number here, which is the same in every
process for the life of the broker. A text is put once and never changes, so readers
need no lock.

    word       field     written by                      notes
    0-15       mutex     its holder                      robust, process-shared
    16         count     a processor, under mutex        number of texts; the commit
    32..       index     a processor, under mutex        a word per text: its first byte
                                                         << LENGTH_SHIFT | its length
    then       texts     a processor, under mutex        UTF-8, one behind the other

Number 0 is the anonymous principal and has no entry; number n is index word n - 1. The
place of the next text follows from the last one, so the store to count alone commits a
text: if a processor is killed before it, no process sees the text.

Source: Kafka's KafkaPrincipal, whose printed form (``User:alice``) the texts are.
"""

from typing import Final

from mpbroker.ipc.errors import DamagedSegmentError, IpcError
from mpbroker.ipc.robust_mutex import RobustMutex
from mpbroker.ipc.segment import Segment

ANONYMOUS: Final = "User:ANONYMOUS"
# Only texts in use cost memory. A deployment has dozens of users, not thousands; with
# client certificates it may have one for each of its machines.
MAX_PRINCIPALS: Final = 8192
MAX_TEXT_BYTES: Final = 4096  # a distinguished name is rarely longer than 200
_TEXT_BYTES: Final = 2 * 1024 * 1024

_MUTEX: Final = 0
_COUNT: Final = 16
_INDEX: Final = 32
_TEXTS: Final = (_INDEX + MAX_PRINCIPALS) * 8  # bytes
_LENGTH_SHIFT: Final = 16
_LENGTH_MASK: Final = (1 << _LENGTH_SHIFT) - 1


class PrincipalsFullError(IpcError):
    """The table has no room for another principal: refuse the client."""


class Principals:
    """The table, as one process sees it."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._view = segment.view
        self._mutex = RobustMutex(segment, _MUTEX)
        self._names = [ANONYMOUS]
        self._numbers = {ANONYMOUS: 0}

    @staticmethod
    def create_segment() -> Segment:
        segment = Segment.create("mpbroker-principals", _TEXTS + _TEXT_BYTES)
        RobustMutex.initialise(segment, _MUTEX)
        return segment

    def __len__(self) -> int:
        """Return the number of principals, number 0 included."""
        return self._words[_COUNT] + 1

    def name(self, number: int) -> str:
        """Return the text of a number that ``number_of`` has given in any process.

        Raises:
            DamagedSegmentError: no text has this number.
        """
        if number >= len(self._names):
            self._catch_up()
        if not 0 <= number < len(self._names):
            raise DamagedSegmentError(
                f"principal {number} of a table of {len(self._names)}"
            )
        return self._names[number]

    def number_of(self, text: str) -> int:
        """Return a text's number; give it one if it has none.

        Raises:
            PrincipalsFullError: the text has no number, and there is no room for it.
        """
        number = self._numbers.get(text)
        if number is not None:
            return number
        # A dead owner has either put a text or not: nothing to repair.
        with self._mutex:
            self._catch_up()
            number = self._numbers.get(text)
            if number is None:
                number = self._append(text)
        return number

    def _append(self, text: str) -> int:
        # A peer's UTF-8 has no lone surrogate; but if there is one, do not fail here.
        data = text.encode(errors="replace")
        words, count = self._words, self._words[_COUNT]
        start = self._end_of(count)
        if len(data) > MAX_TEXT_BYTES:
            raise PrincipalsFullError(
                f"a principal of {len(data)} bytes; at most {MAX_TEXT_BYTES}"
            )
        if count >= MAX_PRINCIPALS or start + len(data) > _TEXT_BYTES:
            raise PrincipalsFullError(
                f"no room for another principal: the table has {count} of"
                f" {start} bytes, and room for {MAX_PRINCIPALS} of {_TEXT_BYTES}"
                " bytes; a restart of the broker removes unused ones"
            )
        at = _TEXTS + start
        self._view[at : at + len(data)] = data
        words[_INDEX + count] = start << _LENGTH_SHIFT | len(data)
        words[_COUNT] = count + 1  # last: the commit
        self._remember(text)
        return count + 1

    def _end_of(self, count: int) -> int:
        if not count:
            return 0
        last = self._words[_INDEX + count - 1]
        return (last >> _LENGTH_SHIFT) + (last & _LENGTH_MASK)

    def _catch_up(self) -> None:
        """Read the texts that other processes have put."""
        count = self._words[_COUNT]
        if not 0 <= count <= MAX_PRINCIPALS:
            raise DamagedSegmentError(f"{count} principals; at most {MAX_PRINCIPALS}")
        for entry in range(len(self._names) - 1, count):
            word = self._words[_INDEX + entry]
            start, length = word >> _LENGTH_SHIFT, word & _LENGTH_MASK
            if not 0 <= start <= _TEXT_BYTES - length:
                raise DamagedSegmentError(f"principal {entry + 1} at byte {start}")
            at = _TEXTS + start
            self._remember(str(self._view[at : at + length], "utf-8"))

    def _remember(self, text: str) -> None:
        self._numbers[text] = len(self._names)
        self._names.append(text)
