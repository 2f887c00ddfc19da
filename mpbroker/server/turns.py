"""Turns: let requests that compute for long alternate with all others.

A handler executes requests in the order in which they came. A batch of 3 KB that
inflates to 100 MiB takes 0.13 s, so a thousand of them, one on each of a thousand
connections, would keep all later requests waiting for a minute. So such a request is
parked as soon as it turns out that it is one, and then waits for its turn: until no
other request waits, or others have been executed for as long as the last such request
took. At least half of the handler's time is thus for the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpbroker.server.request import Deferred, Request

# Clients give up a request after 30 s, by default.
PATIENCE_NS: Final = 30_000_000_000


class Turns:
    """The requests of one handler process that wait for their turn.

    Each is an operation in the purgatory, too, which ends its wait when the broker
    stops, its client has hung up, or others need its slot.
    """

    def __init__(self) -> None:
        self._queue: deque[DelayedTurn] = deque()
        self._next_ns = 0

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, operation: DelayedTurn) -> None:
        """Let an operation wait behind all others that do."""
        self._queue.append(operation)

    def take(self, *, is_idle: bool) -> DelayedTurn | None:
        """Return the operation whose turn it is now; None: it is no one's.

        Args:
            is_idle: whether no other request waits for this process.
        """
        if not is_idle and time.monotonic_ns() < self._next_ns:
            return None
        while self._queue:
            operation = self._queue.popleft()
            if not operation.done:
                return operation
        return None

    def took(self, began_ns: int) -> None:
        """Note that a turn has ended which began at a time (CLOCK_MONOTONIC)."""
        now = time.monotonic_ns()
        self._next_ns = now + (now - began_ns)


class DelayedTurn:
    """Keeps a request until its turn to compute for long; a DelayedOperation.

    Args:
        request: the request.
        run: executes it, and returns its answer.
        refuse: sends an answer that says that it was not executed.
    """

    may_end_early = True

    def __init__(
        self,
        request: Request,
        run: Callable[[], bytes | Deferred],
        refuse: Callable[[], None],
        deadline_ns: int,
    ) -> None:
        self.request = request
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
