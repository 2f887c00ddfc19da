"""Throttles: connections of which nothing is read before a time (KIP-219).

A client that is over its quota gets its answer at once, which says for how long it
ought to be quiet; for so long it is not heard, whether it knows of that or not. When
the time ends is in the connection's row: the handler writes it before it answers, while
the connection is muted for its request; its processor, or whoever carries it on, looks
there before it reads, and clears the word when the time is over. So there is nothing to
be told of a death or a move, and a connection that says nothing costs no timer.

Kafka has one state for two facts, which here are two words of the row:

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
    """Those of one processor's connections that have more to say, and must wait."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        # Until when, and in order of their coming; a channel is looked at when it is
        # due, wherever it has got to since.
        self._timers: list[tuple[int, int, Channel]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._timers)

    def holds(self, channel: Channel, now_ns: int) -> bool:
        """Whether a channel that could be read must wait; it is due later then."""
        word = channel.row + CONNECTION_MUTED_UNTIL
        until: int = self._words[word]
        if until <= now_ns:
            if until:
                self._words[word] = 0
            return False
        channel.waiting = True  # events are noted, and wait as well
        heapq.heappush(self._timers, (until, next(self._numbers), channel))
        return True

    def due(self, now_ns: int) -> Iterator[Channel]:
        """Yield the channels whose time is over; some may be gone."""
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            channel = heapq.heappop(timers)[2]
            channel.waiting = False
            yield channel

    def poll_s(self, longest_s: float, now_ns: int) -> float:
        """How long may be waited for something else."""
        if not self._timers:
            return longest_s
        return min(longest_s, max(0.0, (self._timers[0][0] - now_ns) / 1e9))
