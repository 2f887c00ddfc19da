"""Judge clients that hold memory for which other clients wait.

A partly received request and a partly sent answer hold shared memory for as long as the
client likes. As long as there is room for all, the client may take its time. When
others have waited for room, and none of them has got any for PATIENCE_NS, the slow ones
are closed, the slowest first, until there is room for all that wait.

The measure is the time that the whole transfer takes at the rate up to now: a client
that sends a byte now and then is not silent, and is slow all the same.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from mpbroker.network.channel import Channel

PATIENCE_NS: Final = 1_000_000_000
# While others wait, a transfer may take two seconds, and one more for each 8 MiB, which
# is 14.5 s for 100 MiB. A Kafka client gives a request up after 30 s.
_BASE_NS: Final = 2_000_000_000
_BYTES_A_SECOND: Final = 8 * 1024 * 1024
# A transfer that has just begun has no rate yet.
_TOO_NEW_NS: Final = 1_000_000_000


class Transfer(NamedTuple):
    """A partly received request, or a partly sent answer.

    Attributes:
        channel: its connection.
        done: bytes transferred.
        length: bytes of the whole.
        held_ns: how long the memory has been held.
        memory: bytes of memory held.
    """

    channel: Channel
    done: int
    length: int
    held_ns: int
    memory: int

    @property
    def expected_ns(self) -> int:
        """How long the whole transfer takes at its rate up to now."""
        return self.held_ns * self.length // max(1, self.done)

    @property
    def is_slow(self) -> bool:
        """Whether it may be ended for others."""
        allowed = _BASE_NS + self.length * 1_000_000_000 // _BYTES_A_SECOND
        return self.held_ns >= _TOO_NEW_NS and self.expected_ns > allowed


def slowest(transfers: Iterable[Transfer], wanted: int) -> Iterator[Transfer]:
    """Yield the slow ones, the slowest first, that hold ``wanted`` bytes together."""
    slow = [transfer for transfer in transfers if transfer.is_slow]
    for transfer in sorted(slow, key=lambda each: each.expected_ns, reverse=True):
        if wanted <= 0:
            return
        wanted -= transfer.memory
        yield transfer
