"""Clients that push metrics: the time of each one's last requests, for all handlers.

A client asks which metrics to push, and then pushes once an interval, each time to
whichever handler is free. To find out whether it pushes too early, the handlers share
this table.

    word     field       written by                      notes
    0-15     mutex       its holder                      robust, process-shared
    16       evicted     a handler, under the mutex      clients evicted by others
    64..     rows        a handler, under the mutex

    word of a row
    0-1      instance    the client's id, 128 bits; 0 and 0: the row is free
    2        asked       ns: when it was last told its subscription; 0: never
    3        pushed      ns: when it last pushed; 0: never
    4        connection  its number + 1
    5        cookie      of that connection
    6        state       last refusal << 1 | whether it said that it terminates
    7        seen        ns: when it last asked or pushed, allowed or not

A client's instance id, which is random, determines the PROBES rows that the client may
use. If other clients have them all, it gets the row that was unused for longest. So
clients that invent ids do not make the table larger; a client that was evicted may push
once too often.

A client is forgotten when its connection ends: a row whose connection has ended counts
as empty, so the client may ask again at once through its next connection.

When a row is taken, each word is valid by itself, and the instance is written last. If
a handler is killed before that, the row has a client that never asked. There is nothing
to repair.

Source: KIP-714; Kafka's ClientMetricsManager and ClientMetricsInstance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Final

from mpbroker.ipc.robust_mutex import RobustMutex
from mpbroker.ipc.segment import Segment

MAX_INSTANCES: Final = 16384  # as many as Kafka remembers
PROBES: Final = 16

_MUTEX: Final = 0
_EVICTED: Final = 16
_ROWS: Final = 64
_ROW_WORDS: Final = 8
_INSTANCE: Final = 0
_ASKED: Final = 2
_PUSHED: Final = 3
_CONNECTION: Final = 4
_COOKIE: Final = 5
_STATE: Final = 6
_SEEN: Final = 7
_ID: Final = Struct("=qq")


class ClientInstance:
    """The state of a client that pushes metrics, valid while the mutex is held.

    Attributes:
        asked_ns: when it was last told its subscription; 0: never.
        pushed_ns: when a push of the client was last accepted; 0: never.
        refusal: the error code of its last push; 0: none.
        is_terminating: whether its last push said that the client terminates.
    """

    __slots__ = ("asked_ns", "is_terminating", "pushed_ns", "refusal")

    def __init__(
        self,
        asked_ns: int = 0,
        pushed_ns: int = 0,
        refusal: int = 0,
        is_terminating: bool = False,
    ) -> None:
        self.asked_ns = asked_ns
        self.pushed_ns = pushed_ns
        self.refusal = refusal
        self.is_terminating = is_terminating


class ClientInstances:
    """The table of clients that push metrics, as one process sees it."""

    def __init__(self, segment: Segment, is_open: Callable[[int, int], bool]) -> None:
        """Attach the table.

        Args:
            segment: the table's memory.
            is_open: says whether a connection, by number and cookie, is still open.
        """
        self._words = segment.words
        self._mutex = RobustMutex(segment, _MUTEX)
        self._is_open = is_open

    @staticmethod
    def create_segment() -> Segment:
        size = (_ROWS + MAX_INSTANCES * _ROW_WORDS) * 8
        segment = Segment.create("mpbroker-client-instances", size)
        RobustMutex.initialise(segment, _MUTEX)
        return segment

    @property
    def evicted(self) -> int:
        """How many connected clients have lost their row to other clients.

        A row has the times of a client's last requests.
        """
        return self._words[_EVICTED]

    @contextmanager
    def held(
        self, instance_id: bytes, connection: int, cookie: int, now_ns: int
    ) -> Iterator[ClientInstance]:
        """Hold the table's mutex, yield a client's state, and store changes at the end.

        Args:
            instance_id: 16 bytes, not all of them 0.
            connection: the number of the client's connection.
            cookie: the cookie of that connection.
            now_ns: the time that the client was seen.
        """
        words = self._words
        key = _ID.unpack(instance_id)
        with self._mutex:
            at = self._find(*key)
            known = ClientInstance()
            if at is None:
                at = self._take(key[0])
            elif self._is_open(words[at + _CONNECTION] - 1, words[at + _COOKIE]):
                state = words[at + _STATE]
                known = ClientInstance(
                    words[at + _ASKED], words[at + _PUSHED], state >> 1, bool(state & 1)
                )
            try:
                yield known
            finally:  # also if the client was refused
                words[at + _ASKED] = known.asked_ns
                words[at + _PUSHED] = known.pushed_ns
                words[at + _CONNECTION] = connection + 1
                words[at + _COOKIE] = cookie
                words[at + _STATE] = known.refusal << 1 | known.is_terminating
                words[at + _SEEN] = now_ns
                words[at + _INSTANCE + 1] = key[1]
                words[at + _INSTANCE] = key[0]  # last

    def count(self) -> int:
        """Return the number of clients in the table whose connections are open."""
        words = self._words
        return sum(
            self._is_open(words[at + _CONNECTION] - 1, words[at + _COOKIE])
            for at in range(_ROWS, _ROWS + MAX_INSTANCES * _ROW_WORDS, _ROW_WORDS)
            if words[at + _INSTANCE] or words[at + _INSTANCE + 1]
        )

    def _find(self, first: int, second: int) -> int | None:
        words = self._words
        for at in _probed(first):
            if words[at + _INSTANCE] == first and words[at + _INSTANCE + 1] == second:
                return at
        return None

    def _take(self, first: int) -> int:
        """Empty, among a client's rows, the one unused for longest; return its index.

        Args:
            first: the first 8 bytes of the id of the client that gets the row.
        """
        words = self._words
        oldest = min(_probed(first), key=lambda at: words[at + _SEEN])
        if self._is_open(words[oldest + _CONNECTION] - 1, words[oldest + _COOKIE]):
            words[_EVICTED] += 1
        words[oldest + _INSTANCE] = words[oldest + _INSTANCE + 1] = 0
        return oldest


def _probed(first: int) -> Iterable[int]:
    start = first % MAX_INSTANCES
    return (
        _ROWS + (start + probe) % MAX_INSTANCES * _ROW_WORDS for probe in range(PROBES)
    )
