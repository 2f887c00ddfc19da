"""What a handler is given beside its request: the broker, and who asks.

A handler gets no object of a process's machinery but those that it works on, so that a
test can make a context of plain values.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpbroker.network.connection_rows import listener_index, local_address
from mpbroker.server.intent import Intent, no_intent

if TYPE_CHECKING:
    from mpbroker.base.config_def import ConfigDef
    from mpbroker.ipc.log_levels import LogLevels
    from mpbroker.metadata.topics import NewTopic, Topic, TopicRegistry
    from mpbroker.server.authorization.authorization import Access
    from mpbroker.server.described_partitions import DescribedPartitions
    from mpbroker.server.quotas.client_quotas import ClientQuotas
    from mpbroker.server.request import Request
    from mpbroker.server.telemetry.client_telemetry import ClientTelemetry
    from mpbroker.storage.log_manager import LogManager

Advertised = tuple[str, int]  # host and port; "" or 0: what the client dialled


class Volume(NamedTuple):
    """The bytes of the volume that a directory is on."""

    total_bytes: int
    usable_bytes: int


def volume(path: str) -> Volume | None:
    """Return the volume of a directory; None: it cannot be asked."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    block = found.f_frsize
    return Volume(found.f_blocks * block, found.f_bavail * block)


def resolves(host: str) -> bool:
    """Return whether a text is an address, or a name that has one."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


class Broker(NamedTuple):
    """What the handlers of one process know of their broker.

    Attributes:
        node_id, cluster_id, rack: as clients are told.
        advertised: where clients find the broker, by index of the listener.
        auto_create_topics, delete_topics: whether clients may.
        num_partitions: of a topic whose creator does not say.
        internal_topics: how each is created when it is first asked for, by name.
        log_dirs: the paths of log.dirs.
        definition: the broker's keys, with the defaults of this machine.
        static_configs: texts set on the command line, in the environment or in a file,
            by key.
        words: of the control segment.
        registry: the topics, and all else that the metadata log holds.
        logs: the partitions' logs.
        described: the partitions as Metadata describes them.
        delete_logs: takes the partitions of a deleted topic off line.
        intent: where a request notes what it is about to change.
        quotas: how much clients may change; None: as much as they like.
        levels: of all processes' loggers; None: they cannot be asked for.
        telemetry: takes clients' metrics; None: nobody receives them.
        volume, resolves: ask the machine; handlers touch no file and no socket.
    """

    node_id: int
    cluster_id: str
    rack: str | None
    advertised: Sequence[Advertised]
    auto_create_topics: bool
    delete_topics: bool
    num_partitions: int
    internal_topics: Mapping[str, NewTopic]
    log_dirs: Sequence[str]
    definition: ConfigDef
    static_configs: Mapping[str, str]
    words: memoryview
    registry: TopicRegistry
    logs: LogManager
    described: DescribedPartitions
    delete_logs: Callable[[Topic], None]
    intent: Callable[[Request], Intent] = no_intent
    quotas: ClientQuotas | None = None
    levels: LogLevels | None = None
    telemetry: ClientTelemetry | None = None
    volume: Callable[[str], Volume | None] = volume
    resolves: Callable[[str], bool] = resolves


class HandlerContext:
    """One request's.

    Attributes:
        broker: what is the same for all requests.
        request: header, slot and connection.
        version: of the request message, and so of the response.
        access: what the sender may do; None where there is no authorizer, and where
            the API is open to anybody.
    """

    __slots__ = ("access", "broker", "request", "version")

    def __init__(
        self, broker: Broker, request: Request, access: Access | None = None
    ) -> None:
        self.broker = broker
        self.request = request
        self.version = request.api_version
        self.access = access

    @property
    def endpoint(self) -> Advertised:
        """Host and port where the client is told to find this broker."""
        words, connection = self.broker.words, self.request.connection
        host, port = self.broker.advertised[listener_index(words, connection)]
        if not host or not port:
            dialled = local_address(words, connection)
            return host or dialled[0], port or dialled[1]
        return host, port

    @property
    def intent(self) -> Intent:
        """Where the request notes what it is about to change."""
        return self.broker.intent(self.request)

    def mutation_permit(self, strict_since: int) -> Callable[[int], None] | None:
        """Return what is to be asked before partitions are made or deleted.

        It is told how many, and raises ApiError (THROTTLING_QUOTA_EXCEEDED) if that is
        too many for the sender's quota. None: the sender has no quota.

        Args:
            strict_since: the first version whose clients know that error.
        """
        quotas = self.broker.quotas
        return None if quotas is None else quotas.permit(self.request, strict_since)
