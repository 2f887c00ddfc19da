"""One broker from its first check to its last write."""

from __future__ import annotations

import errno
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mpbroker import __version__
from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import follow as follow_levels
from mpbroker.base.logger import get_logger, log_to_stderr
from mpbroker.base.logger import load as load_logging
from mpbroker.broker.authorizer_setup import check_authorizer
from mpbroker.broker.roles import Roles
from mpbroker.config import BrokerConfig
from mpbroker.config.listeners import exposure_warnings
from mpbroker.exporter.metrics_listener import metrics_url, open_metrics_listener
from mpbroker.ipc import compiled
from mpbroker.ipc.layout import (
    HEADER,
    HEADER_CLEAN_START,
    MAX_PROCESSORS,
    PROCESSOR_COUNTERS,
    ProcessorCounter,
    processor_row,
)
from mpbroker.ipc.parts import Parts
from mpbroker.metadata.meta_properties import open_data_directories
from mpbroker.storage.log_directory import (
    LogDirectory,
    open_log_directories,
    recover_metadata,
)
from mpbroker.supervisor import TAKEOVER_VARIABLE
from mpbroker.supervisor.child import Role
from mpbroker.supervisor.listen_sockets import Listener, close_listeners, open_listeners
from mpbroker.supervisor.live_config import LiveConfig
from mpbroker.supervisor.memory import BrokerMemory, set_control_plane
from mpbroker.supervisor.pool_settings import PoolSettings
from mpbroker.supervisor.supervisor import Supervisor
from mpbroker.supervisor.systemd import ServiceManager, take_inherited_sockets

if TYPE_CHECKING:
    from pathlib import Path

    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.supervisor.upgrade.next_generation import Left
    from mpbroker.supervisor.upgrade.takeover import Manifest, Takeover
    from mpbroker.supervisor.upgrade.upgrade import Upgrade

    # Describes the broker for a program: its command, and why another is given up.
    Describe = Callable[[list[str], str], Manifest]

_LOG = get_logger(__name__)
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
# After the start, when it disturbs nobody; from the second time on it does nothing.
_WARM_UP_S: Final = 1.0
# Metadata of any size has been read by then; nobody can say so while it is.
_RECOVERY_S: Final = 300.0


class Broker:
    """What ``mpbroker serve`` runs."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._has_children = False  # which end with us, unless there is a way back
        self._is_trial = False  # stop as soon as a request has come through
        self._listeners: Sequence[Listener] = ()
        # To a generation before us, while there are no children of ours.
        self._back: Describe | None = None

    def serve(self, *, ready_fd: int | None, pid_file: Path | None) -> int:
        """Start, serve until told to stop, stop; return the exit code.

        Raises:
            MpbrokerError: it cannot start.
        """
        log_to_stderr()  # the service manager, or the terminal, keeps it
        for warning in self._config.warnings:
            if warning not in exposure_warnings(self._config.endpoints):
                _LOG.warning("%s", warning)
        before = _takeover()
        if before is not None and before.is_trial:
            return self._try(before)
        if before is not None:
            directories = before.manifest.open_directories()
            ready_fd = None
        else:
            _try_files(self._config, pid_file)
            directories = open_log_directories(self._config.log_dirs)
        manifest = None if before is None else before.manifest
        try:
            return self._serve(directories, ready_fd, pid_file, manifest)
        except Exception as error:
            if manifest is not None and not self._has_children:
                _go_back(manifest, self._back or manifest.untouched, error)
            if limit := _limit_behind(error, self._config, self._has_children):
                raise MpbrokerError(limit) from error
            raise
        finally:
            close_listeners(self._listeners)
            for directory in directories:
                directory.close()

    def _try(self, before: Takeover) -> int:
        """Find out whether we could take over; say why not where that is asked."""
        try:
            before.manifest.check(self._config)
            changed = before.manifest.changed_layout(self._config)
            if not changed:
                before.manifest.memory(self._config)
            trial = BrokerConfig.load(
                {
                    "log.dirs": before.trial_directory,
                    "listeners": "PLAINTEXT://127.0.0.1:0",
                    "num.io.threads": "1",
                    "num.network.threads": "1",
                },
                None,
                {},
            )
            broker = Broker(trial)
            broker._is_trial = True
            status = broker.serve(ready_fd=None, pid_file=None)
            if changed and not status:
                from mpbroker.supervisor.upgrade.takeover import NEW_GENERATION

                os.write(before.reason_fd, (NEW_GENERATION + changed).encode())
            return status
        except (MpbrokerError, OSError) as error:
            before.refuse(str(error))
            raise

    def _serve(
        self,
        directories: list[LogDirectory],
        ready_fd: int | None,
        pid_file: Path | None,
        before: Manifest | None,
    ) -> int:
        config = self._config
        if any(each.security_protocol != "PLAINTEXT" for each in config.endpoints):
            from mpbroker.broker.listener_setup import check_security

            check_security(config)
        check_authorizer(config)
        if config.client_telemetry_receiver_class_name:
            from mpbroker.broker.telemetry_setup import check_receiver

            check_receiver(config)
        manager = ServiceManager()
        manager.extend_timeout(_RECOVERY_S, "STATUS=Recovering")
        inherited = take_inherited_sockets() if before is None else before.sockets()
        _raise_file_limit()
        paths = [directory.path for directory in directories]
        cluster_id = open_data_directories(paths, config.node_id)
        self._listeners = listeners = open_listeners(
            config.endpoints,
            config.socket_listen_backlog_size,
            config.socket_receive_buffer_bytes,
            inherited,
        )
        for warning in exposure_warnings(config.endpoints):
            _LOG.warning("%s", warning)
        names = [listener.endpoint.listener_name for listener in listeners]
        shares_memory = before is not None and not before.is_generation
        left = None
        if before is not None and shares_memory:
            memory = before.memory(config)
        else:
            memory = BrokerMemory(
                config.socket_request_max_bytes,
                config.queued_max_requests,
                config.queued_max_request_bytes // _processors(config, names),
                Parts(None, None if before is None else before.parts),
            )
            clean = all(directory.clean for directory in directories)
            memory.control.words[HEADER + HEADER_CLEAN_START] = clean
            if before is not None:
                left, self._back = _take_over_from(before, directories, memory)
            # The generation before us would not know its log again, if it came back.
            recover_metadata(directories, memory.metadata_cell, is_alone=before is None)
        if not shares_memory:
            set_control_plane(memory, config.control_plane_listener_name, names)
        follow_levels(memory.log_levels)
        roles = Roles(config, memory, directories, listeners, cluster_id)
        roles.metrics_socket = open_metrics_listener(config, memory.parts)
        registry = roles.known = roles.parts.registry()
        if before is None:
            roles.parts.close_until_restored(registry)
        for directory in directories:
            directory.know_topics({t.name: t.topic_id for t in registry.topics()})
        for row in range(0 if shares_memory else registry.row_count):
            memory.table.initialise_row(row)
        live = LiveConfig(config, registry, memory, listeners, roles.use)
        identity = _identity(cluster_id, listeners, paths, before)
        if roles.metrics_socket is not None:
            identity["metrics"] = metrics_url(roles.metrics_socket)
        supervisor = Supervisor(
            roles,
            memory,
            listeners,
            PoolSettings(config, registry, names),
            lambda: _caught_up_rows(registry),
            identity,
            before.records() if before is not None and shares_memory else (),
        )

        def describe(command: list[str], going_back: str) -> Manifest:
            from mpbroker.supervisor.upgrade.takeover import manifest_of

            return manifest_of(
                config,
                memory,
                listeners,
                directories,
                supervisor,
                identity,
                command,
                going_back,
            )

        leave = partial(_fork_leaver, supervisor, memory, registry, describe)
        supervisor.make_upgrade = partial(_make_upgrade, supervisor, describe, leave)
        back = self._back or describe
        if ready_fd is not None:
            supervisor.only_ours.add(ready_fd)
        load_logging()
        # What exists now is never collected: the children share its pages. There is
        # no garbage worth a collection, which would take a tenth of the start.
        gc.freeze()
        gc.enable()
        control = service = None
        try:
            if before is None:
                self._has_children = True
                supervisor.fork_pools()
            gc.disable()
            # What only this process needs is imported while those get ready; it makes
            # them neither later nor larger.
            from mpbroker.broker.guards import post_guards
            from mpbroker.supervisor.control.control_setup import BrokerControl
            from mpbroker.supervisor.service import Service

            service = Service(
                manager,
                supervisor,
                listeners,
                partial(
                    self._serving, supervisor, listeners, paths, ready_fd, pid_file
                ),
                partial(_describe, supervisor, memory),
                lambda: (c.pid for c in supervisor.children if c.role is Role.HANDLER),
                supervisor.is_accepting,
                [each.name for each in inherited],
            )
            self._has_children = True
            control = BrokerControl(
                config,
                memory,
                supervisor,
                registry,
                identity,
                partial(live.rebase, supervisor),
                live.has_news,
                service.reload,
            )
            supervisor.on_hangup = control.hang_up
            post_guards(supervisor, memory, listeners, paths[0])
            supervisor.each_turn(partial(live.turn, supervisor))
            service.begin()
            gc.freeze()
            gc.enable()
            proved = _nothing_more
            if before is not None and left is not None:
                proved = _begin_generation(supervisor, memory, before, left)
                back = partial(leave, by_force=True)
            if supervisor.start():
                service.all_started()
                if before is not None:
                    _renew(supervisor, before, back, proved)
                supervisor.run()
        except Exception as error:
            if before is not None and not supervisor.is_running:
                _go_back(before, back, error)
            raise
        finally:
            if service is not None:
                service.stopping()
            supervisor.stop()
            if control is not None:
                control.close()
            if pid_file is not None:
                pid_file.unlink(missing_ok=True)
        return 1 if supervisor.failed else 0

    def _serving(
        self,
        supervisor: Supervisor,
        listeners: list[Listener],
        paths: list[str],
        ready_fd: int | None,
        pid_file: Path | None,
    ) -> None:
        """A request has come through every stage."""
        supervisor.start_rest()
        if self._is_trial:
            supervisor.request_stop()
        _announce(supervisor, listeners, paths, ready_fd, pid_file)
        # Not before: where a start takes long, it would take longer.
        supervisor.once(_WARM_UP_S, Roles.warm_up)
        if not self._is_trial:
            supervisor.once(_WARM_UP_S, _tidy_up)


def _tidy_up() -> None:
    """Remove what brokers have left that were killed in the middle of an upgrade."""
    from mpbroker.supervisor.upgrade.trial_directory import remove_left_directories

    remove_left_directories()


def _takeover() -> Takeover | None:
    """What the program before us has left, if there was one."""
    if TAKEOVER_VARIABLE not in os.environ:
        return None
    from mpbroker.supervisor.upgrade.takeover import takeover

    return takeover()


def _go_back(before: Manifest, back: Describe, reason: str | Exception) -> None:
    from mpbroker.supervisor.upgrade.upgrade import go_back

    go_back(before, back, reason)


def _make_upgrade(
    supervisor: Supervisor, describe: Describe, leave: Describe
) -> Upgrade:
    from mpbroker.supervisor.own_command import own_command
    from mpbroker.supervisor.upgrade.upgrade import Upgrade

    return Upgrade(
        supervisor.fork_aside,
        lambda: describe(own_command(), ""),
        lambda: leave(own_command(), ""),
        supervisor.say_of_upgrade,
        lambda: supervisor.is_quiet,
        supervisor.only_ours,
    )


# -- a generation of another layout of memory ------------------------------------------
# Imported where it is needed: hardly any start needs it.


def _fork_leaver(
    supervisor: Supervisor,
    memory: BrokerMemory,
    registry: TopicRegistry,
    describe: Describe,
    command: list[str],
    going_back: str,
    *,
    by_force: bool = False,
) -> Manifest:
    """Describe the broker for a program that lays memory out in another way.

    Raises:
        UpgradeError: nobody can be started who would end this generation.
    """
    from mpbroker.supervisor.upgrade.generation import GenerationError, Leaver
    from mpbroker.supervisor.upgrade.upgrade import UpgradeError

    sockets = supervisor.sockets_kept
    leaver = Leaver(supervisor, memory, registry, sockets, by_force=by_force)
    try:
        link, pid = leaver.fork()
    except (GenerationError, OSError) as error:
        raise UpgradeError(str(error)) from error
    manifest = describe(command, going_back)
    return manifest._replace(generation=link.detach(), leaver=pid)


def _take_over_from(
    before: Manifest, directories: Sequence[LogDirectory], memory: BrokerMemory
) -> tuple[Left, Describe]:
    """End the generation before us; from now on nobody is served until we do.

    Returns:
        What it has left, and what gives that back.

    Raises:
        TakeoverError: it could not be ended; it can go on.
    """
    # All that is imported until the first fork: nobody shall wait for it.
    from mpbroker.supervisor.upgrade.next_generation import give_back, take_over_from

    left = take_over_from(before)
    for directory in directories:
        directory.know_logs(left.logs)
    # Now that nobody can change any of it any more.
    memory.inherit_from(before.parts)
    return left, partial(give_back, before, left)


def _begin_generation(
    supervisor: Supervisor, memory: BrokerMemory, before: Manifest, left: Left
) -> Callable[[], None]:
    """Carry on the connections of another generation.

    Returns:
        What to call when all is proved.

    Raises:
        TakeoverError: they cannot be.
    """
    from mpbroker.supervisor.upgrade.next_generation import NextGeneration, bury

    generation = NextGeneration(supervisor, memory)
    generation.begin(left)
    bury(before, memory.parts.fds)
    supervisor.sockets_kept = generation.sockets
    return generation.forget_sockets


def _nothing_more() -> None:
    """There were no sockets to be forgotten."""


def _renew(
    supervisor: Supervisor,
    before: Manifest,
    back: Describe,
    proved: Callable[[], None],
) -> None:
    """Replace the children of the program before us, or go back to it."""
    failed = before.going_back
    if failed:
        supervisor.say_of_upgrade(f"going back to {__version__}: {failed}")
    else:
        supervisor.say_of_upgrade(f"replacing the processes of {before.version}")

    def ended(reason: str) -> None:
        if reason:
            _go_back(before, back, reason)
        if failed:
            supervisor.say_of_upgrade(f"failed, and was undone: {failed}")
        elif reason:
            supervisor.say_of_upgrade(f"failed, and there is no way back: {reason}")
        else:
            _LOG.info("upgrade: done, %s to %s", before.version, __version__)
            supervisor.say_of_upgrade(f"done: {before.version} to {__version__}")
        proved()

    supervisor.renew_all(ended, are_ours=before.is_generation)


def _processors(config: BrokerConfig, listeners: list[str]) -> int:
    """How many processors the broker is started with, over all listeners."""
    own = config.own_processors()
    return sum(own.get(name, config.num_network_threads) for name in listeners)


def _caught_up_rows(registry: Any) -> int:
    registry.catch_up()
    return int(registry.row_count)


def _identity(
    cluster_id: str,
    listeners: list[Listener],
    paths: list[str],
    before: Manifest | None,
) -> dict[str, Any]:
    return {
        "version": __version__,
        "pid": os.getpid(),
        # Of the service, which an upgrade does not end.
        "started": time.time() if before is None else before.started,
        "cluster_id": cluster_id,
        **Listener.state_of(listeners),
        "log_dirs": paths,
    }


def _describe(supervisor: Supervisor, memory: BrokerMemory) -> str:
    words = memory.control.words
    connections = sum(
        words[processor_row(number) + PROCESSOR_COUNTERS + ProcessorCounter.CONNECTIONS]
        for number in range(MAX_PROCESSORS)
    )
    restarts = sum(child.restarts for child in supervisor.children)
    return f"{connections} connections, {restarts} restarts"


def _announce(
    supervisor: Supervisor,
    listeners: list[Listener],
    paths: list[str],
    ready_fd: int | None,
    pid_file: Path | None,
) -> None:
    """Tell everyone who waits that the broker serves."""
    if pid_file is not None:
        _write_pid_file(pid_file)
    addresses = {each.endpoint.listener_name: each.address for each in listeners}
    _LOG.info("request path: %s", compiled.DESCRIPTION)
    _LOG.info("serving %s", ", ".join(each.told for each in listeners))
    if ready_fd is not None:
        import json

        message = {"pid": os.getpid(), "listeners": addresses, "data_dir": paths[0]}
        try:
            os.write(ready_fd, json.dumps(message).encode() + b"\n")
        except OSError as error:  # say, whoever waited has gone
            _LOG.warning("--ready-fd %d: %s", ready_fd, error.strerror)
        os.close(ready_fd)
        supervisor.only_ours.discard(ready_fd)  # its number may be used again


def _write_pid_file(path: Path) -> None:
    with _naming("--pid-file ", path):
        path.write_text(f"{os.getpid()}\n")


def _try_files(config: BrokerConfig, pid_file: Path | None) -> None:
    """Find out now, and not when the broker serves, what cannot be written."""
    wanted = (
        ("--pid-file ", pid_file),
        ("request.log.path=", config.request_log_path),
        ("client.telemetry.log.path=", config.client_telemetry_log_path),
    )
    for name, path in wanted:
        if not path:
            continue
        with _naming(name, path):
            was_there = os.path.lexists(path)
            try:
                # What is there stays as it is.
                os.close(os.open(path, _APPEND, 0o600))
            except OSError as error:
                if error.errno != errno.ENXIO:  # a pipe: its reader may come later
                    raise
            if not was_there:  # that there is one says that a broker serves
                os.unlink(path)


@contextmanager
def _naming(name: str, path: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MpbrokerError(
            f"{name}{path}: cannot be written: {error.strerror}; name a file in a"
            " directory that this user may write"
        ) from error


def _limit_behind(error: Exception, config: BrokerConfig, has_memory: bool) -> str:
    """Which limit or setting an error comes from, for people; or nothing."""
    if not isinstance(error, OSError):
        return ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"out of open files: RLIMIT_NOFILE is {soft} (at most {hard}), and a"
            " broker needs some 300 before its first connection; raise it with"
            " ulimit -n, or LimitNOFILE= in the unit"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if error.errno == errno.ENOMEM and soft != resource.RLIM_INFINITY:
        return (
            f"out of address space: RLIMIT_AS is {soft}, and a broker maps gigabytes"
            " of which it uses little; take the limit away with ulimit -v unlimited,"
            " or LimitAS=infinity in the unit"
        )
    queued = config.queued_max_request_bytes
    if error.errno == errno.ENOMEM and queued > 0 and not has_memory:
        return f"queued.max.request.bytes={queued}: so much cannot be mapped; lower it"
    return ""


def _raise_file_limit() -> None:
    """Connections and segments are descriptors: take all that we may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
