"""RunningBroker: the parts of a broker, described in a manifest for its successor.

Every start makes one. Its methods import the modules that they need when they are
called: hardly any start is followed by an upgrade.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import LAYOUT_VERSION
from mpbroker.supervisor.listen_sockets import Origin

if TYPE_CHECKING:
    from mpbroker.config import BrokerConfig
    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.storage.log_directory import LogDirectory
    from mpbroker.supervisor.listen_sockets import Listener
    from mpbroker.supervisor.memory import BrokerMemory
    from mpbroker.supervisor.upgrade.manifest import Manifest
    from mpbroker.supervisor.upgrade.parent import Parent
    from mpbroker.supervisor.upgrade.upgrade import Upgrade


class RunningBroker(NamedTuple):
    """The parts of a broker in the supervisor's process; makes manifests of them.

    A manifest describes the broker for the program that takes over in an upgrade.

    Attributes:
        config: the settings with which the broker was started.
        listeners: the open listeners, by index.
        directories: the locked log directories.
        registry: the supervisor's own view of the metadata log.
        identity: the broker's published properties.
    """

    config: BrokerConfig
    memory: BrokerMemory
    listeners: Sequence[Listener]
    directories: Sequence[LogDirectory]
    registry: TopicRegistry
    supervisor: Parent
    identity: dict[str, Any]

    def upgrade(self) -> Upgrade:
        """Return the Upgrade, which can replace this broker by another version."""
        from mpbroker.supervisor.own_command import own_command
        from mpbroker.supervisor.upgrade.upgrade import Upgrade

        return Upgrade(
            self.supervisor.fork_aside,
            lambda: self.manifest(own_command(), ""),
            lambda: self.manifest_of_generation(own_command(), ""),
            self.supervisor.say_of_upgrade,
            lambda: self.supervisor.is_quiet,
            self.supervisor.only_ours,
        )

    def manifest(self, command: list[str], going_back: str) -> Manifest:
        """Describe the broker for a program that shares its memory and children.

        Args:
            command: the command that starts the running program, for the way back.
            going_back: why the running program gives up; "": it does not.
        """
        from mpbroker.supervisor.upgrade.manifest import Manifest

        memory = self.memory
        return Manifest(
            layout=LAYOUT_VERSION,
            version=self.identity["version"],
            command=command,
            going_back=going_back,
            parts=memory.parts.fds,
            max_request_bytes=self.config.socket_request_max_bytes,
            queued_bytes_each=memory.queued_bytes_each,
            node_id=self.config.node_id,
            listeners=[
                (
                    each.endpoint.listener_name,
                    self.config.endpoints[each.number].connection_string,
                    each.sock.fileno(),
                    each.origin is Origin.PASSED,
                )
                for each in self.listeners
            ],
            log_dirs=list(self.config.log_dirs),
            directories=[
                (each.path, each.lock_fd, each.clean) for each in self.directories
            ],
            children=[tuple(child.record) for child in self.supervisor.children],
            started=self.identity["started"],
        )

    def manifest_of_generation(
        self, command: list[str], going_back: str, *, by_force: bool = False
    ) -> Manifest:
        """Describe the broker for a program that lays memory out in another way.

        This forks the leaver, the process that ends the children when the next program
        asks it to.

        Args:
            command: the command that starts the running program, for the way back.
            going_back: why the running program gives up; "": it does not.
            by_force: whether a child that does not retire in time is killed, because
                the running program cannot go on.

        Raises:
            UpgradeError: the leaver cannot be started.
        """
        from mpbroker.supervisor.upgrade.generation import GenerationError, Leaver
        from mpbroker.supervisor.upgrade.replacement import UpgradeError

        leaver = Leaver(self.supervisor, self.memory, self.registry, by_force=by_force)
        try:
            link, pid = leaver.fork()
        except (GenerationError, OSError) as error:
            raise UpgradeError(str(error)) from error
        manifest = self.manifest(command, going_back)
        return manifest._replace(generation=link.detach(), leaver=pid)
