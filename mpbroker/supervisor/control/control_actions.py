"""ControlActions: the commands of ``ctl`` that change something."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, Final

from mpbroker.base.config_def import INT_MAX
from mpbroker.base.logger import get_logger
from mpbroker.config import BrokerConfig
from mpbroker.inspect.broker_view import BrokerView
from mpbroker.ipc.black_box import Fault
from mpbroker.supervisor.child import Child, Role
from mpbroker.supervisor.control.control_commands import (
    ControlError,
    integer,
    role_and_number,
)
from mpbroker.supervisor.control.control_reload import Reload
from mpbroker.supervisor.supervisor import Supervisor

_LOG = get_logger(__name__)

_DRAIN_LOOK_S: Final = 0.2
_MAX_DRAIN_S: Final = 86_400
_MAX_SLOW_MS: Final = 60_000
_SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
}


class ControlActions:
    """Carries out the commands of ``ctl`` that change a broker.

    Args:
        config: the settings with which the broker was started.
        supervisor: carries out most commands.
        view: has the black box of each process (its log of events in shared memory),
            into which faults are written.
        use: gives other settings to processes that are started from now on.
    """

    def __init__(
        self,
        config: BrokerConfig,
        supervisor: Supervisor,
        view: BrokerView,
        use: Callable[[BrokerConfig], None],
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._view = view
        self._reload = Reload(config, supervisor, use)
        self._drain_until = 0.0
        self._looked_empty = False

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Return the functions that carry out the commands, by command name."""
        return {
            "resize": self._resize,
            "restart": self._restart,
            "upgrade": self._upgrade,
            "stop": self._stop,
            "drain": self._drain,
            "reload": self._reload.run,
            "inject": self._inject,
        }

    # -- pools ------------------------------------------------------------------------

    def _resize(self, arguments: dict[str, Any]) -> None:
        self._refuse_while_ending()
        # Any number: the settings that a resize changes say which are too many.
        sizes = {
            name: integer(arguments, name, -INT_MAX, INT_MAX)
            for name in ("handlers", "processors")
            if arguments.get(name) is not None
        }
        if not sizes:
            raise ControlError("resize: name handlers, processors or both")
        self._supervisor.resize(**sizes)

    def _restart(self, arguments: dict[str, Any]) -> None:
        self._refuse_while_ending()
        self._supervisor.restart(*role_and_number(arguments))

    def _upgrade(self, arguments: dict[str, Any]) -> None:
        self._refuse_while_ending()
        command = arguments.get("argv")
        if command is not None and not (
            isinstance(command, list)
            and command
            and all(isinstance(each, str) for each in command)
        ):
            raise ControlError("upgrade: argv is a list of texts")
        self._supervisor.upgrade(command)

    def _refuse_while_ending(self) -> None:
        if self._drain_until:
            raise ControlError("the broker drains and will stop; nothing is changed")

    # -- the end ----------------------------------------------------------------------

    def _stop(self, arguments: dict[str, Any]) -> None:
        self._supervisor.request_stop("asked for through the control socket")

    def _drain(self, arguments: dict[str, Any]) -> None:
        """Refuse new connections; stop the broker when the present ones are closed.

        Stop it in any case when the time is up.
        """
        patience_s = integer(arguments, "for_s", 0, _MAX_DRAIN_S, 0)
        first = not self._drain_until
        self._drain_until = time.monotonic() + patience_s
        _LOG.info("draining: asked for through the control socket")
        if first:
            self._supervisor.stop_accepting()
            self._supervisor.every(_DRAIN_LOOK_S, self._look_whether_drained)

    def _look_whether_drained(self) -> None:
        processors = self._view.figures()["processors"]
        connections = sum(
            each["connections"] + each["on_their_way"] for each in processors
        )
        # Twice in a row: a connection that was just accepted is seen by the second
        # look.
        looked_empty, self._looked_empty = self._looked_empty, not connections
        is_empty = looked_empty and not connections
        if is_empty or time.monotonic() >= self._drain_until:
            self._supervisor.request_stop(
                "no connection is left" if is_empty else "time to drain is up"
            )

    # -- faults -----------------------------------------------------------------------

    def _inject(self, arguments: dict[str, Any]) -> None:
        if not self._config.control_inject_enable:
            raise ControlError(
                "faults are injected only into a broker that was started with"
                " --enable-inject"
            )
        fault = arguments.get("fault")
        role, number = role_and_number(arguments)
        child = self._child(role, number)
        _LOG.warning("injecting %s into %s %d", fault, role.value, number)
        if fault in _SIGNALS:
            signal.pidfd_send_signal(child.pidfd, _SIGNALS[fault])
            return
        box = self._view.box(role.value, number)
        if fault == "slow" and role is Role.HANDLER:
            ms = integer(arguments, "value", 0, _MAX_SLOW_MS, 100)
            box.set_fault(Fault.SLOW_NS, ms * 1_000_000)
        elif fault == "fail-sync" and role is Role.HANDLER:
            box.set_fault(Fault.SYNC_ERRNO, integer(arguments, "value", 0, 133, 5))
        elif fault == "full-ring" and role is Role.PROCESSOR:
            box.set_fault(Fault.FULL_RING, integer(arguments, "value", 0, 1, 1))
        else:
            raise ControlError(
                f"{fault!r:.60} cannot be injected into a {role.value}; kill, stop and"
                " continue can into any process, slow and fail-sync into a handler,"
                " full-ring into a processor"
            )

    def _child(self, role: Role, number: int) -> Child:
        for child in self._supervisor.children:
            if child.role is role and child.number == number and child.is_alive:
                return child
        raise ControlError(f"there is no {role.value} {number}")
