"""Define the interfaces through which state machines see the rest of the broker.

The state machines are those of groups, transactions and share groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.metadata.features import KNOWN_FEATURES

if TYPE_CHECKING:
    from mpbroker.coordinator.outbox import Outbox
    from mpbroker.coordinator.timers import Timers


class Topics(Protocol):
    """The broker's topics: whether they exist, and with how many partitions."""

    def partition_count(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 if there is no such topic."""

    def has_transactions(self, topic: str) -> bool:
        """Return whether transactions may write to a topic.

        It may not if it is shared by the nodes of a cluster, or on another node. In a
        cluster no producer may write to __consumer_offsets: its records are in the
        database. Offsets may be committed in transactions all the same.
        """

    def topic_name(self, topic_id: bytes) -> str | None: ...

    def topic_id(self, topic: str) -> bytes | None: ...

    def topic_names(self) -> Iterable[str]: ...

    def create(
        self, wanted: Sequence[tuple[str, int, Mapping[str, str]]]
    ) -> Mapping[str, str]:
        """Create topics: name, number of partitions, configs of each.

        Return the names of those that could not be created, with the reasons. A topic
        that exists by now counts as created.
        """

    def version(self) -> int:
        """Return a number that changes whenever a result of the other methods does."""


class Sessions(Protocol):
    """Note in shared memory when each member last sent a request.

    A coordinator that replaces a dead one continues the members' session timers from
    these times. See ipc/tables/member_sessions.py.
    """

    def heard(self, member_id: str, at_ms: int) -> None: ...

    def heard_while_loading(self, member_id: str, at_ms: int) -> None: ...

    def take_over(self, member_id: str, now_ms: int) -> int: ...

    def forget(self, member_id: str) -> None: ...

    def had_heard(self, member_id: str) -> bool: ...


class CoordinatorContext(NamedTuple):
    """All objects that a state machine reads or changes, except its own state.

    Requests and the time are passed to the state machine's methods as arguments. State
    machines use no clock, socket or file, so a test can run them without a process.
    ``levels`` returns the levels of the finalized features.
    """

    outbox: Outbox
    timers: Timers
    topics: Topics
    sessions: Sessions
    levels: Callable[[], Mapping[str, int]] = lambda: KNOWN_FEATURES
