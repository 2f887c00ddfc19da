"""One broker, from the first check of its start to its last write."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from mpbroker import __version__
from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import follow as follow_levels
from mpbroker.base.logger import get_logger, log_to_stderr
from mpbroker.broker.process_parts import ProcessParts
from mpbroker.broker.roles import Roles
from mpbroker.broker.serving import Audience, Serving
from mpbroker.broker.start_errors import (
    check_cluster_schema,
    check_files,
    check_remote_storage,
    check_settings,
    join_cluster,
    limit_behind,
    raise_file_limit,
)
from mpbroker.config import BrokerConfig
from mpbroker.config.listeners import exposure_warnings
from mpbroker.exporter.metrics_listener import (
    open_console_listener,
    open_metrics_listener,
    url_of,
)
from mpbroker.ipc.layout import HEADER, HEADER_CLEAN_START, MAX_PARTITIONS
from mpbroker.ipc.parts import Parts
from mpbroker.metadata.meta_properties import open_data_directories
from mpbroker.storage.log_directory import (
    LogDirectory,
    know_of_each_other,
    open_log_directories,
    recover_metadata,
)
from mpbroker.storage.offline_directories import not_there_at_start
from mpbroker.supervisor import TAKEOVER_VARIABLE
from mpbroker.supervisor.listen_sockets import Listener, close_listeners, open_listeners
from mpbroker.supervisor.live_config import LiveConfig
from mpbroker.supervisor.memory import BrokerMemory, set_control_plane
from mpbroker.supervisor.pool_settings import PoolSettings
from mpbroker.supervisor.supervisor import Supervisor
from mpbroker.supervisor.systemd import (
    InheritedSocket,
    ServiceManager,
    take_inherited_sockets,
)
from mpbroker.supervisor.upgrade.running_broker import RunningBroker

if TYPE_CHECKING:
    from pathlib import Path

    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.supervisor.upgrade.manifest import Manifest
    from mpbroker.supervisor.upgrade.predecessor import Predecessor
    from mpbroker.supervisor.upgrade.takeover import Takeover

_LOG = get_logger(__name__)

# Metadata of any size has been read by then; while it is read no other extension of the
# service manager's timeout can be asked for.
_RECOVERY_S: Final = 300.0


class Broker:
    """The broker that ``mpbroker serve`` starts; one object serves once.

    A start has three parts: open the data directories and listen sockets, make or
    attach the shared memory, compose the objects of this process. Then a ``Serving``
    forks the children. A program that takes over in an upgrade does the same with the
    descriptors that the other program has left; see mpbroker/supervisor/upgrade.
    """

    def __init__(self, config: BrokerConfig, *, is_trial: bool = False) -> None:
        """Prepare a broker; nothing is opened yet.

        Args:
            config: the settings.
            is_trial: whether the broker stops as soon as a request has come through
                every stage.
        """
        self._config = config
        self._is_trial = is_trial
        self._manager = ServiceManager()
        self._has_children = False
        self._directories: list[LogDirectory] = []
        self._listeners: list[Listener] = []
        self._cluster_id = ""

    def serve(self, *, ready_fd: int | None, pid_file: Path | None) -> int:
        """Start the broker, serve clients until told to stop, and stop it.

        Args:
            ready_fd: receives one line of JSON when the broker serves, and is closed.
            pid_file: receives the supervisor's process id.

        Returns:
            The exit code of the process.

        Raises:
            MpbrokerError: the broker cannot start.
        """
        log_to_stderr()  # the service manager, or the terminal, keeps it
        for warning in self._config.warnings:
            if warning not in exposure_warnings(self._config.endpoints):
                _LOG.warning("%s", warning)
        before = _takeover()
        if before is not None and before.is_trial:
            return self._try_takeover(before)
        try:
            if before is not None:
                return self._take_over(before.manifest, pid_file)
            return self._start_fresh(ready_fd, pid_file)
        except Exception as error:
            has_memory = self._has_children
            if limit := limit_behind(error, self._config, has_memory=has_memory):
                raise MpbrokerError(limit) from error
            raise
        finally:
            close_listeners(self._listeners)
            for directory in self._directories:
                directory.close()

    # -- the ways to start -------------------------------------------------------------

    def _start_fresh(self, ready_fd: int | None, pid_file: Path | None) -> int:
        """Start the broker without a previous program; run it; return the exit code."""
        check_files(self._config, pid_file)
        self._directories = open_log_directories(self._config.log_dirs)
        check_settings(self._config)
        self._manager.extend_timeout(_RECOVERY_S, "STATUS=Recovering")
        inherited = take_inherited_sockets()
        paths = [directory.path for directory in self._directories]
        news = join_cluster(self._config, paths)
        self._open(inherited)
        if know_of_each_other(paths):
            from mpbroker.storage.used_directories import look_at_start

            look_at_start(paths, self._config.log_dirs)
        # Not in a takeover: the program before this one has the directories in use.
        check_remote_storage(self._config, self._cluster_id, paths)
        memory = self._new_memory(Parts())
        cell, node_id = memory.metadata_cell, self._config.node_id
        recover_metadata(self._directories, cell, node_id, is_alone=True, news=news)
        roles = self._make_roles(memory)
        # Before the first fork: no child may open a partition in between.
        roles.parts.close_until_restored(roles.known)
        _initialise_rows(roles)
        broker, supervisor, live = self._compose(roles, None)
        audience = self._audience(inherited, ready_fd, pid_file)
        serving = Serving(broker, supervisor, live, audience)
        try:
            self._has_children = True
            serving.fork_pools()
            serving.begin()
            return serving.run()
        finally:
            serving.stop()

    def _try_takeover(self, before: Takeover) -> int:
        """Try whether this program could take over; tell the running one the outcome.

        It checks the manifest (the running program's list of what it would hand over),
        attaches its memory unless the layout has changed, and then serves from a
        directory of its own until one request has passed through every process.

        Returns:
            The exit code.

        Raises:
            MpbrokerError, OSError: it could not take over; the running program has
                been told why.
        """
        try:
            before.manifest.check(self._config)
            check_cluster_schema(self._config)
            changed = before.manifest.changed_layout(self._config)
            if not changed:
                before.manifest.memory(self._config)
            settings = {
                "log.dirs": before.trial_directory,
                "listeners": "PLAINTEXT://127.0.0.1:0",
                "num.io.threads": "1",
                "num.network.threads": "1",
            }
            trial = Broker(BrokerConfig.load(settings, None, {}), is_trial=True)
            status = trial.serve(ready_fd=None, pid_file=None)
            if changed and not status:
                before.ask_for_generation(changed)
            return status
        except (MpbrokerError, OSError) as error:
            before.refuse(str(error))
            raise

    def _take_over(self, manifest: Manifest, pid_file: Path | None) -> int:
        """Take over the previous program's children or connections; serve to the end.

        If anything fails before all processes serve, this program becomes the previous
        one again. That must come before anything is stopped or closed: the previous
        program needs the children and the descriptors.

        Returns:
            The exit code of the process.
        """
        from mpbroker.supervisor.upgrade.predecessor import Predecessor

        predecessor = Predecessor(manifest)
        serving = None
        try:
            self._directories = manifest.open_directories()
            check_settings(self._config)
            self._manager.extend_timeout(_RECOVERY_S, "STATUS=Recovering")
            inherited = manifest.sockets()
            self._open(inherited)
            if manifest.is_generation:
                memory = self._memory_of_generation(predecessor)
                roles = self._make_roles(memory)
                _initialise_rows(roles)
            else:
                roles = self._make_roles(manifest.memory(self._config))
            broker, supervisor, live = self._compose(roles, manifest)
            predecessor.meet(broker)
            audience = self._audience(inherited, None, pid_file)
            serving = Serving(broker, supervisor, live, audience)
            self._has_children = True
            serving.begin()
            predecessor.begin_generation(broker)
            return serving.run(partial(predecessor.renew, supervisor))
        except Exception as error:
            if serving is None or not serving.is_running:
                predecessor.go_back(error)
            raise
        finally:
            if serving is not None:
                serving.stop()

    # -- the parts of a start ----------------------------------------------------------

    def _open(self, inherited: Sequence[InheritedSocket]) -> None:
        """Open the listen sockets, and the data directories' meta.properties."""
        config = self._config
        raise_file_limit()
        usable = [each.path for each in self._directories if not each.has_failed]
        self._cluster_id = open_data_directories(usable, config.node_id)
        self._listeners = open_listeners(
            config.endpoints,
            config.socket_listen_backlog_size,
            config.socket_receive_buffer_bytes,
            inherited,
        )
        for warning in exposure_warnings(config.endpoints):
            _LOG.warning("%s", warning)

    def _listener_names(self) -> list[str]:
        return [listener.endpoint.listener_name for listener in self._listeners]

    def _new_memory(self, parts: Parts) -> BrokerMemory:
        """Make the shared memory of all processes; store the values that stay fixed.

        One of them says whether the last stop was clean.
        """
        config = self._config
        own = config.own_processors()
        processors = sum(
            own.get(name, config.num_network_threads) for name in self._listener_names()
        )
        memory = BrokerMemory(
            config.socket_request_max_bytes,
            config.queued_max_requests,
            config.queued_max_request_bytes // processors,
            parts,
        )
        clean = all(directory.clean for directory in self._directories)
        memory.control.words[HEADER + HEADER_CLEAN_START] = clean
        set_control_plane(
            memory, config.control_plane_listener_name, self._listener_names()
        )
        return memory

    def _memory_of_generation(self, predecessor: Predecessor) -> BrokerMemory:
        """Make new shared memory in an upgrade, and end the old program's children.

        They use memory with another layout.
        """
        memory = self._new_memory(Parts(None, predecessor.manifest.parts))
        # Clients wait from the children's end to our first fork: all that is needed
        # until then is imported now.
        import_module("mpbroker.broker.watch")
        predecessor.end_generation(self._directories, memory)
        # After their end, since they wrote the log. It is not rewritten, as we are not
        # alone: the old program, if it comes back, must find its log as it knows it.
        cell, node_id = memory.metadata_cell, self._config.node_id
        recover_metadata(self._directories, cell, node_id, is_alone=False)
        return memory

    def _make_roles(self, memory: BrokerMemory) -> Roles:
        """Read the metadata log; make the object whose methods the children run."""
        config = self._config
        follow_levels(memory.log_levels)
        metrics_socket = open_metrics_listener(config, memory.parts)
        console_socket = open_console_listener(config, memory.parts)
        parts = ProcessParts(
            config, memory, self._directories, self._listeners, self._cluster_id
        )
        roles = Roles(parts, metrics_socket, console_socket)
        for directory in self._directories:
            directory.know_topics({t.name: t.topic_id for t in roles.known.topics()})
        return roles

    def _compose(
        self, roles: Roles, before: Manifest | None
    ) -> tuple[RunningBroker, Supervisor, LiveConfig]:
        """Build the supervisor and the objects that it uses; fork nothing yet."""
        config, listeners = self._config, self._listeners
        memory, registry = roles.parts.memory, roles.known
        live = LiveConfig(config, registry, memory, listeners, roles.use)
        identity = self._identity(before)
        if roles.metrics_socket is not None:
            identity["metrics"] = url_of(roles.metrics_socket)
        if roles.console_socket is not None:
            # Imported here: most brokers have no console.
            from mpbroker.config.console_settings import console_address

            address = console_address(config)
            is_secure = address is not None and address.is_secure
            identity["console"] = url_of(roles.console_socket, is_secure=is_secure)
        shares_children = before is not None and not before.is_generation
        supervisor = Supervisor(
            roles,
            memory,
            listeners,
            PoolSettings(config, registry, self._listener_names()),
            partial(_rows_in_use, registry),
            identity,
            before.records() if before is not None and shares_children else (),
        )
        broker = RunningBroker(
            config, memory, listeners, self._directories, registry, supervisor, identity
        )
        return broker, supervisor, live

    def _identity(self, before: Manifest | None) -> dict[str, Any]:
        """Return the properties that this broker publishes: version, addresses, ...

        Args:
            before: the manifest (the previous program's list of what it hands over) in
                an upgrade.
        """
        # With the first publication: a reader who sees the new version shall see, too,
        # that its upgrade goes on.
        upgrade = (
            {}
            if before is None
            else {"upgrade": before.step, "upgrade_at": time.time()}
        )
        paths = [directory.path for directory in self._directories]
        return upgrade | {
            "version": __version__,
            "pid": os.getpid(),
            # The service's start, which an upgrade does not change.
            "started": time.time() if before is None else before.started,
            "cluster_id": self._cluster_id,
            **Listener.state_of(self._listeners),
            "log_dirs": paths,
            **(
                not_there_at_start(self._config.log_dirs, paths)
                if len(paths) < len(self._config.log_dirs) or know_of_each_other(paths)
                else {}
            ),
            "remote_storage_url": self._config.remote_storage_place
            if self._config.remote_log_storage_system_enable
            else None,
            "cluster_node": {
                "id": self._config.node_id,
                "storage": self._config.diskless_storage_url,
            }
            if self._config.cluster_database_url
            else None,
        }

    def _audience(
        self,
        inherited: Sequence[InheritedSocket],
        ready_fd: int | None,
        pid_file: Path | None,
    ) -> Audience:
        stored = [each.name for each in inherited]
        return Audience(self._manager, stored, ready_fd, pid_file, self._is_trial)


def _takeover() -> Takeover | None:
    """Return the takeover, if this program replaces another one; otherwise None."""
    if TAKEOVER_VARIABLE not in os.environ:
        return None
    # Imported here: hardly any start is a takeover.
    from mpbroker.supervisor.upgrade.takeover import takeover

    return takeover()


def _initialise_rows(roles: Roles) -> None:
    """Make the partitions' rows in new memory usable.

    Raises:
        MpbrokerError: there are more partitions than rows.
    """
    count = roles.known.row_count
    if count > MAX_PARTITIONS:
        raise MpbrokerError(
            f"the metadata log has {count} partitions, with deleted ones that are still"
            f" being removed; a broker has room for {MAX_PARTITIONS}"
        )
    for row in range(count):
        roles.parts.memory.table.initialise_row(row)


def _rows_in_use(registry: TopicRegistry) -> int:
    """Return how many rows of the partition table may be in use.

    If the disk fails, so that the newest topics cannot be read, that is all rows: those
    above max.partitions, too, which a node of a cluster may use.
    """
    registry.catch_up()
    return MAX_PARTITIONS if registry.is_behind else registry.row_count
