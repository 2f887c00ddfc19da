"""End requests that wait, when their clients hang up or others need the slots.

A Fetch waits for more records, a JoinGroup or a SyncGroup for other members of the
group. Each such request holds a slot of its processor, the entry of one request in
flight. There are many slots, but one client can use them all. Then the requests of all
other clients would have to wait until some slots come free. Two rules prevent that:

- A request whose client has hung up does not wait. It is answered at once: the client
  may have ended only its own direction, and may have sent other requests behind it.
- When less than an eighth of the slots is free, the clients with the largest number of
  requests may not add to them, and the waits of some of their requests end, until an
  eighth is free. All other clients have their share. When hardly any slot is free, no
  request waits at all.

A Fetch whose wait ends is answered with the records that there are. JoinGroup and
SyncGroup are answered with an error upon which clients try again. That does not end a
membership: the group treats the member as it would if the answer were lost.

A client is an IPv4 address, or an IPv6 network of 64 bits.

The processor stores a word in the slot, which says that the request's wait must end,
and sends a notice to the handler that has the request. The handler looks at the word
when it parks a request, and when a notice comes. It answers as always. The slot comes
free when the processor has taken the answer, so no other request can have the slot
while a handler may still answer this one.

A handler may look at the word just before it is stored, and get the notice before it
has parked the request. Or the handler may die. Each of these costs a second at most,
because notices are repeated every second until the request is answered. If the
processor dies, its successor finds hung-up sockets anew; it ends the requests whose
connections are gone.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from mpbroker.ipc.layout import (
    COORDINATOR,
    GENERATION_SHIFT,
    SLOT_STATE,
    SLOTS_PER_PROCESSOR,
    STATE_HANDLER_MASK,
    STATE_HANDLER_SHIFT,
    STATE_MASK,
    SlotState,
    client_of,
    slot_row,
    slots_in_use,
)
from mpbroker.ipc.ring import NotificationRing
from mpbroker.network.channel import Channel
from mpbroker.network.request_channel import ProcessorEnd
from mpbroker.network.request_reader import PLENTY_OF_SLOTS

# With fewer free slots, no request waits.
_RESERVE: Final = SLOTS_PER_PROCESSOR // 32
_COUNT_NS: Final = 100_000_000
# To share out 8,192 slots takes 6 ms, and on a busy machine many times that by the
# clock. The pause after it is nine times as long, since the processor has other work.
_PAUSE: Final = 9
_NO_LIMIT: Final = SLOTS_PER_PROCESSOR
_WITH_HANDLERS: Final = (SlotState.READY, SlotState.CLAIMED, SlotState.PARKED)


class Waits:
    """Ends the waits of one processor's requests.

    Args:
        processor: the processor's id.
        words: the words of the control segment, shared memory with the state of all
            requests.
        requests: stores in a slot that the wait of its request must end.
        in_flight: the connection of each request in flight, by slot of this processor.
        notices: the rings for notices to the handlers, by the handlers' ids.
    """

    def __init__(
        self,
        processor: int,
        words: memoryview,
        requests: ProcessorEnd,
        in_flight: Sequence[Channel | None],
        notices: Sequence[NotificationRing],
    ) -> None:
        self._processor = processor
        self._words = words
        self._first_slot = processor * SLOTS_PER_PROCESSOR
        self._requests = requests
        self._in_flight = in_flight
        self._notices = notices
        self._ending: dict[int, int] = {}  # slot -> generation of its request
        self._held: Counter[int] = Counter()  # requests in flight, by client
        self._level = _NO_LIMIT
        self._next_count_ns = 0
        self._untold: dict[int, deque[int]] = {}  # slots, by the handler to be told

    # -- ending --------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether notices to end a wait could not be sent yet.

        The handlers' queues for notices had no room.
        """
        return bool(self._untold)

    def end(self, slot: int) -> None:
        """Have a request answered soon, for example because its client has hung up.

        Mark it, notify its handler now, and again at each ``repeat`` until it is
        answered.
        """
        self._requests.end_wait(slot)
        state = self._words[slot_row(slot) + SLOT_STATE]
        self._ending[slot] = state >> GENERATION_SHIFT
        self._tell(slot)

    def repeat(self) -> None:
        """Notify handlers again of the requests that must end and are unanswered."""
        self._untold.clear()
        for slot in [slot for slot in self._ending if self._has_ended(slot)]:
            del self._ending[slot]
        for slot in self._ending:
            self._tell(slot)

    def go_on(self) -> None:
        """Send the notices that found no room in a handler's queue before."""
        untold, self._untold = self._untold, {}
        for handler, slots in untold.items():
            while slots and self._notices[handler].try_put_slot(slots[0]):
                slots.popleft()
            if slots:
                self._untold[handler] = slots

    def _has_ended(self, slot: int) -> bool:
        """Return whether a request that was to end is answered, or its slot is free."""
        state = self._words[slot_row(slot) + SLOT_STATE]
        if state >> GENERATION_SHIFT != self._ending[slot]:
            return True
        kind = state & STATE_MASK
        if kind == SlotState.HELD:  # not published yet, or answered
            return self._in_flight[slot - self._first_slot] is None
        return kind not in _WITH_HANDLERS

    def _tell(self, slot: int) -> None:
        """Notify the process in which a request waits that its wait must end.

        A request that no handler has parked gets no notice. The coordinator always gets
        one, since its requests are CLAIMED even when they wait. A notice that finds no
        room is kept for ``go_on``.
        """
        state = self._words[slot_row(slot) + SLOT_STATE]
        handler = ((state & STATE_HANDLER_MASK) >> STATE_HANDLER_SHIFT) - 1
        kind = state & STATE_MASK
        if kind != SlotState.PARKED and (
            kind != SlotState.CLAIMED or handler != COORDINATOR
        ):
            return
        if handler in self._untold or not self._notices[handler].try_put_slot(slot):
            self._untold.setdefault(handler, deque()).append(slot)

    def take_over(self) -> None:
        """End the waits of requests whose connections ended with the last process.

        That is, the connections did not survive the death of this processor's last
        process.
        """
        for slot in slots_in_use(self._words, self._processor):
            state = self._words[slot_row(slot) + SLOT_STATE] & STATE_MASK
            if (
                state in _WITH_HANDLERS
                and self._in_flight[slot - self._first_slot] is None
                and slot not in self._ending
            ):
                self.end(slot)

    # -- shares --------------------------------------------------------------------

    def published(self, channel: Channel, free: int) -> None:
        """Forbid a request to wait, if its client has hung up or slots are short.

        If slots are short, a request may still wait if its client has less than its
        share of them. To be called just before the request is published.

        Args:
            channel: the request's connection.
            free: how many slots are free.
        """
        if channel.closing or (
            free < PLENTY_OF_SLOTS and not self._may_wait(channel, free)
        ):
            self._requests.end_wait(channel.slot)

    def _may_wait(self, channel: Channel, free: int) -> bool:
        return (
            free >= _RESERVE
            and self._held[client_of(self._words, channel.row)] < self._level
        )

    def are_due(self, now_ns: int) -> bool:
        """Return whether the slots may be shared out among the clients again.

        That is at the earliest when the time that ``pause`` has set is over.
        """
        return now_ns >= self._next_count_ns

    def pause(self, began_ns: int) -> None:
        """Set the earliest time at which ``make_room`` may be called again.

        The pause is nine times as long as this call took, and at least 100 ms.

        Args:
            began_ns: when the work that ends now began (CLOCK_MONOTONIC).
        """
        now = time.monotonic_ns()
        self._next_count_ns = now + max(_COUNT_NS, _PAUSE * (now - began_ns))

    def make_room(self, free: int) -> None:
        """End waits of the clients with most requests, until enough slots come free.

        PLENTY_OF_SLOTS are enough. The slots come free later, when the requests are
        answered, and requests that are ending already count as free. The computed share
        also decides which new requests may wait.

        Args:
            free: how many slots are free now.
        """
        held = [
            (slot, channel)
            for slot, channel in enumerate(self._in_flight, self._first_slot)
            if channel is not None
        ]
        self._held = Counter(client_of(self._words, each.row) for _, each in held)
        self._level = fair_level(
            self._held.values(), SLOTS_PER_PROCESSOR - PLENTY_OF_SLOTS
        )
        self.repeat()
        wanted = PLENTY_OF_SLOTS - free - len(self._ending)
        for slot in self._surplus(held):
            if wanted <= 0:
                return
            wanted -= 1
            self.end(slot)

    def _surplus(self, requests: Iterable[tuple[int, Channel]]) -> Iterator[int]:
        """Yield the slots of waiting requests of clients that hold too many slots.

        For each client yield at most as many slots as it holds above its share.

        Args:
            requests: slot and connection of each request in flight.
        """
        above = {
            client: held - self._level
            for client, held in self._held.items()
            if held > self._level
        }
        for slot, channel in requests:
            client = client_of(self._words, channel.row)
            if above.get(client, 0) > 0 and self._may_be_waiting(slot):
                above[client] -= 1
                yield slot

    def _may_be_waiting(self, slot: int) -> bool:
        state = self._words[slot_row(slot) + SLOT_STATE] & STATE_MASK
        return slot not in self._ending and state in (
            SlotState.PARKED,
            SlotState.CLAIMED,
        )


def fair_level(held: Iterable[int], limit: int) -> int:
    """Return how many slots each client may hold, so that all hold ``limit`` at most.

    Clients that hold less than an equal share leave the rest to the others. If all hold
    ``limit`` or less together, return a number that no client can exceed.

    Args:
        held: how many slots each client holds now.
        limit: how many slots all clients together may hold.
    """
    clients = sorted(held)
    for number, amount in enumerate(clients):
        share = limit // (len(clients) - number)
        if amount > share:
            return share
        limit -= amount
    return _NO_LIMIT
