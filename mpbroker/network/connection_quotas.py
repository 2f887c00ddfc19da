"""ConnectionQuotas: decide whether a connection may come, and which ones must close.

Above a limit of the broker or the listener, connections wait in the kernel's backlog:
the acceptor accepts none until there is room. Above a limit of its client's address, a
connection is accepted and refused. If the address has too many connections, the new one
is closed at once. If the address makes too many connections a second, the new one is
kept open and unread for a while, and closed after that. This slows down a client that
connects in a loop.

    reserve     before accept: check the limits of the broker and the listener
    admit       after accept, when the address is known: check the address's limits
    handed      the connection is being sent to a processor, which will give it a row
    withdraw    no connection came, or it was refused

All counts are in shared memory: see connection_ledger.py.

Source: Kafka's ConnectionQuotas (KIP-308, KIP-402, KIP-612).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, IntEnum, auto
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
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
    """Names the counters of a listener's accepted and refused connections.

    They are words of shared memory, from METRICS_CONNECTIONS on.
    """

    ACCEPTED = 0
    TOO_MANY_OF_ADDRESS = 1
    TOO_FAST_OF_ADDRESS = 2
    NO_FILES = 3


class Verdict(Enum):
    """Names the decisions about an accepted connection; see the module."""

    ADMITTED = auto()
    TOO_MANY = auto()  # its address has too many connections
    THROTTLED = auto()  # its address makes too many connections a second


class Judgement(NamedTuple):
    """Holds a verdict, and the limit that was exceeded, for a log line."""

    verdict: Verdict
    until_ns: int = 0  # when a throttled connection is to be closed
    limit: int = NO_LIMIT


_ADMITTED: Final = Judgement(Verdict.ADMITTED)


class ConnectionQuotas:
    """Applies the limits of connections in the acceptor of one listener."""

    def __init__(self, listener: int, segment: Segment, control: Segment) -> None:
        self._listener = listener
        self._page = LimitsPage(segment)
        self._ledger = ConnectionLedger(segment, control)
        self._counts: Counts | None = None
        # The place in the ledger of the connection that is being accepted.
        self._place: int | None = None
        self._reserved_ns = 0

    @property
    def limits(self) -> Limits:
        """The limits that are valid now, read from shared memory."""
        return self._page.read()

    def reserve(self, now_ns: int) -> int:
        """Reserve a place in the counts of connections for one to be accepted.

        Returns:
            0 if a connection may be accepted now. Otherwise no place is reserved, and
            the result is how many ns to wait before the next attempt.
        """
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
            self._reserved_ns = now_ns
            for rate, _ in self._rates(limits):
                rate.record(now_ns, *_samples(limits))
        return 0

    def admit(self, address: Address, port: int, now_ns: int) -> Judgement:
        """Decide about an accepted connection by the limits of its client's address.

        If the connection is refused, free the place that `reserve` took.
        """
        if self._place is None:
            return _ADMITTED
        limits = self.limits
        with self._ledger.mutex:
            self._ledger.name(self._place, address, port)
            judgement = self._judge(limits, address, now_ns)
            if judgement.verdict is not Verdict.ADMITTED:
                self._withdraw(limits)
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
        """Note which processor gets the connection for which `reserve` took a place.

        Args:
            processor: the processor's id.
            number: how many connections this processor was handed, with this one.
        """
        if self._place is not None:
            with self._ledger.mutex:
                self._ledger.handed(self._place, processor, number)
            self._place = None

    def withdraw(self) -> None:
        """Free the place that `reserve` took, if any, because no connection came."""
        if self._place is not None:
            limits = self.limits
            with self._ledger.mutex:
                self._withdraw(limits)

    def _withdraw(self, limits: Limits) -> None:
        """Free the place that `reserve` took, and undo what it counted.

        The connection is taken out of the rates of the listener and of the broker.
        """
        assert self._place is not None
        self._ledger.leave(self._place)
        self._place = None
        for rate, _ in self._rates(limits):
            rate.take_back(self._reserved_ns, *_samples(limits))

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
    """Return the connections to close when max.connections is exceeded, by row index.

    These are the connections that have been silent for longest. A connection with a
    request in flight is never among them, nor a connection of the listener for brokers.
    All processors compute the same list from shared memory; each closes its own
    connections.
    """
    most = limits.broker.max_connections
    if most == NO_LIMIT:
        return []
    about = sum(
        words[processor_row(number) + PROCESSOR_COUNTERS + ProcessorCounter.CONNECTIONS]
        for number in range(MAX_PROCESSORS)
    )
    if about <= most:
        return []  # almost always; these counters cost less than to read all rows
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
