"""Define the objects that the state machines of groups and transactions use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from mpbroker.coordinator.outbox import Outbox
    from mpbroker.coordinator.timers import Timers


class Topics(Protocol):
    """The topics of the broker, as the coordinator sees them."""

    def partition_count(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 if there is no such topic."""

    def topic_name(self, topic_id: bytes) -> str | None: ...

    def topic_id(self, topic: str) -> bytes | None: ...

    def topic_names(self) -> Iterable[str]: ...

    def version(self) -> int:
        """Return a number that changes whenever a result of the other methods does."""


class Sessions(Protocol):
    """When members were last heard of, for the coordinator's successor.

    See ipc/tables/member_sessions.py.
    """

    def heard(self, member_id: str, at_ms: int) -> None: ...

    def take_over(self, member_id: str, now_ms: int) -> int: ...

    def forget(self, member_id: str) -> None: ...


class CoordinatorContext(NamedTuple):
    """All objects that a state machine reads or changes beside its own state.

    Requests and the time are arguments of its methods. State machines use no clock,
    socket or file, so a test can run them without a process.
    """

    outbox: Outbox
    timers: Timers
    topics: Topics
    sessions: Sessions
