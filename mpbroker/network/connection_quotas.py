"""ConnectionQuotas: whether one more connection may come now, and who must go.

What is over a limit of the broker or the listener waits: the acceptor accepts nobody
until there is room, which is what the kernel's backlog is for. What is over a limit of
its address is told so: too many at one time, closed at once; too many a second, kept
open and unread for a while, so that a client in a loop is slowed down, and then closed.

    reserve     before accept: the broker's and the listener's limits
    admit       after it, when the address is known: the address's limits
    handed      the processor has it, and will give it a row
    withdraw    nobody came, or the one who came was refused

Nothing here is counted privately: see connection_ledger.py.

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

# Nobody tells an acceptor that a connection has ended: so often it looks.
_LOOK_NS: Final = 10_000_000
_MS: Final = 1_000_000


class AcceptorCounter(IntEnum):
    """What became of a listener's new connections; words of METRICS_CONNECTIONS."""

    ACCEPTED = 0
    TOO_MANY_OF_ADDRESS = 1
    TOO_FAST_OF_ADDRESS = 2
    NO_FILES = 3


class Verdict(Enum):
    """What becomes of a connection that was accepted."""

    ADMITTED = auto()
    TOO_MANY = auto()  # of its address at one time
    THROTTLED = auto()  # too many of its address a second


class Judgement(NamedTuple):
    """A verdict, and its reasons for a log line."""

    verdict: Verdict
    until_ns: int = 0  # when a throttled one is to be closed
    limit: int = NO_LIMIT


_ADMITTED: Final = Judgement(Verdict.ADMITTED)


class ConnectionQuotas:
    """The quotas as one listener's acceptor has to keep them."""

    def __init__(self, listener: int, segment: Segment, control: Segment) -> None:
        self._listener = listener
        self._page = LimitsPage(segment)
        self._ledger = ConnectionLedger(segment, control)
        self._counts: Counts | None = None
        self._place: int | None = None  # of the connection that is being accepted

    @property
    def limits(self) -> Limits:
        """What counts now."""
        return self._page.read()

    def reserve(self, now_ns: int) -> int:
        """Keep a place for one more; return 0, or for how long nobody may come, ns."""
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
                self._counts = self._ledger.count(now_ns)  # which clears it up
                return _LOOK_NS
            for rate, _ in self._rates(limits):
                rate.record(now_ns, *_samples(limits))
        return 0

    def admit(self, address: Address, port: int, now_ns: int) -> Judgement:
        """Judge the one that came. If it is not admitted, its place is free again."""
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
            if self._counts.by_address[address] > most:  # this one is among them
                return Judgement(Verdict.TOO_MANY, 0, most)
        return _ADMITTED

    def handed(self, processor: int, number: int) -> None:
        """The one that was admitted is its processor's ``number``-th."""
        if self._place is not None:
            with self._ledger.mutex:
                self._ledger.handed(self._place, processor, number)
            self._place = None

    def withdraw(self, now_ns: int) -> None:
        """Nobody came after all."""
        if self._place is not None:
            limits = self.limits
            with self._ledger.mutex:
                self._withdraw(limits, now_ns)

    def _withdraw(self, limits: Limits, now_ns: int) -> None:
        """What was refused has never been: it does not count for the others' rates."""
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
        # The protected listener's count for the others, and are never held up.
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
    """The rows of connections that must go: those that have been silent the longest.

    Nobody's whose request is being answered, and none of the protected listener. All
    processors find the same; each closes its own.
    """
    most = limits.broker.max_connections
    if most == NO_LIMIT:
        return []
    about = sum(
        words[processor_row(number) + PROCESSOR_COUNTERS + ProcessorCounter.CONNECTIONS]
        for number in range(MAX_PROCESSORS)
    )
    if about <= most:
        return []  # all but always, and it costs nothing to know
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
