"""End JoinGroup, SyncGroup and ShareFetch requests that must not wait any longer.

The processor of the connection asks for it, because the client has hung up or because
other requests need the slots (network/waits.py). JoinGroup and SyncGroup are answered
with an error upon which clients try again. The member stays in the group, as if the
answer had been lost on the way. After its JoinGroup it counts as joined, and its
session begins when the group would have answered it; after its SyncGroup its session
begins at once. Only a new member of an old client (JoinGroup before
version 4) is removed: it would join a second time, since it does not know its id yet.
A ShareFetch is answered with the records that were found by then. Other requests wait
only for a short time, and are not ended.

A client that has hung up is answered, too. A member that leaves the group while its
JoinGroup waits has sent its LeaveGroup behind the JoinGroup on the same connection. The
processor reads the LeaveGroup only after the JoinGroup was answered. Otherwise the
group would wait for the end of the member's session.
"""

from __future__ import annotations

from typing import Protocol

from mpbroker.coordinator.groups.classic_rebalance import refused_join
from mpbroker.coordinator.outbox import Call, Outbox
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode


class Slots(Protocol):
    """The state of the slots (places in shared memory) of requests; see HandlerEnd."""

    def has_claimed(self, slot: int) -> bool: ...
    def must_end(self, slot: int) -> bool: ...


class WaitingCalls:
    """Keeps the coordinator's parked requests, to answer them early when they must end.

    They are found by their slots: the entries of requests in shared memory.
    """

    def __init__(self, slots: Slots, outbox: Outbox) -> None:
        self._slots = slots
        self._out = outbox
        self._calls: dict[int, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def executed(self, slot: int, call: Call | None) -> None:
        """Note that a request was executed; keep it here if it is now parked."""
        # The request that waited in this slot before is answered, if there was one.
        self._calls.pop(slot, None)
        if call is None or call.answered:
            return
        if call.end_wait is None and call.request.api_key != ApiKey.JOIN_GROUP:
            return
        self._calls[slot] = call
        self.end(slot)

    def end(self, slot: int) -> None:
        """Answer a parked request now, if its client has gone or its place is needed.

        It is given by its slot (entry in shared memory). Do nothing if the processor's
        notice was about an earlier request in the slot.
        """
        call = self._calls.get(slot)
        if call is None or not (
            self._slots.has_claimed(slot) and self._slots.must_end(slot)
        ):
            return
        del self._calls[slot]
        if call.end_wait is not None:
            call.end_wait()
        elif not call.answered:
            code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS  # it tries again later
            self._out.answer(call, refused_join(call, code))
