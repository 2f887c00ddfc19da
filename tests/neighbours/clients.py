"""The two sides of a test of fairness: hostile clients, and a well-behaved one.

A hostile client is a function that is called again and again in a thread of its own, so
that it is back at once when the broker closes its connection.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from tests.bench import wire

# A loaded machine must not fail a test; a hostile client must not make another wait for
# as long as the broker's own limits of time, which are from ten seconds up.
LONGEST_WAIT_S: Final = 5.0

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


class Client:
    """A well-behaved client, with a connection of its own for each request.

    Attributes:
        longest_s: its longest wait for an answer.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self.longest_s = 0.0

    def ask(self, framed: bytes) -> bytes:
        """Return the answer to a request.

        Raises:
            OSError: it did not come within LONGEST_WAIT_S, or the connection broke.
        """
        started = time.monotonic()
        with wire.Connection(self._address, LONGEST_WAIT_S) as connection:
            answer = connection.ask(framed)
        self.longest_s = max(self.longest_s, time.monotonic() - started)
        return answer
