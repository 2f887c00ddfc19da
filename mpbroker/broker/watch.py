"""Watch: the parts of the supervisor's process that no child needs.

They have a module of their own, which is imported after the first fork: so the children
start no later because of it, and are no larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

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

_USE_LOGS: Final = (Role.HANDLER, Role.COORDINATOR, Role.HOUSEKEEPER)


class Watch:
    """Does the supervisor's work beside its children, while the broker runs.

    It tells systemd that the broker serves, answers the command ``mpbroker ctl``,
    applies settings that can change meanwhile, and kills children that hang.
    """

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
            self._children,
            supervisor.is_accepting,
            stored_names,
        )

    def begin(self, live: LiveConfig) -> None:
        """Open the control socket, and begin to watch the children.

        Call it before the first death is handled.

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
        """Note that all processes serve, so that the broker can be reported ready."""
        self._service.all_started()

    def stopping(self) -> None:
        """Note that the broker stops; ``ctl`` is answered until ``close``."""
        self._service.stopping()

    def close(self) -> None:
        """Close the control socket, when all children have ended."""
        if self._control is not None:
            self._control.close()

    def _children(self) -> Iterator[int]:
        """Return the ids of the processes that may hold the lock of a log."""
        children = self._supervisor.children
        return (child.pid for child in children if child.role in _USE_LOGS)
