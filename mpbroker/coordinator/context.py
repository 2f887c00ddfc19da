"""The surroundings of the state machines of groups and transactions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from mpbroker.coordinator.outbox import Outbox
    from mpbroker.coordinator.timers import Timers


class Topics(Protocol):
    """The topics of the broker, as the coordinator needs to know them."""

    def partition_count(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 if there is no such topic."""

    def topic_name(self, topic_id: bytes) -> str | None: ...

    def topic_id(self, topic: str) -> bytes | None: ...

    def topic_names(self) -> Iterable[str]: ...

    def version(self) -> int:
        """Return a number that changes whenever any of the other answers does."""


class CoordinatorContext(NamedTuple):
    """The only objects through which a state machine sees or changes the world.

    Requests and the time come in as arguments; no state machine reads a clock, a socket
    or a file. So each of them can be tested without a process.
    """

    outbox: Outbox
    timers: Timers
    topics: Topics
