"""Watch: the parts of the supervisor's process that no child needs.

They have a module of their own, which is imported after the first fork: so the children
start no later because of it, and are no larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from mpbroker.supervisor.child import Role
from mpbroker.supervisor.control.control_setup import BrokerControl
from mpbroker.supervisor.live_config import LiveConfig
from mpbroker.supervisor.orphans import Orphans
from mpbroker.supervisor.repair.canaries import Canaries
from mpbroker.supervisor.repair.leases import Leases
from mpbroker.supervisor.repair.quarantine import Quarantine
from mpbroker.supervisor.service import Service
from mpbroker.supervisor.supervisor import Supervisor
from mpbroker.supervisor.systemd import ServiceManager
from mpbroker.supervisor.upgrade.running_broker import RunningBroker


class Watch:
    """Tells the service manager, answers ``ctl``, applies settings, guards children."""

    def __init__(
        self,
        broker: RunningBroker,
        supervisor: Supervisor,
        manager: ServiceManager,
        stored_names: Sequence[str],
        serving: Callable[[], None],
        describe: Callable[[], str],
    ) -> None:
        """Make the Service, which proves that the broker serves.

        Args:
            stored_names: names of the sockets in the manager's store at our start.
            serving: called once, when a request has come through every stage.
            describe: returns a few words on how busy the broker is.
        """
        self._broker = broker
        self._supervisor = supervisor
        self._control: BrokerControl | None = None
        self._service = Service(
            manager,
            supervisor,
            broker.listeners,
            serving,
            describe,
            self._handlers,
            supervisor.is_accepting,
            stored_names,
        )

    def begin(self, live: LiveConfig) -> None:
        """Let all parts begin. Call it before the first death is handled.

        Raises:
            ControlSocketError: the control socket cannot be where the settings say.
        """
        broker, supervisor = self._broker, self._supervisor
        self._control = BrokerControl(
            broker,
            supervisor,
            partial(live.rebase, supervisor),
            live.has_news,
            self._service.reload,
        )
        supervisor.on_hangup = self._control.hang_up
        words = broker.memory.control.words
        Leases(supervisor, words).begin()
        Quarantine(supervisor, broker.memory, broker.directories[0].path).begin()
        Canaries(supervisor, words, broker.listeners).begin()
        Orphans(supervisor).begin()
        supervisor.each_turn(partial(live.turn, supervisor))
        self._service.begin()

    def all_started(self) -> None:
        """Note that all processes are there."""
        self._service.all_started()

    def stopping(self) -> None:
        """Note that the broker stops; ``ctl`` is answered until ``close``."""
        self._service.stopping()

    def close(self) -> None:
        """Close the control socket, when all children have ended."""
        if self._control is not None:
            self._control.close()

    def _handlers(self) -> Iterator[int]:
        children = self._supervisor.children
        return (child.pid for child in children if child.role is Role.HANDLER)
