"""Black boxes: notes of each broker process, to be read after its death.

Each role and id (processor 3, for example, whichever process has that id now) has one
box, and all boxes are in one segment. A box outlives its process and its successors, so
its totals never decrease. A word has one writer: the process that owns the box or,
while that process is dead, the supervisor. The supervisor reads the boxes of dead
processes, ``mpbroker ctl`` those of live ones. No reader or writer takes a lock.

    black box segment (memfd, sparse): BOXES boxes of BOX_WORDS

    word     field      notes
    0        noted      number of events ever noted; written after the event
    1        length     of the last words, in bytes; written after them
    8-10     faults     written by the supervisor, with ``--enable-inject``: see Fault
    16..     events     EVENTS of EVENT_WORDS each: ns (monotonic), EventKind, a, b
    256..    requests   one word for each API key: requests that this id has executed
    384..    spent      one word for each API key: ns spent in them
    512..    last words the text of the exception that ended the process

The request that a handler executes is not noted here, which saves time: the handler's
row names the slot (HANDLER_BUSY_SLOT), and the slot names the connection and the bytes
of the request.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import HANDLER_IDS, MAX_PROCESSORS
from mpbroker.ipc.segment import Segment

BOX_WORDS: Final = 1024
EVENTS: Final = 48
EVENT_WORDS: Final = 4
API_KEYS: Final = 128
NO_API: Final = API_KEYS - 1  # counts requests without a valid API key

_NOTED: Final = 0
_TEXT_LENGTH: Final = 1
_FAULTS: Final = 8
_EVENTS: Final = 16
_REQUESTS: Final = 256
_SPENT: Final = 384
_TEXT: Final = 512
_MAX_TEXT_BYTES: Final = (BOX_WORDS - _TEXT) * 8

# Acceptors beyond the sixteenth share the last acceptor box: they note few events.
_MAX_ACCEPTORS: Final = 16
_FIRST: Final = {
    "processor": 0,
    "handler": MAX_PROCESSORS,
    "coordinator": MAX_PROCESSORS + HANDLER_IDS - 1,
    "acceptor": MAX_PROCESSORS + HANDLER_IDS,
    "housekeeper": MAX_PROCESSORS + HANDLER_IDS + _MAX_ACCEPTORS,
    "console": MAX_PROCESSORS + HANDLER_IDS + _MAX_ACCEPTORS + 1,
    "exporter": MAX_PROCESSORS + HANDLER_IDS + _MAX_ACCEPTORS + 2,
    "keeper": MAX_PROCESSORS + HANDLER_IDS + _MAX_ACCEPTORS + 7,
}
# How many boxes each role has.
ROLES: Final = {
    "processor": MAX_PROCESSORS,
    "handler": HANDLER_IDS - 1,
    "coordinator": 1,
    "acceptor": _MAX_ACCEPTORS,
    "housekeeper": 1,
    "console": 1,
    "exporter": 1,
    "keeper": 1,
}
BOXES: Final = MAX_PROCESSORS + HANDLER_IDS + _MAX_ACCEPTORS + 8


class EventKind(IntEnum):
    """The kinds of events that are noted in a black box.

    The comments say what the numbers ``a`` and ``b`` of an event mean.
    """

    SPAWNED = 1  # process id
    SERVING = 2  # incarnation
    DRAINING = 3
    ENDING = 4
    BUG = 5  # API key, connection: a request met a bug of ours; the answer said so
    FAILED = 6  # an exception ended the process: see its last words
    LOCK_REPAIRED = 7  # the owner of a shared lock had died
    DIED = 8  # wait status; noted by the supervisor, when it has reaped the process
    # Noted by the supervisor: it has released what the dead process held, and put its
    # requests back on the ring.
    REPAIRED = 9


class Fault(IntEnum):
    """Faults that can be injected into a process; each has a word in its black box.

    The words begin at ``faults``; 0 is no fault. Only ``--enable-inject`` sets them.
    """

    SLOW_NS = 0  # this handler delays every request by so many ns
    SYNC_ERRNO = 1  # every fdatasync of this process fails with this errno
    FULL_RING = 2  # this processor behaves as if the request ring were full


class Event(NamedTuple):
    """An event in the life of a process, from its black box.

    Attributes:
        at_ns: the time on the monotonic clock.
        kind: an EventKind, which says what the numbers ``a`` and ``b`` mean.
    """

    at_ns: int
    kind: int
    a: int
    b: int


def box_number(role: str, number: int) -> int:
    """Return the number of a process's box, by the name of its role and its id."""
    if role not in ROLES:  # as another version of mpbroker may name it
        return BOXES - 2
    return _FIRST[role] + min(number, ROLES[role] - 1)


def create_boxes() -> Segment:
    """Make the segment of all black boxes; to be called before the first fork."""
    return Segment.create("mpbroker-black-boxes", BOXES * BOX_WORDS * 8)


class BlackBox:
    """The black box of one role and id, which every process may read.

    Its own process writes it, and when this process is dead, the supervisor; only the
    supervisor writes the faults.

    Attributes:
        requests: index of the first word of ``requests`` (see above).
        spent: index of the first word of ``spent``.
    """

    def __init__(self, words: memoryview, number: int) -> None:
        self.words = words
        self._base = number * BOX_WORDS
        self.requests = self._base + _REQUESTS
        self.spent = self._base + _SPENT

    @property
    def noted(self) -> int:
        """Return the number of events that were ever noted in this black box."""
        return int(self.words[self._base + _NOTED])

    def note(self, kind: EventKind, a: int = 0, b: int = 0) -> None:
        """Note an event in the box, in place of the oldest one."""
        words, noted = self.words, self.words[self._base + _NOTED]
        word = self._base + _EVENTS + noted % EVENTS * EVENT_WORDS
        words[word] = time.monotonic_ns()
        words[word + 1] = kind
        words[word + 2] = a
        words[word + 3] = b
        words[self._base + _NOTED] = noted + 1

    def note_failure(self, error: BaseException) -> None:
        """Store an exception and its traceback in the box as the last words.

        If the text is too long, only its end is kept.
        """
        import traceback  # imported here, so that starting a process stays fast

        text = "".join(traceback.format_exception(error)).encode(errors="replace")
        text = text[-_MAX_TEXT_BYTES:]
        view = self.words.cast("B")
        start = (self._base + _TEXT) * 8
        view[start : start + len(text)] = text
        self.words[self._base + _TEXT_LENGTH] = len(text)
        self.note(EventKind.FAILED)

    def events(self) -> list[Event]:
        """Return the events that were noted, oldest first."""
        noted = self.words[self._base + _NOTED]
        events = []
        for number in range(max(0, noted - EVENTS), noted):
            word = self._base + _EVENTS + number % EVENTS * EVENT_WORDS
            events.append(Event._make(self.words[word : word + EVENT_WORDS].tolist()))
        return events

    def last_words(self) -> str:
        """Return the text of the exception that ended the box's process; "": none."""
        length = min(self.words[self._base + _TEXT_LENGTH], _MAX_TEXT_BYTES)
        if length <= 0:
            return ""
        view = self.words.cast("B")
        start = (self._base + _TEXT) * 8
        return bytes(view[start : start + length]).decode(errors="replace")

    def forget_last_words(self) -> None:
        """Delete the text of the last exception, once the supervisor has read it.

        Otherwise it would be taken for an exception of the successor.
        """
        self.words[self._base + _TEXT_LENGTH] = 0

    def totals(self) -> dict[int, tuple[int, int]]:
        """Return, by API key, the number of executed requests and the ns they took."""
        counts = self.words[self.requests : self.requests + API_KEYS].tolist()
        spent = self.words[self.spent : self.spent + API_KEYS].tolist()
        return {
            key: (count, spent[key]) for key, count in enumerate(counts) if count > 0
        }

    def fault(self, fault: Fault) -> int:
        """Return the value that was set for a fault to inject; 0: no fault."""
        return int(self.words[self._base + _FAULTS + fault])

    def set_fault(self, fault: Fault, value: int) -> None:
        """Inject a fault into the box's process, or end it with 0.

        For the supervisor only.
        """
        self.words[self._base + _FAULTS + fault] = value


# A process has one box from its fork to its end, and the code that notes events is far
# from the code that knows the box. So the box is global in a process, like its log.
_own: BlackBox | None = None


def open_own_box(segment: Segment, number: int) -> BlackBox:
    """Make a black box this process's own. To be called right after the fork."""
    global _own
    _own = BlackBox(segment.words, number)
    return _own


def own_box() -> BlackBox:
    """Return this process's black box.

    If it has none (tools, tests), return a new box that no process reads.
    """
    if _own is not None:
        return _own
    return BlackBox(memoryview(bytearray(BOX_WORDS * 8)).cast("q"), 0)


def note(kind: EventKind, a: int = 0, b: int = 0) -> None:
    """Note an event in this process's black box, if it has one."""
    if _own is not None:
        _own.note(kind, a, b)


def note_failure(error: BaseException) -> None:
    """Store the exception that ends this process in its black box, if it has one."""
    if _own is not None:
        _own.note_failure(error)
