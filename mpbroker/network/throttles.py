"""Throttles: connections that are not read before a given time (KIP-219).

A client above its quota gets its answer at once, with the time that it should wait. For
this time the broker does not read from it, whether the client obeys or not. The end of
the time is in the connection's row. The handler writes it before it answers, while the
connection is muted for its request. The connection's processor, or its successor,
checks the word before it reads, and clears it when the time is over. So a death or a
move needs no message, and a connection without bytes to read needs no timer.

Kafka has one state for two facts, which are two words of the row here:

    Kafka                                   state       muted until
    NOT_MUTED                               READING     0, or in the past
    MUTED_AND_RESPONSE_PENDING              IN_FLIGHT   0, or in the past
    MUTED_AND_THROTTLED_AND_RESPONSE_...    IN_FLIGHT   to come
    MUTED_AND_THROTTLED                     READING     to come
    MUTED                                   never seen: left as soon as it is reached

    StartThrottlingResponse                 the handler's store to the word
    EndThrottlingResponse                   the clock

Source: KIP-219; Kafka's ThrottledChannel, KafkaChannel.ChannelMuteState.
"""

import heapq
import itertools
from collections.abc import Iterator

from mpbroker.ipc.layout import CONNECTION_MUTED_UNTIL
from mpbroker.network.channel import Channel


class Throttles:
    """The connections of one processor that have bytes to read, but must wait."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        # A heap: until when, running number, channel. The channel may have moved or
        # closed meanwhile; this is checked when it is due.
        self._timers: list[tuple[int, int, Channel]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._timers)

    def holds(self, channel: Channel, now_ns: int) -> bool:
        """Return whether a channel must wait; if so, ``due`` yields it later."""
        word = channel.row + CONNECTION_MUTED_UNTIL
        until: int = self._words[word]
        if until <= now_ns:
            if until:
                self._words[word] = 0
            return False
        channel.waiting = True  # its events are noted, but not handled yet
        heapq.heappush(self._timers, (until, next(self._numbers), channel))
        return True

    def due(self, now_ns: int) -> Iterator[Channel]:
        """Yield the channels whose time is over; some may be closed or given away."""
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            channel = heapq.heappop(timers)[2]
            channel.waiting = False
            yield channel

    def poll_s(self, longest_s: float, now_ns: int) -> float:
        """Return how long a poll may wait, at most ``longest_s``."""
        if not self._timers:
            return longest_s
        return min(longest_s, max(0.0, (self._timers[0][0] - now_ns) / 1e9))
