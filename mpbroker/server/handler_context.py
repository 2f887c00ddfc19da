"""Define what a handler gets beside its request message: broker, request and access.

A handler gets values and the few objects it works on, so a test can make a context
without starting a process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.network.connection_rows import listener_index, local_address
from mpbroker.server.host_lookups import HostLookups
from mpbroker.server.intent import Intent, no_intent

if TYPE_CHECKING:
    from mpbroker.base.config_def import ConfigDef
    from mpbroker.ipc.log_levels import LogLevels
    from mpbroker.metadata.cluster_nodes import ClusterNodes, NodeAddress
    from mpbroker.metadata.delegation_tokens import TokenSettings
    from mpbroker.metadata.topics import NewTopic, Topic, TopicRegistry
    from mpbroker.server.authorization.authorization import Access
    from mpbroker.server.authorization.rulings import Amend
    from mpbroker.server.described_partitions import DescribedPartitions
    from mpbroker.server.quotas.client_quotas import ClientQuotas
    from mpbroker.server.repeated.repeatable import OffsetPlace
    from mpbroker.server.request import Request
    from mpbroker.server.request_context import RequestContexts
    from mpbroker.server.shared_requests import SharedRequests
    from mpbroker.server.telemetry.client_telemetry import ClientTelemetry
    from mpbroker.storage.log_manager import LogManager

# Host and port for clients. "" or 0 stand for those that the client has connected to.
Advertised = tuple[str, int]


class Volume(NamedTuple):
    """Holds the size and the free space of a file system, in bytes."""

    total_bytes: int
    usable_bytes: int


def volume(path: str) -> Volume | None:
    """Return size and free space of the file system on which a directory lies.

    Return None if they cannot be found out.
    """
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    block = found.f_frsize
    return Volume(found.f_blocks * block, found.f_bavail * block)


class Broker(NamedTuple):
    """Holds the parts of the broker that the handlers of one process use.

    Attributes:
        node_id, cluster_id, rack: as they are told to clients.
        advertised: the broker's address for clients, by index of the listener.
        auto_create_topics: auto.create.topics.enable.
        delete_topics: delete.topic.enable.
        num_partitions: num.partitions, for a request that leaves the number open.
        internal_topics: the definition of each internal topic, by name; the topic is
            created when a client first asks for it.
        log_dirs: the paths of log.dirs, also of those that could not be used.
        definition: the broker's config keys, with the defaults of this machine.
        static_configs: config texts set on the command line, in the environment or in
            a file, by key.
        words: the control segment (shared memory of all processes), in 64-bit words.
        registry: the topics and everything else that the metadata log holds.
        logs: the logs of the partitions.
        described: the partitions as Metadata describes them.
        delete_logs: takes the partitions of a deleted topic offline.
        intent: returns the place where a request notes what it is about to change.
        quotas: limit how fast clients change topics; None: there is no limit.
        levels: the log levels of all processes; None: requests cannot access them.
        telemetry: receives clients' metrics; None: the broker has no receiver.
        tokens: the settings of delegation tokens; None: they are not served.
        senders: finds the sender of a request. None: clients do not authenticate.
        nodes: the other nodes of the cluster; None: this broker is in no cluster.
        shared_requests: what the cluster does for requests about shared topics; None as
            for nodes.
        volume: returns the size and the free space of a path of log.dirs; None: the
            directory is offline. A test may replace it.
        unknown_hosts: returns those texts that are neither an IP address nor a known
            host name. A test may replace it.
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
    tokens: TokenSettings | None = None
    senders: RequestContexts | None = None
    nodes: ClusterNodes | None = None
    shared_requests: SharedRequests | None = None
    volume: Callable[[str], Volume | None] = volume
    unknown_hosts: Callable[[Iterable[str]], Collection[str]] = HostLookups().unknown


class HandlerContext:
    """Holds the broker, the request's header and its sender's permissions.

    Attributes:
        broker: the same for all requests.
        request: header, slot and connection.
        version: the version of the request message and of the response.
        access: checks permissions of the sender; None if there is no authorizer, and
            for APIs that need no permission.
        amend: adds what was refused to a response that is sent later. It is done for
            one that a handler returns. None: nothing was refused.
        repeatable: set by a handler whose response holds for equal requests, until the
            metadata log, the partitions that are offline or the sender's permissions
            change: the offsets in it that are read anew for each. None: it may not be
            repeated.
    """

    __slots__ = ("access", "amend", "broker", "repeatable", "request", "version")

    def __init__(
        self,
        broker: Broker,
        request: Request,
        access: Access | None = None,
        amend: Amend | None = None,
    ) -> None:
        self.broker = broker
        self.request = request
        self.version = request.api_version
        self.access = access
        self.amend = amend
        self.repeatable: Sequence[OffsetPlace] | None = None

    @property
    def endpoint(self) -> Advertised:
        """The host and port of this broker that the client is told.

        A part that is not configured is taken from the address that the client has
        connected to.
        """
        words, connection = self.broker.words, self.request.connection
        host, port = self.broker.advertised[listener_index(words, connection)]
        if not host or not port:
            dialled = local_address(words, connection)
            return host or dialled[0], port or dialled[1]
        return host, port

    @property
    def other_nodes(self) -> Sequence[NodeAddress]:
        """The other live nodes of the cluster, with the addresses for this client.

        It is empty if the broker is in no cluster.
        """
        nodes = self.broker.nodes
        if nodes is None:
            return ()
        return nodes.others(listener_index(self.broker.words, self.request.connection))

    @property
    def intent(self) -> Intent:
        """Where a request notes what it is about to change, for a second execution.

        A request is executed again if its handler process dies.
        """
        return self.broker.intent(self.request)

    def mutation_permit(self, strict_since: int) -> Callable[[int], None] | None:
        """Return a function to call before partitions are created or deleted.

        The function takes the number of partitions. It raises ApiError
        (THROTTLING_QUOTA_EXCEEDED) if the sender's quota does not allow them now.

        Args:
            strict_since: the first version of the API that has this error. The
                function never raises for older versions: they are throttled after
                the change.

        Returns:
            The function; None: the sender has no quota.
        """
        quotas = self.broker.quotas
        return None if quotas is None else quotas.permit(self.request, strict_since)
