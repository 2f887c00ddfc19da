"""Find out before the start what cannot work, and name the setting to be changed."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from mpbroker.base.errors import MpbrokerError

if TYPE_CHECKING:
    from pathlib import Path

    from mpbroker.config import BrokerConfig

_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC


def check_settings(config: BrokerConfig) -> None:
    """Load and check what the settings name: certificates, users' classes.

    Once, before the first fork: an error is the command's, not a child's log line, and
    the children need not import the classes again.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if any(each.security_protocol != "PLAINTEXT" for each in config.endpoints):
        from mpbroker.broker.listener_setup import check_security

        check_security(config)
    from mpbroker.broker.authorizer_setup import check_authorizer

    check_authorizer(config)
    if config.client_telemetry_receiver_class_name:
        from mpbroker.broker.telemetry_setup import check_receiver

        check_receiver(config)


def check_files(config: BrokerConfig, pid_file: Path | None) -> None:
    """Open every file for writing that the broker will write to later, and close it.

    Raises:
        MpbrokerError: one cannot be written.
    """
    wanted = (
        ("--pid-file ", pid_file),
        ("request.log.path=", config.request_log_path),
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
    """Return which limit or setting an error comes from, for people; "": none.

    Args:
        has_memory: the shared memory had been mapped before.
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

    Every connection and every open segment is one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
