"""Parent: the parts of the Supervisor that an upgrade uses.

The supervisor is above this package, which therefore cannot import it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mpbroker.supervisor.child import Child
    from mpbroker.supervisor.repair.recovery import Repair
    from mpbroker.supervisor.upgrade.connection_export import KeptSocket


class Parent(Protocol):
    """The supervisor, as an upgrade uses it; supervisor.py and loop.py explain it."""

    children: list[Child]
    only_ours: set[int]
    repair: Repair
    sockets_kept: dict[int, KeptSocket]

    @property
    def is_quiet(self) -> bool: ...

    def every(self, interval_s: float, run: Callable[[], None]) -> None: ...

    def fork_aside(
        self, run: Callable[[], None], ended: Callable[[int], None]
    ) -> Callable[[], None] | None: ...

    def say_of_upgrade(self, text: str) -> None: ...

    def renew_all(self, done: Callable[[str], None], *, are_ours: bool) -> None: ...
