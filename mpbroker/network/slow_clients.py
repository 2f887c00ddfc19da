"""Judge clients that hold memory, or slots, for which other clients wait.

A partly received request and a partly sent answer hold shared memory for as long as the
client likes. As long as there is room for all, the client may take its time. When other
clients have waited for room, and none of them has got any for PATIENCE_NS, the slow
clients are closed, the slowest first, until there is room for all that wait.
Each also holds a slot, the entry of one request, and even a small answer that a client
does not read holds one. When others have waited that long for a slot, the slow
connections of clients that hold more than their share are closed in the same way.

The measure is the time that the whole transfer takes at the rate up to now. So a client
that sends a byte now and then counts as slow, although it is never silent for long.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.network.channel import Channel

PATIENCE_NS: Final = 1_000_000_000
# While others wait, a transfer may take two seconds, and one more for each 8 MiB, which
# is 14.5 s for 100 MiB. A Kafka client gives a request up after 30 s.
_BASE_NS: Final = 2_000_000_000
_BYTES_A_SECOND: Final = 8 * 1024 * 1024
# A transfer that has just begun has no rate yet.
_TOO_NEW_NS: Final = 1_000_000_000


class Transfer(NamedTuple):
    """Describes a partly received request, or a partly sent answer.

    Attributes:
        channel: the connection of the transfer.
        done: the bytes that have been transferred.
        length: the bytes of the whole request or answer.
        held_ns: how long the memory has been held.
        memory: the bytes of memory that are held.
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
        """Whether the client may be disconnected when others need the memory.

        That is so if the whole transfer takes longer than is allowed. A transfer that
        began less than a second ago is never slow.
        """
        allowed = _BASE_NS + self.length * 1_000_000_000 // _BYTES_A_SECOND
        return self.held_ns >= _TOO_NEW_NS and self.expected_ns > allowed


def slowest(transfers: Iterable[Transfer], wanted: int) -> Iterator[Transfer]:
    """Yield slow transfers to end, the slowest first, for the memory they hold.

    Stop when the yielded transfers together hold ``wanted`` bytes or more, or when no
    slow one is left.
    """
    slow = [transfer for transfer in transfers if transfer.is_slow]
    for transfer in sorted(slow, key=lambda each: each.expected_ns, reverse=True):
        if wanted <= 0:
            return
        wanted -= transfer.memory
        yield transfer
