"""Check that settings do not contradict each other; each alone is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mpbroker.base.config_def import ConfigDef, ConfigError, ConfigValue
from mpbroker.ipc.layout import MAX_PARTITIONS


def check_values(definition: ConfigDef, value: Callable[[str], ConfigValue]) -> None:
    """Check that the settings which can change while the broker serves agree.

    Args:
        value: a function that returns a setting's value by its name.

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


def check_remote_storage(is_enabled: bool, url: str | None) -> None:
    """Raise ConfigError if remote storage is enabled and has no usable URL."""
    if is_enabled and not url:
        raise ConfigError(
            "remote.log.storage.system.enable=true: remote.storage.url is not set; name"
            " a place, such as s3://BUCKET/PREFIX or file:///DIRECTORY"
        )
    if url:
        _check_store("remote.storage.url", url)


def check_cluster(database_url: str | None, storage_url: str | None) -> None:
    """Raise ConfigError if the URL of a cluster's database or store is unusable."""
    if storage_url:
        _check_store("diskless.storage.url", storage_url)
    if not database_url:
        if storage_url:
            raise ConfigError(
                "diskless.storage.url: cluster.database.url is not set; name the"
                " database of the cluster whose objects are there"
            )
        return
    if not database_url.startswith(("postgresql://", "postgres://")):
        raise ConfigError(
            "cluster.database.url: not a URL of PostgreSQL; it must begin with"
            " postgresql://"
        )
    if not storage_url:
        raise ConfigError(
            "cluster.database.url: diskless.storage.url is not set; name the place that"
            " 'mpbroker cluster status' shows"
        )


def _check_store(name: str, url: str) -> None:
    # Imported here: most brokers have no store.
    from mpbroker.base.store_url import StoreUrl

    try:
        StoreUrl.parse(url)
    except ValueError as error:
        # The value is not shown: it may have a password.
        raise ConfigError(f"{name}: {error}") from error


def check_store_options(
    name: str, url: str | None, endpoint: str | None, region: str | None
) -> None:
    """Raise ConfigError if a store's endpoint or region is unusable, or set twice.

    Args:
        name: the first part of the names of these settings, as in "remote.storage".
        url: the value of ``name`` with ".url" behind it, which was checked before; the
            others likewise.
    """
    for option, value in (("endpoint", endpoint), ("region", region)):
        if not value:
            continue
        from mpbroker.base.store_url import StoreUrl

        if not url:
            raise ConfigError(
                f"{name}.{option}={value}: {name}.url is not set; set it, or leave this"
                " out"
            )
        parts = StoreUrl.parse(url)
        if getattr(parts, option):
            raise ConfigError(
                f"{name}.{option}={value}: {name}.url names the {option}, too; leave"
                " one out"
            )
        try:
            parts._replace(**{option: value}).check()
        except ValueError as error:
            raise ConfigError(f"{name}.{option}={value}: {error}") from error


def check_directories(paths: Sequence[str]) -> None:
    """Raise ConfigError if log.dirs is empty, has duplicates, or is not UTF-8."""
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


def check_internal_topics(offsets: int, transactions: int, share_states: int) -> None:
    """Raise ConfigError if the coordinator's topics have too many partitions together.

    Args:
        offsets: offsets.topic.num.partitions.
        transactions: transaction.state.log.num.partitions.
        share_states: share.coordinator.state.topic.num.partitions.
    """
    if offsets + transactions + share_states > MAX_PARTITIONS:
        raise ConfigError(
            f"offsets.topic.num.partitions={offsets},"
            f" transaction.state.log.num.partitions={transactions} and"
            f" share.coordinator.state.topic.num.partitions={share_states}: together"
            f" above {MAX_PARTITIONS}, the most partitions that a broker can have;"
            " lower one"
        )
