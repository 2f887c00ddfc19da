"""The two sides of a test of fairness: hostile clients, and a well-behaved one.

A hostile client is a function that is called again and again in a thread of its own, so
that it is back at once when the broker closes its connection.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from tests.bench import wire
from tests.support.pressure import Reading

# A loaded machine must not fail a test; a hostile client must not make another wait for
# as long as the broker's own limits of time, which are from ten seconds up. So half of
# a wait may be time in which no CPU was to be had. Not more: attacks take CPUs, too.
LONGEST_WAIT_S: Final = 5.0
_AT_MOST_TIMES: Final = 2

# Attack until the event is set, or the connection is closed.
Attack = Callable[[threading.Event], None]


@contextlib.contextmanager
def hostile(*attacks: Attack) -> Iterator[None]:
    """Run attacks, each in its own thread and over and over, until the end."""
    end = threading.Event()

    def run(attack: Attack) -> None:
        while not end.is_set():
            with contextlib.suppress(OSError):
                attack(end)

    threads = [threading.Thread(target=run, args=(each,)) for each in attacks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


def judged_s(began: Reading) -> float:
    """Return how long a wait has taken, as it is held against LONGEST_WAIT_S."""
    now = Reading.now()
    passed_s = now.at_s - began.at_s
    return max(passed_s - now.unavailable_since(began), passed_s / _AT_MOST_TIMES)


class Client:
    """A well-behaved client, with a connection of its own for each request.

    Attributes:
        longest_s: its longest wait for an answer, as `judged_s` counts it.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self.longest_s = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[wire.Connection]:
        """Yield a new connection; what the block does on it is one wait.

        Raises:
            OSError: no answer came for twice LONGEST_WAIT_S, or the connection broke.
        """
        with (
            self.timed(),
            wire.Connection(
                self._address, LONGEST_WAIT_S * _AT_MOST_TIMES
            ) as connection,
        ):
            yield connection

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count what the block does as one wait, for example on an old connection."""
        began = Reading.now()
        yield
        self.longest_s = max(self.longest_s, judged_s(began))

    def ask(self, framed: bytes) -> bytes:
        """Return the answer to a request; raise as `waiting` does."""
        with self.waiting() as connection:
            return connection.ask(framed)
