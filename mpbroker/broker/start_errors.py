"""Find errors of the settings before the start, and name the setting to change."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.metadata.metadata_log import is_copy
from mpbroker.storage.files.log_files import REMOTE_CACHE_DIRECTORY

if TYPE_CHECKING:
    from pathlib import Path

    from mpbroker.config import BrokerConfig

_LOG = get_logger(__name__)
_STORE_S: Final = 60
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC


def check_settings(config: BrokerConfig) -> None:
    """Load and check the certificates and plug-in classes that the settings name.

    Call it once, before the first fork: so the command reports an error, instead of a
    child's line in the log, and the children need not import the classes again.

    Raises:
        ConfigError: a certificate or a class cannot be used.
    """
    if any(each.security_protocol != "PLAINTEXT" for each in config.endpoints):
        from mpbroker.broker.listener_setup import check_security

        check_security(config)
    if config.console_listeners:
        from mpbroker.config.listener_security import tls_of_console
        from mpbroker.network.security.tls import make_context

        settings = tls_of_console(config)
        if settings is not None:
            make_context(settings)
    from mpbroker.broker.authorizer_setup import check_authorizer

    check_authorizer(config)
    if config.client_telemetry_receiver_class_name:
        from mpbroker.broker.telemetry_setup import check_receiver

        check_receiver(config)


def check_remote_storage(
    config: BrokerConfig, cluster_id: str, usable: Sequence[str]
) -> None:
    """Claim this broker's key prefix in the remote store, if tiered storage is on.

    If the store does not answer, the broker starts all the same. It does not if
    partition directories are missing that the store may have: their partitions would
    begin again at offset 0.

    The local cache of remote segments is removed: it was not forced to disk, and a
    power cut may have damaged it.

    If a log directory is lost, no partition is restored: it may be in that directory,
    with records that the store lacks. It stays offline until the directory is back, or
    was given up before a later start.

    The store's client runs in a process of its own: it has threads, and a process with
    threads must not fork.

    Args:
        config: the broker's settings.
        cluster_id: the cluster's id.
        usable: the directories of ``log.dirs`` that can be used, the first one first.

    Raises:
        MpbrokerError: the store cannot be used, or the prefix belongs to another
            broker.
    """
    for directory in config.log_dirs:
        if os.path.isdir(cache := f"{directory}/{REMOTE_CACHE_DIRECTORY}"):
            import shutil

            shutil.rmtree(cache, ignore_errors=True)
    if not config.remote_log_storage_system_enable:
        return
    # Imported here: most brokers have no remote store.
    import subprocess
    import sys

    url = config.remote_storage_place
    assert url is not None
    from mpbroker.storage.used_directories import may_lack_partitions

    is_lost = len(usable) < len(config.log_dirs) or may_lack_partitions(usable)
    restored = [] if is_lost else usable
    module = "mpbroker.storage.remote.store_owner"
    command = [
        *(sys.executable, "-m", module),
        *(url, cluster_id, str(config.node_id), usable[0], *restored),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_STORE_S
        )
        status, said = done.returncode, done.stderr.strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        status, said = os.EX_TEMPFAIL, [f"{url}: no answer within {_STORE_S} s"]
    if not status:
        for line in done.stdout.splitlines():
            _LOG.warning("%s; what was not copied is lost", line)
        return
    reason = f"remote.storage.url: {said[0] if said else f'exit {status}'}"
    if status != os.EX_TEMPFAIL:
        raise MpbrokerError(reason)
    from mpbroker.storage.remote.store_owner import lost_partitions

    if lost_partitions(restored):
        raise MpbrokerError(f"{reason}; and directories are missing that it has")
    _LOG.error("%s; the broker starts without it", reason)


def join_cluster(config: BrokerConfig, usable: Collection[str]) -> bytes:
    """Claim this broker's node id in its cluster, if the settings name a cluster.

    New data directories become the cluster's. This runs in a process of its own, as in
    ``check_remote_storage``. The process reads the settings from a pipe: they may hold
    a password, which a command line would show.

    Args:
        config: the broker's settings.
        usable: the directories of ``log.dirs`` that can be used. A node starts without
            the others, but not without the first one, which has its identity.

    Returns:
        What the cluster's metadata log has behind this node's copy, as batches. This
        process appends it, before any other reads the copy: the process that joins may
        live on when this one is killed, and would write while the next start does.

    Raises:
        MpbrokerError: the broker may not be this node of this cluster; or the database
            or the object store, of which a node needs both, cannot be used.
    """
    if not config.cluster_database_url:
        first = config.log_dirs[0]
        if is_copy(first):
            raise MpbrokerError(
                f"log.dirs: {first} is a cluster's node, whose topics belong to all"
                " nodes: set cluster.database.url and diskless.storage.url, or use"
                " another directory"
            )
        return b""
    first, *others = config.log_dirs
    return _ask_cluster(config, [first, *(path for path in others if path in usable)])


def check_cluster_schema(config: BrokerConfig) -> None:
    """Check that this program can work with the database of its cluster, if it has one.

    A running broker that is upgraded in place has joined its cluster already.

    Raises:
        MpbrokerError: it cannot; or the database gives no answer.
    """
    if config.cluster_database_url:
        _ask_cluster(config, config.log_dirs, "--check")


def _ask_cluster(config: BrokerConfig, log_dirs: Sequence[str], *options: str) -> bytes:
    """Run mpbroker.cluster.join_cluster; return its output, or raise MpbrokerError."""
    # Imported here: most brokers are in no cluster.
    import subprocess
    import sys

    import orjson

    told = {
        "database": config.cluster_database_url,
        "storage": config.diskless_storage_place,
        "log_dirs": log_dirs,
        "node_id": config.node_id,
        "rack": config.broker_rack,
        "listeners": [endpoint.connection_string for endpoint in config.endpoints],
    }
    command = [sys.executable, "-m", "mpbroker.cluster.join_cluster", *options]
    try:
        done = subprocess.run(
            command,
            input=orjson.dumps(told),
            capture_output=True,
            check=False,
            timeout=_STORE_S,
        )
    except subprocess.TimeoutExpired:
        raise MpbrokerError(
            f"cluster.database.url: no answer within {_STORE_S} s"
        ) from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise MpbrokerError(said[0] if said else f"the cluster: exit {done.returncode}")
    return done.stdout


def check_files(config: BrokerConfig, pid_file: Path | None) -> None:
    """Open every file for writing that the broker will write to later, and close it.

    Raises:
        MpbrokerError: a file cannot be written.
    """
    wanted = (
        ("--pid-file ", pid_file),
        ("request.log.path=", config.request_log_path),
        ("slow.request.log.path=", config.slow_request_log_path),
        ("client.telemetry.log.path=", config.client_telemetry_log_path),
    )
    for name, path in wanted:
        if not path:
            continue
        with explaining(name, path):
            was_there = os.path.lexists(path)
            try:
                # O_APPEND: the content of an existing file stays.
                os.close(os.open(path, _APPEND, 0o600))
            except OSError as error:
                if error.errno != errno.ENXIO:  # a pipe: its reader may come later
                    raise
            if not was_there:  # a pid file that exists means that a broker serves
                os.unlink(path)


@contextmanager
def explaining(name: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError into an MpbrokerError that names the setting and its path."""
    try:
        yield
    except OSError as error:
        raise MpbrokerError(
            f"{name}{path}: cannot be written: {error.strerror}; name a file in a"
            " directory that this user may write"
        ) from error


def limit_behind(error: Exception, config: BrokerConfig, *, has_memory: bool) -> str:
    """Return the limit or setting that has caused an error, as text with advice.

    Returns "" if no limit is known to be the cause.

    Args:
        error: the error of a start.
        config: the settings.
        has_memory: whether the shared memory was mapped before the error.
    """
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


def raise_file_limit() -> None:
    """Allow this process as many descriptors as the hard limit permits.

    Every connection and every open segment needs a descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
