"""ConnectionQuotas: decide whether a connection may come, and which ones must close.

Above a limit of the broker or the listener, connections wait in the kernel's backlog:
the acceptor accepts none until there is room. Above a limit of its address, a
connection is accepted and refused. If the address has too many connections, it is
closed at once. If the address makes too many a second, it is kept open and unread for a
while, which slows a client in a loop down, and then closed.

    reserve     before accept: check the limits of the broker and the listener
    admit       after accept, when the address is known: check the address's limits
    handed      the processor has the connection, and will give it a row
    withdraw    no connection came, or it was refused

All counts are in shared memory: see connection_ledger.py.

Source: Kafka's ConnectionQuotas (KIP-308, KIP-402, KIP-612).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, IntEnum, auto
from typing import Final, NamedTuple

from mpbroker.ipc.layout import (
    CONNECTION_ACTIVE,
    CONNECTION_LISTENER,
    CONNECTION_STATE,
    MAX_PROCESSORS,
    PROCESSOR_COUNTERS,
    STATE_MASK,
    ConnectionState,
    ProcessorCounter,
    connection_row,
    processor_row,
)
from mpbroker.ipc.limits_page import NO_LIMIT, Address, Limits, LimitsPage
from mpbroker.ipc.segment import Segment
from mpbroker.network.connection_ledger import (
    NO_ADDRESS,
    ConnectionLedger,
    Counts,
    Rate,
)
from mpbroker.network.connection_rows import live_rows

# An acceptor is not told when a connection ends, so it checks this often.
_LOOK_NS: Final = 10_000_000
_MS: Final = 1_000_000


class AcceptorCounter(IntEnum):
    """The fates of a listener's new connections; words of METRICS_CONNECTIONS."""

    ACCEPTED = 0
    TOO_MANY_OF_ADDRESS = 1
    TOO_FAST_OF_ADDRESS = 2
    NO_FILES = 3


class Verdict(Enum):
    """The decision about a connection that was accepted."""

    ADMITTED = auto()
    TOO_MANY = auto()  # its address has too many connections
    THROTTLED = auto()  # its address makes too many connections a second


class Judgement(NamedTuple):
    """A verdict, and its reason for a log line."""

    verdict: Verdict
    until_ns: int = 0  # when a throttled connection is to be closed
    limit: int = NO_LIMIT


_ADMITTED: Final = Judgement(Verdict.ADMITTED)


class ConnectionQuotas:
    """The quotas, as one listener's acceptor applies them."""

    def __init__(self, listener: int, segment: Segment, control: Segment) -> None:
        self._listener = listener
        self._page = LimitsPage(segment)
        self._ledger = ConnectionLedger(segment, control)
        self._counts: Counts | None = None
        # The place in the ledger of the connection that is being accepted.
        self._place: int | None = None

    @property
    def limits(self) -> Limits:
        """The limits now."""
        return self._page.read()

    def reserve(self, now_ns: int) -> int:
        """Reserve a place for a connection; return 0, or the ns to accept none."""
        limits = self.limits
        if limits.are_none(self._listener):
            return 0
        with self._ledger.mutex:
            if not self._has_room(limits, now_ns):
                return _LOOK_NS
            waits = [
                rate.throttle_ns(bound, now_ns, *_samples(limits))
                for rate, bound in self._rates(limits)
                if bound != NO_LIMIT
            ]
            if max(waits, default=0):
                return max(waits)
            self._place = self._ledger.arrive(self._listener, now_ns)
            if self._place is None:
                self._counts = self._ledger.count(now_ns)  # this frees stale places
                return _LOOK_NS
            for rate, _ in self._rates(limits):
                rate.record(now_ns, *_samples(limits))
        return 0

    def admit(self, address: Address, port: int, now_ns: int) -> Judgement:
        """Judge the connection that came. If it is refused, its place is freed."""
        if self._place is None:
            return _ADMITTED
        limits = self.limits
        with self._ledger.mutex:
            self._ledger.name(self._place, address, port)
            judgement = self._judge(limits, address, now_ns)
            if judgement.verdict is not Verdict.ADMITTED:
                self._withdraw(limits, now_ns)
        return judgement

    def _judge(self, limits: Limits, address: Address, now_ns: int) -> Judgement:
        if address == NO_ADDRESS:
            return _ADMITTED
        bound, samples = limits.rate_of_address(address), _samples(limits)
        if bound != NO_LIMIT:
            rate = self._ledger.address_rate(address, now_ns)
            wait_ns = rate.throttle_ns(bound, now_ns, *samples)
            if wait_ns:
                return Judgement(Verdict.THROTTLED, now_ns + wait_ns, bound)
            rate.record(now_ns, *samples)
        most = limits.max_of_address(address)
        if most != NO_LIMIT and self._upper_bound(address) > most:
            self._counts = self._ledger.count(now_ns)
            if self._counts.by_address[address] > most:  # this one is counted too
                return Judgement(Verdict.TOO_MANY, 0, most)
        return _ADMITTED

    def handed(self, processor: int, number: int) -> None:
        """Note that the admitted connection is the ``number``-th of its processor."""
        if self._place is not None:
            with self._ledger.mutex:
                self._ledger.handed(self._place, processor, number)
            self._place = None

    def withdraw(self, now_ns: int) -> None:
        """Free the reserved place: no connection came."""
        if self._place is not None:
            limits = self.limits
            with self._ledger.mutex:
                self._withdraw(limits, now_ns)

    def _withdraw(self, limits: Limits, now_ns: int) -> None:
        """Undo a reservation: a refused connection does not count for any rate."""
        assert self._place is not None
        self._ledger.leave(self._place)
        self._place = None
        for rate, _ in self._rates(limits):
            rate.record(now_ns, *_samples(limits), count=-1)

    def _rates(self, limits: Limits) -> Iterator[tuple[Rate, int]]:
        yield (
            self._ledger.listener_rate(self._listener),
            limits.of_listener(self._listener).creation_rate,
        )
        # Connections of the protected listener count for the broker's rate, but are
        # never delayed by it.
        is_protected = limits.broker.protected_listener == self._listener
        bound = NO_LIMIT if is_protected else limits.broker.creation_rate
        yield self._ledger.broker_rate(), bound

    def _has_room(self, limits: Limits, now_ns: int) -> bool:
        most = limits.broker.max_connections
        if limits.broker.protected_listener == self._listener:
            most = NO_LIMIT
        own = limits.of_listener(self._listener).max_connections
        if most == own == NO_LIMIT:
            return True
        counts = self._counts
        if counts is not None:
            more = self._ledger.admitted - counts.admitted
            if (
                counts.total + more < most
                and counts.by_listener[self._listener] + more < own
            ):
                return True
        self._counts = counts = self._ledger.count(now_ns)
        return counts.total < most and counts.by_listener[self._listener] < own

    def _upper_bound(self, address: Address) -> int:
        if self._counts is None:
            return NO_LIMIT
        more = self._ledger.admitted - self._counts.admitted
        return self._counts.by_address[address] + more


def excess_connections(words: memoryview, limits: Limits) -> list[int]:
    """Return the rows of connections that must close, those silent for longest.

    A connection with a request in flight is never among them, nor one of the protected
    listener. All processors find the same rows; each closes its own.
    """
    most = limits.broker.max_connections
    if most == NO_LIMIT:
        return []
    about = sum(
        words[processor_row(number) + PROCESSOR_COUNTERS + ProcessorCounter.CONNECTIONS]
        for number in range(MAX_PROCESSORS)
    )
    if about <= most:
        return []  # almost always, and this is known at no cost
    rows = list(live_rows(words))
    excess = len(rows) - most
    if excess <= 0:
        return []
    protected = limits.broker.protected_listener
    idle = []
    for row in rows:
        word = connection_row(row)
        if (
            words[word + CONNECTION_STATE] & STATE_MASK == ConnectionState.READING
            and words[word + CONNECTION_LISTENER] != protected
        ):
            idle.append((words[word + CONNECTION_ACTIVE], row))
    return [row for _, row in sorted(idle)[:excess]]


def _samples(limits: Limits) -> tuple[int, int]:
    return limits.broker.rate_samples, limits.broker.rate_window_ms * _MS
