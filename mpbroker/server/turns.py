"""Turns: let requests that compute for long alternate with all others.

A handler executes requests in the order in which they came. A batch of 3 KB that
inflates to 100 MiB takes 0.13 s, so a thousand of them, one on each of a thousand
connections, would keep all later requests waiting for a minute. So such a request is
parked as soon as it turns out that it is one, and then waits for its turn: until no
other request waits, or others have been executed for as long as the last such request
took. At least half of the handler's time is thus for the others.

Of most requests nobody knows before how long they will take. So a client whose requests
have had more CPU time of a process, a handler or the coordinator, than those of all
others together owes the others as much. If that is more than 100 ms, its further
requests wait for their turns, too, while requests of others wait. The clients take
turns. A client is an IPv4 address, or an IPv6 network of 64 bits.

It is CPU time, not time by the clock: where there are few CPUs for many processes, a
handler does little in a second.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpbroker.server.request import Answer, Request

# Clients give up a request after 30 s, by default.
PATIENCE_NS: Final = 30_000_000_000
# What computes for less than this is not counted.
LONG_NS: Final = 2_000_000
# So much more than the others a client may have without waiting for turns: most never
# do, and to park a request takes some 30 us.
_ALLOWANCE_NS: Final = 100_000_000
# A client owes no more than this.
_MOST_NS: Final = 30_000_000_000
# With more clients than this, debts that are over are forgotten.
_MANY: Final = 1024


class Waiting(Protocol):
    """A request that waits for its turn."""

    @property
    def client(self) -> int:
        """A number for its client."""

    @property
    def done(self) -> bool:
        """Whether it has been answered, and must not be executed any more."""


T = TypeVar("T", bound=Waiting)


class Turns(Generic[T]):
    """The requests of one process that wait for their turn.

    Attributes:
        debts: by client, at which CPU time of this process its debt is over. Empty most
            of the time.
    """

    def __init__(self) -> None:
        # By client, in the order of their turns; none is empty.
        self._queues: OrderedDict[int, deque[T]] = OrderedDict()
        self._next_ns = 0
        self.debts: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def charge(self, client: int, spent_ns: int) -> None:
        """Note that a client's request has just computed for so many ns of CPU time."""
        if spent_ns < LONG_NS:
            return
        now = time.thread_time_ns()
        if len(self.debts) >= _MANY:
            self.debts = {
                each: until for each, until in self.debts.items() if until > now
            }
        # It grows twice as fast as the CPU time that the client has, because the time
        # of all clients pays for it, its own included.
        until = max(now - spent_ns, self.debts.get(client, 0)) + 2 * spent_ns
        self.debts[client] = min(until, now + _MOST_NS)

    def owes(self, client: int) -> bool:
        """Return whether a client's requests wait for their turns now."""
        left = self.debts.get(client, 0) - time.thread_time_ns()
        if left <= 0:
            self.debts.pop(client, None)
        return left > _ALLOWANCE_NS

    def add(self, waiting: T) -> None:
        """Let a request wait behind all others of its client."""
        self._queues.setdefault(waiting.client, deque()).append(waiting)

    def take(self, *, is_idle: bool) -> T | None:
        """Return the request whose turn it is now; None: it is no one's.

        Args:
            is_idle: whether no other request waits for this process.
        """
        if not is_idle and time.monotonic_ns() < self._next_ns:
            return None
        queues = self._queues
        while queues:
            client, queue = queues.popitem(last=False)
            waiting = queue.popleft()
            if queue:
                queues[client] = queue
            if not waiting.done:
                return waiting
        return None

    def took(self, began_ns: int) -> None:
        """Note that a turn has ended which began at a time (CLOCK_MONOTONIC)."""
        now = time.monotonic_ns()
        self._next_ns = now + (now - began_ns)


class DelayedTurn:
    """Keeps a request of a handler until its turn to compute for long.

    It is a DelayedOperation in the purgatory, too, which ends its wait when the broker
    stops, its client has hung up, or others need its slot.

    Args:
        request: the request.
        client: a number for its client.
        run: executes it, and returns its answer.
        refuse: sends an answer that says that it was not executed.
    """

    may_end_early = True

    def __init__(
        self,
        request: Request,
        client: int,
        run: Callable[[], Answer],
        refuse: Callable[[], None],
        deadline_ns: int,
    ) -> None:
        self.request = request
        self.client = client
        self.slot = request.slot
        self.keys: Iterable[int] = ()
        self.deadline_ns = deadline_ns
        self.done = False
        self.run = run
        self._refuse = refuse

    def try_complete(self, row: int) -> bool:
        """Return False: it waits for no partition."""
        return False

    def expire(self) -> None:
        self._refuse()
