"""The admin APIs: topics' partitions, configs, log directories, coordinators.

Each method decodes, calls the handler with the values it needs, and encodes; what an
API needs is imported when it is first asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mpbroker.protocol.api_key import ApiKey
from mpbroker.server.intent import Intent, no_intent
from mpbroker.server.request import Request

if TYPE_CHECKING:
    from mpbroker.base.config_def import ConfigDef
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.server.configs.broker_loggers import BrokerLoggers
    from mpbroker.server.configs.broker_loggers import Levels as LoggerLevels
    from mpbroker.server.handlers.describe_log_dirs import LogDir, PartitionSize
    from mpbroker.storage.log_manager import LogManager


# Of a request, and the version since which it can be refused: see ClientQuotas.permit.
Permit = Callable[[Request, int], Callable[[int], None] | None]


class AdminApis:
    """The admin APIs of one handler process."""

    def __init__(
        self,
        *,
        definition: ConfigDef,
        config_texts: Mapping[str, str],
        node_id: int,
        rack: str | None,
        cluster_id: str,
        log_dirs: Sequence[str],
        registry: TopicRegistry,
        logs: LogManager,
        endpoint: Callable[[Request], tuple[str, int]],
        permit: Permit | None = None,
        levels: LoggerLevels | None = None,
        intent: Callable[[Request], Intent] = no_intent,
    ) -> None:
        """Take what the handlers need.

        Args:
            definition: the broker's keys, with the defaults of this machine.
            config_texts: what was set when the broker was started, by key.
            log_dirs: the paths of log.dirs.
            endpoint: where the sender of a request is told to find this broker.
            permit: what is to be called before a request makes partitions; None:
                nothing.
            levels: of all processes' loggers; None: they cannot be asked for.
            intent: where a request notes what it is about to change.
        """
        self._definition = definition
        self._config_texts = config_texts
        self._node_id = node_id
        self._rack = rack
        self._cluster_id = cluster_id
        self._log_dirs = log_dirs
        self._registry = registry
        self._logs = logs
        self._endpoint = endpoint
        self._permit = permit or no_permit
        self._levels = levels
        self._intent = intent

    def handlers(self) -> dict[ApiKey, Callable[[Request], bytes]]:
        """Return what answers each API."""
        return {
            ApiKey.FIND_COORDINATOR: self._find_coordinator,
            ApiKey.DELETE_RECORDS: self._delete_records,
            ApiKey.DESCRIBE_CONFIGS: self._describe_configs,
            ApiKey.ALTER_CONFIGS: self._alter_configs,
            ApiKey.DESCRIBE_LOG_DIRS: self._describe_log_dirs,
            ApiKey.CREATE_PARTITIONS: self._create_partitions,
            ApiKey.ELECT_LEADERS: self._elect_leaders,
            ApiKey.INCREMENTAL_ALTER_CONFIGS: self._incremental_alter_configs,
            ApiKey.LIST_PARTITION_REASSIGNMENTS: self._list_partition_reassignments,
            ApiKey.DESCRIBE_CLUSTER: self._describe_cluster,
            ApiKey.DESCRIBE_TOPIC_PARTITIONS: self._describe_topic_partitions,
            ApiKey.LIST_CONFIG_RESOURCES: self._list_config_resources,
        }

    # -- topics and their partitions -------------------------------------------------

    def _create_partitions(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.create_partitions import (
            CreatePartitionsRequest,
        )
        from mpbroker.server.handlers.create_partitions import (
            handle_create_partitions,
        )

        message = CreatePartitionsRequest.decode(request.api_version, request.body)
        return handle_create_partitions(
            message,
            self._registry,
            node_id=self._node_id,
            permit=self._permit(request, 3),
            intent=self._intent(request),
        ).encode(request.api_version)

    def _delete_records(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.delete_records import DeleteRecordsRequest
        from mpbroker.server.handlers.delete_records import handle_delete_records

        message = DeleteRecordsRequest.decode(request.api_version, request.body)
        return handle_delete_records(message, self._registry, self._logs.log).encode(
            request.api_version
        )

    def _describe_topic_partitions(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.describe_topic_partitions import (
            DescribeTopicPartitionsRequest,
        )
        from mpbroker.server.handlers.describe_topic_partitions import (
            handle_describe_topic_partitions,
        )

        version = request.api_version
        message = DescribeTopicPartitionsRequest.decode(version, request.body)
        return handle_describe_topic_partitions(
            message,
            self._registry,
            node_id=self._node_id,
            leader_epoch=self._logs.leader_epoch,
        ).encode(version)

    # -- configs ---------------------------------------------------------------------

    def _describe_configs(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.describe_configs import DescribeConfigsRequest
        from mpbroker.server.handlers.describe_configs import handle_describe_configs

        message = DescribeConfigsRequest.decode(request.api_version, request.body)
        return handle_describe_configs(
            message,
            self._registry,
            node_id=self._node_id,
            definition=self._definition,
            static=self._config_texts,
            loggers=self._loggers(),
        ).encode(request.api_version)

    def _loggers(self) -> BrokerLoggers | None:
        if self._levels is None:
            return None
        from mpbroker.server.configs.broker_loggers import BrokerLoggers
        from mpbroker.server.configs.logger_names import logger_names

        return BrokerLoggers(self._node_id, self._levels, logger_names)

    def _alter_configs(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.alter_configs import AlterConfigsRequest
        from mpbroker.server.handlers.alter_configs import handle_alter_configs

        message = AlterConfigsRequest.decode(request.api_version, request.body)
        return handle_alter_configs(
            message,
            self._registry,
            node_id=self._node_id,
            definition=self._definition,
            static=self._config_texts,
        ).encode(request.api_version)

    def _incremental_alter_configs(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.incremental_alter_configs import (
            IncrementalAlterConfigsRequest,
        )
        from mpbroker.server.handlers.incremental_alter_configs import (
            handle_incremental_alter_configs,
        )

        version = request.api_version
        message = IncrementalAlterConfigsRequest.decode(version, request.body)
        return handle_incremental_alter_configs(
            message,
            self._registry,
            node_id=self._node_id,
            definition=self._definition,
            static=self._config_texts,
            loggers=self._loggers(),
        ).encode(version)

    def _list_config_resources(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.list_config_resources import (
            ListConfigResourcesRequest,
        )
        from mpbroker.server.handlers.list_config_resources import (
            handle_list_config_resources,
        )

        version = request.api_version
        message = ListConfigResourcesRequest.decode(version, request.body)
        return handle_list_config_resources(
            message, version, self._registry, self._node_id
        ).encode(version)

    # -- the broker ------------------------------------------------------------------

    def _describe_cluster(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.describe_cluster import DescribeClusterRequest
        from mpbroker.server.handlers.describe_cluster import handle_describe_cluster

        message = DescribeClusterRequest.decode(request.api_version, request.body)
        host, port = self._endpoint(request)
        return handle_describe_cluster(
            message,
            node_id=self._node_id,
            rack=self._rack,
            cluster_id=self._cluster_id,
            host=host,
            port=port,
        ).encode(request.api_version)

    def _describe_log_dirs(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.describe_log_dirs import DescribeLogDirsRequest
        from mpbroker.server.handlers.describe_log_dirs import handle_describe_log_dirs

        message = DescribeLogDirsRequest.decode(request.api_version, request.body)
        return handle_describe_log_dirs(
            message,
            self._registry,
            [_volume(path) for path in self._log_dirs],
            self._partition_size,
        ).encode(request.api_version)

    def _partition_size(self, topic: Topic, partition: int) -> PartitionSize:
        from mpbroker.server.handlers.describe_log_dirs import PartitionSize

        return PartitionSize(*self._logs.place_and_size(topic, partition))

    # -- what one broker alone has little to say about -------------------------------

    def _find_coordinator(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.find_coordinator import FindCoordinatorRequest
        from mpbroker.server.handlers.find_coordinator import handle_find_coordinator

        version = request.api_version
        message = FindCoordinatorRequest.decode(version, request.body)
        return handle_find_coordinator(
            message, version, self._node_id, *self._endpoint(request)
        ).encode(version)

    def _elect_leaders(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.elect_leaders import ElectLeadersRequest
        from mpbroker.server.handlers.elect_leaders import handle_elect_leaders

        message = ElectLeadersRequest.decode(request.api_version, request.body)
        return handle_elect_leaders(message, self._registry).encode(request.api_version)

    def _list_partition_reassignments(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.list_partition_reassignments import (
            ListPartitionReassignmentsRequest,
        )
        from mpbroker.server.handlers.list_partition_reassignments import (
            handle_list_partition_reassignments,
        )

        version = request.api_version
        ListPartitionReassignmentsRequest.decode(version, request.body)
        return handle_list_partition_reassignments().encode(version)


def no_permit(request: Request, strict_since: int) -> None:
    """Who needs none may change what it likes."""


def _volume(path: str) -> LogDir:
    from mpbroker.server.handlers.describe_log_dirs import LogDir

    try:
        found = os.statvfs(path)
    except OSError:
        return LogDir(path, None, None)
    block = found.f_frsize
    return LogDir(path, found.f_blocks * block, found.f_bavail * block)
