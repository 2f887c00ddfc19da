"""RoleBodies: the functions that the children of a supervisor run.

The supervisor forks children and does not know what they do. The bodies are in the
composition root, `mpbroker.broker.roles`.
"""

from collections.abc import Mapping
from typing import Protocol


class RoleBodies(Protocol):
    """The functions that run in a child after its fork, one for each role.

    A child ends when its function returns.
    """

    @property
    def has_exporter(self) -> bool:
        """Whether the settings ask for an exporter process."""
        ...

    @property
    def has_console(self) -> bool:
        """Whether the settings ask for a console process."""
        ...

    def run_acceptor(self, index: int, /) -> None:
        """Accept the connections of the listener with this index."""

    def run_processor(self, processor: int, listener_index: int, /) -> None:
        """Serve connections of a listener as the processor with this id."""

    def run_handler(self, handler: int, /, *, is_control: bool = False) -> None:
        """Execute requests of the data plane, or of the control plane."""

    def run_coordinator(self) -> None:
        """Coordinate groups and transactions."""

    def run_housekeeper(self) -> None:
        """Apply retention and compaction, and write checkpoints."""

    def run_keeper(self) -> None:
        """Hold a duplicate of every client's socket."""

    def run_exporter(self) -> None:
        """Serve and push metrics; write the request log."""

    def run_console(self) -> None:
        """Serve the console: pages for people, with login."""

    def write_broker_configs(self, texts: Mapping[str, str], /) -> None:
        """Set dynamic configs of this broker in the metadata log; then return."""
