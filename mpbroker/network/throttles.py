"""Throttles: leave connections unread until a given time (KIP-219).

A client above its quota gets its answer at once, with the time that it should wait. For
this time the broker does not read from it, whether the client obeys or not. The end of
the time is in the connection's row, its record in shared memory. The handler writes it
before it answers, while the connection is muted for its request. The connection's
processor, or its successor, checks the word before it reads, and clears it when the
time is over. So a death or a move needs no message, and a connection without bytes to
read needs no timer.

Kafka has one state for two facts. This broker keeps the two facts in two words of the
row, the state and the end of the throttle time ("muted until"):

    Kafka                                   state       muted until
    NOT_MUTED                               READING     0, or in the past
    MUTED_AND_RESPONSE_PENDING              IN_FLIGHT   0, or in the past
    MUTED_AND_THROTTLED_AND_RESPONSE_...    IN_FLIGHT   to come
    MUTED_AND_THROTTLED                     READING     to come
    MUTED                                   no such case: Kafka leaves it at once

Two of Kafka's events end in this way:

    StartThrottlingResponse                 the handler stores "muted until"
    EndThrottlingResponse                   the time is over; no one sends an event

Source: KIP-219; Kafka's ThrottledChannel, KafkaChannel.ChannelMuteState.
"""

import heapq
import itertools
from collections.abc import Iterator

from mpbroker.ipc.layout import CONNECTION_MUTED_UNTIL
from mpbroker.network.channel import Channel


class Throttles:
    """Keeps the connections that have bytes to read, and are throttled by a quota."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        # A heap: until when, running number, channel. The channel may have moved or
        # closed meanwhile; this is checked when it is due.
        self._timers: list[tuple[int, int, Channel]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._timers)

    def holds(self, channel: Channel, now_ns: int) -> bool:
        """Return whether a channel is throttled now, so that it must not be read.

        If it is throttled, set its ``waiting`` flag and remember it: ``due`` yields it
        when its throttle time is over.
        """
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
        """Yield the remembered channels whose throttle time is over, and forget them.

        Some may have been closed or given away meanwhile.
        """
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            channel = heapq.heappop(timers)[2]
            channel.waiting = False
            yield channel

    def poll_s(self, longest_s: float, now_ns: int) -> float:
        """Return the seconds until the next throttle time ends.

        The result is at most ``longest_s``.
        """
        if not self._timers:
            return longest_s
        return min(longest_s, max(0.0, (self._timers[0][0] - now_ns) / 1e9))
