"""Who watches beside the supervisor's own duties, and what for."""

from collections.abc import Sequence
from functools import partial

from mpbroker.supervisor.listen_sockets import Listener
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.orphans import INTERVAL_S, inherits_orphans, reap_orphans
from mpbroker.supervisor.repair.canaries import Canaries
from mpbroker.supervisor.repair.leases import Leases
from mpbroker.supervisor.repair.quarantine import Quarantine
from mpbroker.supervisor.supervisor import Supervisor


def post_guards(
    supervisor: Supervisor,
    memory: BrokerMemory,
    listeners: Sequence[Listener],
    directory: str,
) -> None:
    """Let all of them begin; before the first death is seen to.

    Args:
        directory: a log directory, where requests are kept that kill.
    """
    Leases(supervisor, memory.control.words).begin()
    Quarantine(supervisor, memory, directory).begin()
    Canaries(supervisor, memory.control.words, listeners).begin()
    if inherits_orphans():
        supervisor.every(INTERVAL_S, partial(_reap_orphans, supervisor))


def _reap_orphans(supervisor: Supervisor) -> None:
    reap_orphans({child.pid for child in supervisor.children} | supervisor.asides)
