"""Keep the connection ledger: arriving connections and rates, for all acceptors.

Connections are counted from their rows (records in shared memory), which outlive every
process. A connection whose processor has not registered it yet has no row; its acceptor
notes it in the ledger, before an acceptor counts again. The ledger is used under one
robust mutex. If a process dies while holding the mutex, at most one note is too many,
which is removed by its age, or one sample is wrong by one.

    word       field      notes
    0-15       mutex      robust, process-shared
    16         admitted   connections ever admitted: an upper bound between two counts
    512..      arrivals   ARRIVALS of 8 words:
                            0-1 address, 2 port, 3 listener + 1 (0: free),
                            4 processor + 1, 5 its number there, 6 ns; 7: -
    4608..     rates      rows of 64 words:
                            0-1 address, 2 last used, ns, 4.. samples: the number of
                            the window, and the connections in it
                          one for each listener, then the broker's, then addresses by
                          hash

Source: Kafka's ConnectionQuotas; SampledStat and Rate for how a rate is measured.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import (
    CONNECTION_LISTENER,
    CONNECTION_PEER_ADDRESS,
    CONNECTION_PEER_PORT,
    CONNECTION_STATE,
    CONNECTION_WORDS,
    CONNECTIONS_PER_PROCESSOR,
    MAX_PROCESSORS,
    PROCESSOR_REGISTERED,
    PROCESSOR_ROWS_USED,
    STATE_MASK,
    connection_row,
    processor_row,
)
from mpbroker.ipc.limits_page import LEDGER, LEDGER_WORDS, Address
from mpbroker.ipc.robust_mutex import RobustMutex
from mpbroker.ipc.segment import Segment

NO_ADDRESS: Final[Address] = (0, 0)  # of a Unix socket's client, or not known yet
ARRIVALS: Final = 512
MAX_SAMPLES: Final = 30

_ADMITTED: Final = 16
_ARRIVALS: Final = 512
_ARRIVAL_WORDS: Final = 8
_RATES: Final = _ARRIVALS + ARRIVALS * _ARRIVAL_WORDS
_RATE_WORDS: Final = 64
_FIRST_SAMPLE: Final = 4
_WAYS: Final = 8
_BUCKETS: Final = 128
_BROKER_RATE: Final = MAX_PROCESSORS
_FIRST_ADDRESS: Final = MAX_PROCESSORS + 1

# After its processor has taken a connection from the hand-over socket, microseconds
# later there is a row, or the client has closed the connection.
_REGISTERED_NS: Final = 200_000_000
# After this time, the acceptor or all processes that knew the connection have died.
_FORGOTTEN_NS: Final = 10_000_000_000


class Counts(NamedTuple):
    """Holds the numbers of connections, with those that are not registered yet."""

    total: int
    by_listener: Counter[int]
    by_address: Counter[Address]
    admitted: int  # ever, at the time of counting


class ConnectionLedger:
    """Counts connections and their rates, in memory that all acceptors share.

    Hold ``mutex`` while using any method.
    """

    def __init__(self, limits: Segment, control: Segment) -> None:
        self._words = limits.words
        self._control = control.words
        self.mutex = RobustMutex(limits, LEDGER)

    @staticmethod
    def initialise(limits: Segment) -> None:
        RobustMutex.initialise(limits, LEDGER)

    # -- connections without a row ---------------------------------------------------

    @property
    def admitted(self) -> int:
        """The number of connections for which an entry was ever reserved."""
        return self._words[LEDGER + _ADMITTED]

    def arrive(self, listener: int, now_ns: int) -> int | None:
        """Reserve an entry in the table of arriving connections, before accept(2).

        Returns:
            The index of the entry; None if all ARRIVALS entries are used.
        """
        words = self._words
        for place in range(ARRIVALS):
            at = _arrival(place)
            if not words[at + 3]:
                words[at] = words[at + 1] = words[at + 2] = 0
                words[at + 4] = words[at + 5] = 0
                words[at + 6] = now_ns
                words[at + 3] = listener + 1
                words[LEDGER + _ADMITTED] += 1
                return place
        return None

    def name(self, place: int, address: Address, port: int) -> None:
        """Note the client's address and port in an entry of the arriving connections.

        Args:
            place: the index of the entry, as `arrive` returned it.
            address: the client's address, as two words.
            port: the client's port.
        """
        at = _arrival(place)
        self._words[at], self._words[at + 1] = address
        self._words[at + 2] = port

    def handed(self, place: int, processor: int, number: int) -> None:
        """Note the processor of a connection in its entry of the arriving connections.

        Args:
            place: the index of the entry, as `arrive` returned it.
            processor: the processor's id.
            number: how many connections this processor was handed, with this one.
        """
        at = _arrival(place)
        self._words[at + 5] = number
        self._words[at + 4] = processor + 1

    def leave(self, place: int) -> None:
        """Free an arrival's entry, because the connection was refused or did not come.

        Args:
            place: the index of the entry, as `arrive` returned it.
        """
        self._words[_arrival(place) + 3] = 0

    # -- counting --------------------------------------------------------------------

    def count(self, now_ns: int) -> Counts:
        """Count all connections: those with a row, and those that will get one.

        A row is a connection's record in shared memory, which its processor makes. Free
        the entries of arriving connections that have a row now or will never get one.
        """
        by_listener: Counter[int] = Counter()
        by_address: Counter[Address] = Counter()
        known: set[tuple[int, Address, int]] = set()
        for listener, high, low, port in self._rows():
            by_listener[listener] += 1
            by_address[high, low] += 1
            known.add((listener, (high, low), port))
        words = self._words
        for place in range(ARRIVALS):
            at = _arrival(place)
            listener = words[at + 3] - 1
            if listener < 0:
                continue
            address = words[at], words[at + 1]
            has_row = (listener, address, words[at + 2]) in known
            if (has_row and address != NO_ADDRESS) or self._has_gone(at, now_ns):
                words[at + 3] = 0
                continue
            by_listener[listener] += 1
            by_address[address] += 1
        total = by_listener.total()
        del by_address[NO_ADDRESS]
        return Counts(total, by_listener, by_address, self.admitted)

    def _rows(self) -> list[tuple[int, int, int, int]]:
        """Return listener and client's address and port of every registered connection.

        The address is two words. All are read from the connections' rows in shared
        memory.
        """
        words = self._control
        found = []
        for processor in range(MAX_PROCESSORS):
            used = words[processor_row(processor) + PROCESSOR_ROWS_USED]
            if not used:
                continue
            first = connection_row(processor * CONNECTIONS_PER_PROCESSOR)
            end = first + used * CONNECTION_WORDS

            # A column at a time: a hundred times faster than a row at a time.
            columns = [
                words[first + word : end : CONNECTION_WORDS].tolist()
                for word in (
                    CONNECTION_STATE,
                    CONNECTION_LISTENER,
                    CONNECTION_PEER_ADDRESS,
                    CONNECTION_PEER_ADDRESS + 1,
                    CONNECTION_PEER_PORT,
                )
            ]
            found += [
                (listener, high, low, port)
                for state, listener, high, low, port in zip(*columns, strict=True)
                if state & STATE_MASK
            ]
        return found

    def _has_gone(self, at: int, now_ns: int) -> bool:
        """Return whether no processor will ever register the connection of an entry.

        Args:
            at: the first word of the entry of an arriving connection.
            now_ns: the time (CLOCK_MONOTONIC).
        """
        words = self._words
        age = now_ns - words[at + 6]
        processor = words[at + 4] - 1
        if processor < 0:
            return age > _FORGOTTEN_NS
        registered = self._control[processor_row(processor) + PROCESSOR_REGISTERED]
        patience = _REGISTERED_NS if words[at + 2] else 0
        return registered >= words[at + 5] and age > patience

    # -- rates -----------------------------------------------------------------------

    def listener_rate(self, listener: int) -> Rate:
        return Rate(self._words, _rate(listener))

    def broker_rate(self) -> Rate:
        return Rate(self._words, _rate(_BROKER_RATE))

    def address_rate(self, address: Address, now_ns: int) -> Rate:
        """Return the counter for the rate at which a client's address connects.

        The addresses with one hash share eight counters. If this address has none of
        them, it gets the one that was unused for longest, which is cleared.
        """
        words = self._words
        bucket = hash(address) % _BUCKETS
        first = _FIRST_ADDRESS + bucket * _WAYS
        ways = [_rate(row) for row in range(first, first + _WAYS)]
        for at in ways:
            if (words[at], words[at + 1]) == address:
                words[at + 2] = now_ns
                return Rate(words, at)
        at = min(ways, key=lambda way: words[way + 2])
        for word in range(at, at + _RATE_WORDS):
            words[word] = 0
        words[at], words[at + 1] = address
        words[at + 2] = now_ns
        return Rate(words, at)


class Rate:
    """Measures the rate of events over the last windows, in shared memory.

    Its methods take ``samples``, the number of windows (MAX_SAMPLES at most), and
    ``window_ns``, the length of one.
    """

    def __init__(self, words: memoryview, at: int) -> None:
        self._words = words
        self._at = at + _FIRST_SAMPLE

    def record(self, now_ns: int, samples: int, window_ns: int) -> None:
        """Count an event, such as a new connection, in the time window of now."""
        window = now_ns // window_ns
        at = self._at + 2 * (window % min(samples, MAX_SAMPLES))
        if self._words[at] != window:
            self._words[at + 1] = 0
            self._words[at] = window
        self._words[at + 1] += 1

    def take_back(self, recorded_ns: int, samples: int, window_ns: int) -> None:
        """Forget an event that `record` counted at ``recorded_ns``.

        It was counted in the window of that time, which may be over by now. If that
        window has been overwritten by a newer one, do nothing.
        """
        window = recorded_ns // window_ns
        at = self._at + 2 * (window % min(samples, MAX_SAMPLES))
        if self._words[at] == window and self._words[at + 1]:
            self._words[at + 1] -= 1

    def throttle_ns(self, bound: int, now_ns: int, samples: int, window_ns: int) -> int:
        """Return how many ns to wait until one more event is within ``bound`` a second.

        The result is (observed - bound) / bound * the time observed, at most one
        window. It is 0 if the event may happen now. The time observed is at least that
        of all windows but one, so the first second may have as many events as are
        allowed in that time.
        """
        samples = min(samples, MAX_SAMPLES)
        window = now_ns // window_ns
        total, oldest = 1, window
        for slot in range(samples):
            at = self._at + 2 * slot
            if window - samples < self._words[at] <= window:
                total += self._words[at + 1]
                if self._words[at + 1]:
                    oldest = min(oldest, self._words[at])
        elapsed = max(now_ns - oldest * window_ns, (samples - 1) * window_ns, window_ns)
        observed = total * 1e9 / elapsed
        if observed <= bound:
            return 0
        if not bound:
            return window_ns
        return min(window_ns, int((observed - bound) / bound * elapsed) + 1)


def _arrival(place: int) -> int:
    return LEDGER + _ARRIVALS + place * _ARRIVAL_WORDS


def _rate(row: int) -> int:
    return LEDGER + _RATES + row * _RATE_WORDS


assert _rate(_FIRST_ADDRESS + _BUCKETS * _WAYS) <= LEDGER + LEDGER_WORDS
assert _FIRST_SAMPLE + 2 * MAX_SAMPLES <= _RATE_WORDS
