"""Black boxes: what a process of the broker noted, for whoever looks after its death.

One box a process id (processor 3, whichever process has that id now), in a segment of
its own. A box outlives its process and its successors, so its totals never run
backwards. Each word has one writer, the process whose box it is, or, while it is dead,
the supervisor, which reads the boxes of the dead; ``mpbroker ctl`` reads those of the
living; all without any lock.

    black box segment (memfd, sparse): BOXES boxes of BOX_WORDS

    word     field      notes
    0        noted      events ever noted; an event is there once this has passed it
    1        length     of the last words, bytes; written after them
    8-10     faults     the supervisor, if ``--enable-inject``: see Fault
    16..     events     EVENTS of EVENT_WORDS each: ns (monotonic), EventKind, a, b
    256..    requests   a word an API key: how many this id has executed
    384..    spent      a word an API key: ns spent in them
    512..    last words the text of the exception that ended the process

What a handler executes costs nothing here: its row names the slot it works on
(HANDLER_BUSY_SLOT), the slot the connection and the bytes of the request.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Final, NamedTuple

from mpbroker.ipc.layout import HANDLER_IDS, MAX_PROCESSORS
from mpbroker.ipc.segment import Segment

BOX_WORDS: Final = 1024
EVENTS: Final = 48
EVENT_WORDS: Final = 4
API_KEYS: Final = 128
NO_API: Final = API_KEYS - 1  # of requests that are none: counted here

_NOTED: Final = 0
_TEXT_LENGTH: Final = 1
_FAULTS: Final = 8
_EVENTS: Final = 16
_REQUESTS: Final = 256
_SPENT: Final = 384
_TEXT: Final = 512
_MAX_TEXT_BYTES: Final = (BOX_WORDS - _TEXT) * 8

# Acceptors beyond the sixteenth share the last box: they have little to tell.
_MAX_ACCEPTORS: Final = 16
_FIRST: Final = {
    "processor": 0,
    "handler": MAX_PROCESSORS,
    "coordinator": MAX_PROCESSORS + HANDLER_IDS - 1,
    "acceptor": MAX_PROCESSORS + HANDLER_IDS,
    "housekeeper": MAX_PROCESSORS + HANDLER_IDS + _MAX_ACCEPTORS,
}
BOXES: Final = MAX_PROCESSORS + HANDLER_IDS + _MAX_ACCEPTORS + 8


class EventKind(IntEnum):
    """What is noted, and what its two numbers mean."""

    SPAWNED = 1  # process id
    SERVING = 2  # incarnation
    DRAINING = 3
    ENDING = 4
    BUG = 5  # API key, connection: a request met a bug of ours and was answered so
    FAILED = 6  # an exception ended the process: see its last words
    LOCK_REPAIRED = 7  # the owner of a shared lock had died
    DIED = 8  # wait status; by the supervisor, when it has reaped the process
    REPAIRED = 9  # by the supervisor: what it held is free, its requests are put back


class Fault(IntEnum):
    """Words from ``faults`` on; 0: none. Heeded only with ``--enable-inject``."""

    SLOW_NS = 0  # so long every request of this handler takes in addition
    SYNC_ERRNO = 1  # every fdatasync of this process fails with it
    FULL_RING = 2  # to this processor the request ring is full


class Event(NamedTuple):
    """One thing that a process noted."""

    at_ns: int
    kind: int
    a: int
    b: int


def box_number(role: str, number: int) -> int:
    """The box of a process, by its role's name and its id."""
    first = _FIRST.get(role, BOXES - 1)
    if role == "acceptor":
        number = min(number, _MAX_ACCEPTORS - 1)
    return min(first + number, BOXES - 1)


def create_boxes() -> Segment:
    """Make the segment, before the first fork."""
    return Segment.create("mpbroker-black-boxes", BOXES * BOX_WORDS * 8)


class BlackBox:
    """One box. Whose it is may write it; anyone may read.

    Attributes:
        requests: word of the first API's total; see ``requests`` above.
        spent: word of the first API's time.
    """

    def __init__(self, words: memoryview, number: int) -> None:
        self.words = words
        self._base = number * BOX_WORDS
        self.requests = self._base + _REQUESTS
        self.spent = self._base + _SPENT

    def note(self, kind: EventKind, a: int = 0, b: int = 0) -> None:
        """Note an event; the oldest goes."""
        words, noted = self.words, self.words[self._base + _NOTED]
        word = self._base + _EVENTS + noted % EVENTS * EVENT_WORDS
        words[word] = time.monotonic_ns()
        words[word + 1] = kind
        words[word + 2] = a
        words[word + 3] = b
        words[self._base + _NOTED] = noted + 1

    def note_failure(self, error: BaseException) -> None:
        """Keep an exception's text: the end of it, where it does not fit."""
        import traceback  # not at every start

        text = "".join(traceback.format_exception(error)).encode(errors="replace")
        text = text[-_MAX_TEXT_BYTES:]
        view = self.words.cast("B")
        start = (self._base + _TEXT) * 8
        view[start : start + len(text)] = text
        self.words[self._base + _TEXT_LENGTH] = len(text)
        self.note(EventKind.FAILED)

    def events(self) -> list[Event]:
        """What was noted, oldest first."""
        noted = self.words[self._base + _NOTED]
        events = []
        for number in range(max(0, noted - EVENTS), noted):
            word = self._base + _EVENTS + number % EVENTS * EVENT_WORDS
            events.append(Event._make(self.words[word : word + EVENT_WORDS].tolist()))
        return events

    def last_words(self) -> str:
        """The exception that ended the process, or an earlier one of its id; or ""."""
        length = min(self.words[self._base + _TEXT_LENGTH], _MAX_TEXT_BYTES)
        if length <= 0:
            return ""
        view = self.words.cast("B")
        start = (self._base + _TEXT) * 8
        return bytes(view[start : start + length]).decode(errors="replace")

    def forget_last_words(self) -> None:
        """The supervisor: they have been read, and are not the successor's."""
        self.words[self._base + _TEXT_LENGTH] = 0

    def totals(self) -> dict[int, tuple[int, int]]:
        """Requests executed and ns spent in them, by API key."""
        counts = self.words[self.requests : self.requests + API_KEYS].tolist()
        spent = self.words[self.spent : self.spent + API_KEYS].tolist()
        return {
            key: (count, spent[key]) for key, count in enumerate(counts) if count > 0
        }

    def fault(self, fault: Fault) -> int:
        """What was asked to go wrong; 0: nothing."""
        return int(self.words[self._base + _FAULTS + fault])

    def set_fault(self, fault: Fault, value: int) -> None:
        """The supervisor: make something go wrong, or, with 0, right again."""
        self.words[self._base + _FAULTS + fault] = value


# A process has one box, from its fork to its end, and the lines that have something to
# note are far from those that know which. So this is the one thing here that a process
# keeps globally, as it does its log.
_own: BlackBox | None = None


def open_own_box(segment: Segment, number: int) -> BlackBox:
    """Make a box this process's own: right after its fork."""
    global _own
    _own = BlackBox(segment.words, number)
    return _own


def own_box() -> BlackBox:
    """This process's box; one that nobody reads, if it has none (tools, tests)."""
    if _own is not None:
        return _own
    return BlackBox(memoryview(bytearray(BOX_WORDS * 8)).cast("q"), 0)


def note(kind: EventKind, a: int = 0, b: int = 0) -> None:
    """Note an event in this process's box, if it has one."""
    if _own is not None:
        _own.note(kind, a, b)


def note_failure(error: BaseException) -> None:
    """Keep this process's last words, if it has a box."""
    if _own is not None:
        _own.note_failure(error)
