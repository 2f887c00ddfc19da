"""The table of APIs: what is served, in which versions, and by what.

Versions are the widest that both we and any known client need: see ``SERVED``. A
handler's message module is imported when its API is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from mpbroker.ipc.segment import Segment
from mpbroker.ipc.tables.partition_table import PartitionRow, PartitionTable
from mpbroker.network.connection_rows import (
    connection_name,
    listener_index,
    local_address,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import FLEXIBLE_FROM
from mpbroker.protocol.messages.metadata import MetadataRequest
from mpbroker.server.acl_apis import AclApis
from mpbroker.server.admin_apis import AdminApis, Permit, no_permit
from mpbroker.server.dispatcher import Api
from mpbroker.server.fetch.fetch_service import FetchService
from mpbroker.server.handlers.metadata import MetadataAnswers
from mpbroker.server.intent import Intent, no_intent
from mpbroker.server.produce.produce_service import ProduceService
from mpbroker.server.quota_apis import QuotaApis
from mpbroker.server.request import FORWARDED, Deferred, Request
from mpbroker.server.sasl_apis import SaslApis

if TYPE_CHECKING:
    from mpbroker.base.config_def import ConfigDef
    from mpbroker.metadata.topics import NewTopic, Topic, TopicRegistry
    from mpbroker.server.authorization.authorization import Authorization
    from mpbroker.server.configs.broker_loggers import Levels as LoggerLevels
    from mpbroker.server.quotas.client_quotas import ClientQuotas
    from mpbroker.server.telemetry.client_telemetry import ClientTelemetry
    from mpbroker.storage.log_manager import LogManager

# Kept answers to ApiVersions: clients are of few kinds, and say little.
_MAX_REMEMBERED: Final = 100
_MAX_REMEMBERED_BYTES: Final = 512

Advertised = tuple[str, int]  # host and port; "" or 0: what the client dialled

SERVED: Final[Mapping[ApiKey, tuple[int, int]]] = {
    ApiKey.PRODUCE: (3, 13),
    ApiKey.FETCH: (4, 18),
    ApiKey.LIST_OFFSETS: (1, 11),
    ApiKey.METADATA: (0, 13),
    ApiKey.FIND_COORDINATOR: (0, 6),
    ApiKey.API_VERSIONS: (0, 4),
    ApiKey.CREATE_TOPICS: (2, 7),
    ApiKey.DELETE_TOPICS: (1, 6),
    ApiKey.DELETE_RECORDS: (0, 2),
    ApiKey.INIT_PRODUCER_ID: (0, 5),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: (2, 4),
    ApiKey.DESCRIBE_CONFIGS: (1, 4),
    ApiKey.ALTER_CONFIGS: (0, 2),
    ApiKey.DESCRIBE_LOG_DIRS: (1, 4),
    ApiKey.CREATE_PARTITIONS: (0, 3),
    ApiKey.ELECT_LEADERS: (0, 2),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: (0, 1),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: (0, 0),
    ApiKey.DESCRIBE_CLUSTER: (0, 2),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: (0, 0),
    ApiKey.LIST_CONFIG_RESOURCES: (0, 1),
    ApiKey.DESCRIBE_PRODUCERS: (0, 0),
    ApiKey.SASL_HANDSHAKE: (0, 1),
    ApiKey.SASL_AUTHENTICATE: (0, 2),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: (0, 0),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: (0, 0),
    ApiKey.DESCRIBE_ACLS: (1, 3),
    ApiKey.CREATE_ACLS: (1, 3),
    ApiKey.DELETE_ACLS: (1, 3),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: (0, 1),
    ApiKey.ALTER_CLIENT_QUOTAS: (0, 1),
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: (0, 0),
    ApiKey.PUSH_TELEMETRY: (0, 0),
    # The coordinator's; handlers forward them.
    ApiKey.OFFSET_COMMIT: (2, 10),
    ApiKey.OFFSET_FETCH: (1, 10),
    ApiKey.JOIN_GROUP: (0, 9),
    ApiKey.HEARTBEAT: (0, 4),
    ApiKey.LEAVE_GROUP: (0, 5),
    ApiKey.SYNC_GROUP: (0, 5),
    ApiKey.DESCRIBE_GROUPS: (0, 6),
    ApiKey.LIST_GROUPS: (0, 5),
    ApiKey.DELETE_GROUPS: (0, 2),
    ApiKey.OFFSET_DELETE: (0, 0),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: (0, 1),
    ApiKey.CONSUMER_GROUP_DESCRIBE: (0, 1),
    ApiKey.ADD_PARTITIONS_TO_TXN: (0, 5),
    ApiKey.ADD_OFFSETS_TO_TXN: (0, 4),
    ApiKey.END_TXN: (0, 5),
    ApiKey.WRITE_TXN_MARKERS: (1, 2),
    ApiKey.TXN_OFFSET_COMMIT: (0, 5),
    ApiKey.DESCRIBE_TRANSACTIONS: (0, 0),
    ApiKey.LIST_TRANSACTIONS: (0, 2),
}

# Only where somebody receives what clients push.
TELEMETRY_APIS: Final = (ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY)

COORDINATOR_APIS: Final = (
    ApiKey.OFFSET_COMMIT,
    ApiKey.OFFSET_FETCH,
    ApiKey.JOIN_GROUP,
    ApiKey.HEARTBEAT,
    ApiKey.LEAVE_GROUP,
    ApiKey.SYNC_GROUP,
    ApiKey.DESCRIBE_GROUPS,
    ApiKey.LIST_GROUPS,
    ApiKey.DELETE_GROUPS,
    ApiKey.OFFSET_DELETE,
    ApiKey.CONSUMER_GROUP_HEARTBEAT,
    ApiKey.CONSUMER_GROUP_DESCRIBE,
    ApiKey.ADD_PARTITIONS_TO_TXN,
    ApiKey.ADD_OFFSETS_TO_TXN,
    ApiKey.END_TXN,
    ApiKey.WRITE_TXN_MARKERS,
    ApiKey.TXN_OFFSET_COMMIT,
    ApiKey.DESCRIBE_TRANSACTIONS,
    ApiKey.LIST_TRANSACTIONS,
)


def forwarded_apis() -> dict[int, tuple[int, int, int]]:
    """Oldest, newest and first flexible version of what handlers only forward."""
    return {int(key): (*SERVED[key], FLEXIBLE_FROM[key]) for key in COORDINATOR_APIS}


def advertised_versions(served: Iterable[ApiKey]) -> dict[int, tuple[int, int]]:
    """What ApiVersions says.

    Produce from 0, although 0 to 2 are refused: librdkafka takes a higher minimum for
    a broker that knows none of the old codecs (KAFKA-18659).
    """
    versions = {int(key): SERVED[key] for key in served}
    versions[ApiKey.PRODUCE] = (0, versions[ApiKey.PRODUCE][1])
    return versions


class ApiTable:
    """The APIs of one handler process, over the services they need."""

    def __init__(
        self,
        *,
        definition: ConfigDef,
        config_texts: Mapping[str, str],
        node_id: int,
        rack: str | None,
        cluster_id: str,
        num_partitions: int,
        internal_topics: Mapping[str, NewTopic],
        auto_create_topics: bool,
        delete_topics: bool,
        advertised: Sequence[Advertised],
        log_dirs: Sequence[str],
        control: Segment,
        registry: TopicRegistry,
        table: PartitionTable,
        logs: LogManager,
        produce: ProduceService,
        fetch: FetchService,
        changed: Callable[[PartitionRow], None],
        forward: Callable[[int], None],
        note_software: Callable[[int, str, str], None],
        quotas: ClientQuotas | None = None,
        authorization: Authorization | None = None,
        levels: LoggerLevels | None = None,
        intent: Callable[[Request], Intent] = no_intent,
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        """Make the table.

        Args:
            definition: the broker's keys, with the defaults of this machine.
            config_texts: what was set when the broker was started, by key.
            internal_topics: how those are made that are asked for, by name.
            advertised: of each listener, by index.
            changed: told of the rows of deleted partitions, to wake waiting fetches.
            forward: hands a request's slot to the coordinator.
            note_software: told what a connection's client says that it is.
            quotas: how many topics a client may change; None: as many as it likes.
            authorization: says who may do what; None: everybody everything.
            levels: of all processes' loggers; None: they cannot be asked for.
            intent: where a request notes what it is about to change.
            telemetry: what takes clients' metrics; None: they are not asked for.
        """
        self._node_id = node_id
        self._num_partitions = num_partitions
        self._internal_topics = internal_topics
        self._delete_topics_enabled = delete_topics
        self._changed = changed
        self._metadata_answers = MetadataAnswers(
            registry,
            node_id=node_id,
            rack=rack,
            cluster_id=cluster_id,
            create=self._create_missing if auto_create_topics else None,
            leader_epoch=logs.leader_epoch,
        )
        self._advertised = advertised
        self._words = control.words
        self._registry = registry
        self._table = table
        self._logs = logs
        self._note_software = note_software
        self._intent = intent
        self._permit: Permit = no_permit if quotas is None else quotas.permit
        self._api_versions_bodies: dict[tuple[int, bytes], tuple[bytes, str, str]] = {}
        handlers: dict[ApiKey, Callable[[Request], Any]] = {
            ApiKey.PRODUCE: produce.handle,
            ApiKey.FETCH: fetch.handle,
            ApiKey.LIST_OFFSETS: self._list_offsets,
            ApiKey.METADATA: self._metadata,
            ApiKey.API_VERSIONS: self._api_versions,
            ApiKey.CREATE_TOPICS: self._create_topics,
            ApiKey.DELETE_TOPICS: self._delete_topics,
            ApiKey.INIT_PRODUCER_ID: self._init_producer_id,
            ApiKey.DESCRIBE_PRODUCERS: self._describe_producers,
            ApiKey.OFFSET_FOR_LEADER_EPOCH: self._offset_for_leader_epoch,
        }
        handlers |= AdminApis(
            definition=definition,
            config_texts=config_texts,
            node_id=node_id,
            rack=rack,
            cluster_id=cluster_id,
            log_dirs=log_dirs,
            registry=registry,
            logs=logs,
            endpoint=self._endpoint,
            permit=self._permit,
            levels=levels,
            intent=intent,
        ).handlers()
        handlers |= QuotaApis(registry).handlers()
        handlers |= SaslApis(registry, intent).handlers()
        handlers |= AclApis(authorization, intent).handlers()
        if telemetry is not None:
            from mpbroker.server.telemetry_apis import TelemetryApis

            handlers |= TelemetryApis(telemetry).handlers()
        if authorization is not None:
            from mpbroker.server.authorization.authorization_rules import guarded

            handlers = {
                key: guarded(key, handle, authorization)
                for key, handle in handlers.items()
            }
        self.apis = {
            int(key): Api(key, SERVED[key], self._caught_up(handle))
            for key, handle in handlers.items()
        }
        self._forward_slot = forward
        for key in COORDINATOR_APIS:
            self.apis[int(key)] = Api(key, SERVED[key], self._forward)
        self.advertised_versions = advertised_versions((*handlers, *COORDINATOR_APIS))

    def serve_no_data(self) -> None:
        """On the control plane: whoever produces or fetches there would block it."""
        for key in (ApiKey.PRODUCE, ApiKey.FETCH):
            del self.apis[key], self.advertised_versions[key]

    def _caught_up(
        self, handle: Callable[[Request], bytes | list[Any] | Deferred]
    ) -> Callable[[Request], bytes | list[Any] | Deferred]:
        """Every request sees all changes of metadata made before it."""
        catch_up = self._registry.catch_up

        def handle_caught_up(request: Request) -> bytes | list[Any] | Deferred:
            catch_up()
            return handle(request)

        return handle_caught_up

    def _forward(self, request: Request) -> Deferred:
        self._forward_slot(request.slot)
        return FORWARDED

    def connection_name(self, connection: int) -> str:
        return connection_name(self._words, connection)

    def _endpoint(self, request: Request) -> tuple[str, int]:
        """Where a client is told to find this broker: unless set, where it did."""
        host, port = self._advertised[listener_index(self._words, request.connection)]
        if not host or not port:
            dialled = local_address(self._words, request.connection)
            return host or dialled[0], port or dialled[1]
        return host, port

    # -- one method an API -------------------------------------------------------

    def _api_versions(self, request: Request) -> bytes:
        version = request.api_version
        # Every connection's first request, and the same bytes from the same client.
        asked = (version, bytes(request.body))
        known = self._api_versions_bodies.get(asked)
        if known is not None:
            self._note_software(request.connection, *known[1:])
            return known[0]
        from mpbroker.protocol.messages.api_versions import ApiVersionsRequest
        from mpbroker.server.handlers.api_versions import (
            handle_api_versions,
            software_of,
        )

        message = ApiVersionsRequest.decode(version, request.body)
        body = handle_api_versions(message, version, self.advertised_versions).encode(
            version
        )
        if len(asked[1]) <= _MAX_REMEMBERED_BYTES:
            if len(self._api_versions_bodies) >= _MAX_REMEMBERED:
                self._api_versions_bodies.clear()
            self._api_versions_bodies[asked] = (body, *software_of(message, version))
        self._note_software(request.connection, *software_of(message, version))
        return body

    def _list_offsets(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.list_offsets import ListOffsetsRequest
        from mpbroker.server.handlers.list_offsets import handle_list_offsets

        message = ListOffsetsRequest.decode(request.api_version, request.body)
        return handle_list_offsets(
            message, request.api_version, self._registry, self._logs.look
        ).encode(request.api_version)

    def _init_producer_id(self, request: Request) -> bytes | Deferred:
        from mpbroker.protocol.messages.init_producer_id import InitProducerIdRequest
        from mpbroker.server.handlers.init_producer_id import handle_init_producer_id

        message = InitProducerIdRequest.decode(request.api_version, request.body)
        if message.transactional_id is not None:
            return self._forward(request)
        return handle_init_producer_id(
            message, self._registry.allocate_producer_id
        ).encode(request.api_version)

    def _describe_producers(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.describe_producers import (
            DescribeProducersRequest,
        )
        from mpbroker.server.handlers.describe_producers import (
            handle_describe_producers,
        )

        message = DescribeProducersRequest.decode(request.api_version, request.body)
        return handle_describe_producers(
            message, self._registry, self._logs.log
        ).encode(request.api_version)

    def _offset_for_leader_epoch(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.offset_for_leader_epoch import (
            OffsetForLeaderEpochRequest,
        )
        from mpbroker.server.handlers.offset_for_leader_epoch import (
            handle_offset_for_leader_epoch,
        )

        message = OffsetForLeaderEpochRequest.decode(request.api_version, request.body)
        return handle_offset_for_leader_epoch(
            message, self._registry, self._logs.log
        ).encode(request.api_version)

    def _metadata(self, request: Request) -> bytes:
        message = MetadataRequest.decode(request.api_version, request.body)
        host, port = self._endpoint(request)
        answers = self._metadata_answers
        return answers.handle(message, request.api_version, host, port).encode(
            request.api_version
        )

    def _create_missing(self, name: str) -> Topic:
        internal = self._internal_topics.get(name)
        if internal is not None:
            return self._registry.create_topic(*internal)
        return self._registry.create_topic(name, self._num_partitions)

    def _create_topics(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.create_topics import CreateTopicsRequest
        from mpbroker.server.handlers.create_topics import handle_create_topics

        message = CreateTopicsRequest.decode(request.api_version, request.body)
        return handle_create_topics(
            message,
            request.api_version,
            self._registry,
            node_id=self._node_id,
            num_partitions=self._num_partitions,
            permit=self._permit(request, 6),
            intent=self._intent(request),
        ).encode(request.api_version)

    def _delete_topics(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.delete_topics import DeleteTopicsRequest
        from mpbroker.server.handlers.delete_topics import handle_delete_topics

        message = DeleteTopicsRequest.decode(request.api_version, request.body)
        return handle_delete_topics(
            message,
            request.api_version,
            self._registry,
            enabled=self._delete_topics_enabled,
            delete_logs=self._delete_logs,
            permit=self._permit(request, 5),
            intent=self._intent(request),
        ).encode(request.api_version)

    def _delete_logs(self, topic: Topic) -> None:
        self._logs.delete_topic(topic)
        for row in topic.partitions:
            self._changed(self._table.row(row))
