"""Check settings that are accepted alone and may contradict each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mpbroker.base.config_def import ConfigDef, ConfigError, ConfigValue
from mpbroker.ipc.layout import MAX_PARTITIONS


def check_values(definition: ConfigDef, value: Callable[[str], ConfigValue]) -> None:
    """Check what may change while the broker serves, too.

    Args:
        value: returns a setting's value by its name.

    Raises:
        ConfigError: two values contradict each other.
    """
    definition.check_order(value)
    if value("max.connections.per.ip") == 0 and not value(
        "max.connections.per.ip.overrides"
    ):
        raise ConfigError(
            "max.connections.per.ip=0 refuses every client; it can be set to zero only"
            " if max.connections.per.ip.overrides names exceptions"
        )


def check_inter_broker(listener: str | None, protocol: str | None) -> None:
    """Raise ConfigError if the listener for other brokers is set in two ways.

    Args:
        listener: inter.broker.listener.name.
        protocol: security.inter.broker.protocol; None: it is not set.
    """
    if listener is not None and protocol is not None:
        raise ConfigError(
            "Only one of inter.broker.listener.name and"
            " security.inter.broker.protocol should be set; remove the second"
        )


def check_request_sizes(request: int, queued: int) -> None:
    """Raise ConfigError if the largest request has no room in the queue.

    Args:
        request: socket.request.max.bytes.
        queued: queued.max.request.bytes; -1: the number of processors decides.
    """
    if 0 <= queued < request:
        raise ConfigError(
            f"queued.max.request.bytes={queued}: below socket.request.max.bytes="
            f"{request}, so the largest request would never fit; raise the first or"
            " lower the second"
        )


def check_directories(paths: Sequence[str]) -> None:
    """Raise ConfigError if log.dirs is empty, names one twice, or is not UTF-8."""
    if not paths:
        raise ConfigError("log.dirs: no directory is named; name at least one")
    for path in paths:
        if not path.isascii() and re.search("[\ud800-\udfff]", path):
            raise ConfigError(
                f"log.dirs: {path!r} is not UTF-8, and responses that name it must be;"
                " use a directory with another name"
            )
    if len(set(paths)) != len(paths):
        raise ConfigError(f"log.dirs={','.join(paths)}: a directory is named twice")


def check_internal_topics(offsets: int, transactions: int) -> None:
    """Raise ConfigError if the coordinator's topics have too many partitions together.

    Args:
        offsets: offsets.topic.num.partitions.
        transactions: transaction.state.log.num.partitions.
    """
    if offsets + transactions > MAX_PARTITIONS:
        raise ConfigError(
            f"offsets.topic.num.partitions={offsets} and"
            f" transaction.state.log.num.partitions={transactions}: together above"
            f" {MAX_PARTITIONS}, the most partitions that a broker can have; lower one"
        )
