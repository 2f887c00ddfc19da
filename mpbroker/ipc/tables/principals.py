"""Principals: a shared table that gives each connected principal a number.

A connection's row has one word for its principal, and a text does not fit a word. So
the text of each authenticated principal has a number here, which is the same in every
process. No number is ever given twice, so a process may keep what it knows of one.

    word       field     written by                      notes
    0-15       mutex     its holder                      robust, process-shared
    16         used      a processor, under mutex        entries ever used
    17         given     a processor, under mutex        numbers ever given
    18         changes   a processor, under mutex        +1 before an entry changes
    32..       numbers   a processor, under mutex        a word per entry; 0: it is free
    then       lengths   a processor, under mutex        a word per entry: bytes of text
    then       texts     a processor, under mutex        MAX_TEXT_BYTES per entry, UTF-8

Number 0 is the anonymous principal and has no entry. The bits of a number below
_ENTRY_BITS are its entry + 1; above them it counts the numbers given before. The store
to ``numbers`` alone commits an entry: if a processor is killed before it, no process
sees the text.

When all entries are used, the numbers that no connection has become free. So a
connection's row gets its number while the mutex is held (``assigning``): a number that
is about to be used is not free.

Source: Kafka's KafkaPrincipal, whose printed form (``User:alice``) the texts are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mpbroker.ipc.errors import DamagedSegmentError, IpcError
from mpbroker.ipc.robust_mutex import RobustMutex
from mpbroker.ipc.segment import Segment

ANONYMOUS: Final = "User:ANONYMOUS"
# Only entries in use cost memory, a page each. With client certificates, a deployment
# may have a principal for each of its machines.
MAX_PRINCIPALS: Final = 65_536
MAX_TEXT_BYTES: Final = 4096  # a distinguished name is rarely longer than 200

_ENTRY_BITS: Final = 17
_ENTRY_MASK: Final = (1 << _ENTRY_BITS) - 1
assert MAX_PRINCIPALS < 1 << _ENTRY_BITS
_MUTEX: Final = 0
_USED: Final = 16
_GIVEN: Final = 17
_CHANGES: Final = 18
_NUMBERS: Final = 32
_LENGTHS: Final = _NUMBERS + MAX_PRINCIPALS
_TEXTS: Final = -(-(_LENGTHS + MAX_PRINCIPALS) * 8 // 4096) * 4096  # bytes
# A process that has read more texts forgets them, and reads again what it needs. Of the
# texts in the table it forgets none: to read them all again takes some 20 ms, and would
# be needed for each new principal, under the mutex.
_MAX_KNOWN: Final = 2 * MAX_PRINCIPALS


class PrincipalsFullError(IpcError):
    """The table has no room for another principal: refuse the client."""


class Principals:
    """The table of principals and their numbers, as one process sees it.

    Args:
        segment: the table.
        in_use: returns the numbers that connections have; None: all numbers are in use.
    """

    def __init__(
        self, segment: Segment, in_use: Callable[[], set[int]] | None = None
    ) -> None:
        self._words = segment.words
        self._view = segment.view
        self._mutex = RobustMutex(segment, _MUTEX)
        self._in_use = in_use
        self._names = {0: ANONYMOUS}
        self._numbers = {ANONYMOUS: 0}
        self._seen = 0

    @staticmethod
    def create_segment() -> Segment:
        size = _TEXTS + MAX_PRINCIPALS * MAX_TEXT_BYTES
        segment = Segment.create("mpbroker-principals", size)
        RobustMutex.initialise(segment, _MUTEX)
        return segment

    def __len__(self) -> int:
        """Return how many principals have a number, the anonymous one included."""
        return 1 + sum(number != 0 for number in self._entries())

    def name(self, number: int) -> str:
        """Return a principal's text, such as ``User:alice``, by its number.

        Raises:
            DamagedSegmentError: no principal has this number now.
        """
        known = self._names.get(number)
        if known is None:
            known = self._read(number)
            self._remember(number, known)
        return known

    def number_of(self, text: str) -> int:
        """Return the number of a principal's text; assign one if the text has none.

        If no connection has the number, it may become free at any time: see
        ``assigning``.

        Raises:
            PrincipalsFullError: the text has no number, and there is no room for it.
        """
        number = self._numbers.get(text)
        if number is not None and self._is_given(number):
            return number
        with self.assigning(text) as number:
            return number

    @contextmanager
    def assigning(self, text: str) -> Iterator[int]:
        """Hold the mutex, and yield the number of a principal's text.

        A text without a number gets one. The number stays the text's if the caller
        stores it in a connection's row before the mutex is released.

        Raises:
            PrincipalsFullError: as ``number_of``.
        """
        # A dead owner has either put a text or not: nothing to repair.
        with self._mutex:
            self._catch_up()
            number = self._numbers.get(text)
            yield self._append(text) if number is None else number

    def _append(self, text: str) -> int:
        # A peer's UTF-8 has no lone surrogate; but if there is one, do not fail here.
        data = text.encode(errors="replace")
        if len(data) > MAX_TEXT_BYTES:
            raise PrincipalsFullError(
                f"a principal of {len(data)} bytes; at most {MAX_TEXT_BYTES}"
            )
        entry, words = self._free_entry(), self._words
        words[_CHANGES] += 1
        words[_GIVEN] += 1
        number = words[_GIVEN] << _ENTRY_BITS | entry + 1
        at = _TEXTS + entry * MAX_TEXT_BYTES
        self._view[at : at + len(data)] = data
        words[_LENGTHS + entry] = len(data)
        words[_USED] = max(words[_USED], entry + 1)
        words[_NUMBERS + entry] = number  # last: the commit
        self._seen = words[_CHANGES]  # it had caught up before
        self._remember(number, text)
        return number

    def _free_entry(self) -> int:
        used = self._words[_USED]
        if used < MAX_PRINCIPALS:
            return used
        if 0 not in self._entries():
            self._free_unused()
        try:
            return self._entries().index(0)
        except ValueError:
            raise PrincipalsFullError(
                f"no room for another principal: {MAX_PRINCIPALS} are connected, and no"
                " more can be; see max.connections"
            ) from None

    def _free_unused(self) -> None:
        """Free the numbers that no connection has."""
        if self._in_use is None:
            return
        words, in_use = self._words, self._in_use()
        words[_CHANGES] += 1
        for entry, number in enumerate(self._entries()):
            if number not in in_use:
                words[_NUMBERS + entry] = 0
        self._catch_up()

    def _entries(self) -> list[int]:
        """Return the numbers in the table's entries, as far as ever used; 0: free."""
        used = self._words[_USED]
        if not 0 <= used <= MAX_PRINCIPALS:
            raise DamagedSegmentError(f"{used} principals; at most {MAX_PRINCIPALS}")
        return self._words[_NUMBERS : _NUMBERS + used].tolist()

    def _is_given(self, number: int) -> bool:
        entry = (number & _ENTRY_MASK) - 1
        return number == 0 or bool(self._words[_NUMBERS + entry] == number)

    def _read(self, number: int) -> str:
        entry = (number & _ENTRY_MASK) - 1
        if number > 0 and 0 <= entry < MAX_PRINCIPALS and self._is_given(number):
            length = self._words[_LENGTHS + entry]
            if 0 <= length <= MAX_TEXT_BYTES:
                at = _TEXTS + entry * MAX_TEXT_BYTES
                data = bytes(self._view[at : at + length])
                # The same number: no process has changed the text while it was read.
                if self._is_given(number):
                    return str(data, "utf-8")
        raise DamagedSegmentError(f"principal {number} is not there")

    def _catch_up(self) -> None:
        """Read the table again if other processes have changed it. Under the mutex."""
        changes = self._words[_CHANGES]
        if changes == self._seen:
            return
        given = [number for number in self._entries() if number]
        names = {
            number: self._names.get(number) or self._read(number) for number in given
        }
        self._names = {0: ANONYMOUS, **names}
        self._numbers = {text: number for number, text in self._names.items()}
        self._seen = changes

    def _remember(self, number: int, text: str) -> None:
        if len(self._names) >= _MAX_KNOWN:
            self._names = {0: ANONYMOUS}
            self._numbers = {ANONYMOUS: 0}
            self._seen = -1  # to be read again before a text gets another number
        self._names[number] = text
        self._numbers[text] = number
