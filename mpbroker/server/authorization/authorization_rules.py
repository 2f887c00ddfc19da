"""Which API needs which right: the one table.

A check gets what the sender may do, the message and its version. It returns None if all
may go its way, or a Verdict; or it raises the ApiError that is the whole answer, where
that has a place for one.

An API without a row cannot be served where there is an authorizer: whoever adds one
says here what it needs, and test_authorization_rules.py proves it.

Source: Kafka's KafkaApis and ControllerApis, handler by handler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from mpbroker.protocol.acl import AclOperation as Op
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.message import Message
from mpbroker.server.api_messages import request_class, response_class
from mpbroker.server.authorization import cluster_rules as cluster
from mpbroker.server.authorization import group_rules as group
from mpbroker.server.authorization import topic_rules as topic
from mpbroker.server.authorization import transaction_rules as txn
from mpbroker.server.authorization.authorization import Access, Authorization, Verdict
from mpbroker.server.request import CLOSE, Deferred, Request

Check = Callable[[Access, Any, int], Verdict | None]
Handle = Callable[[Request], Any]

RULES: Final[Mapping[ApiKey, Check]] = {
    # Handlers see to these two themselves; this is for the coordinator.
    ApiKey.PRODUCE: topic.forwarded_produce,  # WRITE of topic and transactional id
    ApiKey.FETCH: cluster.anybody,  # READ of the topic
    ApiKey.LIST_OFFSETS: topic.list_offsets,  # DESCRIBE
    ApiKey.METADATA: topic.metadata,  # DESCRIBE, and CREATE of what is not there
    ApiKey.OFFSET_COMMIT: group.offset_commit,  # READ of the group, READ of the topic
    ApiKey.OFFSET_FETCH: group.offset_fetch,  # DESCRIBE, DESCRIBE
    ApiKey.FIND_COORDINATOR: group.find_coordinator,  # DESCRIBE of group or id
    ApiKey.JOIN_GROUP: group.read_group,
    ApiKey.HEARTBEAT: group.read_group,
    ApiKey.LEAVE_GROUP: group.read_group,
    ApiKey.SYNC_GROUP: group.read_group,
    ApiKey.DESCRIBE_GROUPS: group.describe_groups,  # DESCRIBE
    ApiKey.LIST_GROUPS: group.list_groups,  # DESCRIBE of the cluster, or of each
    ApiKey.SASL_HANDSHAKE: cluster.anybody,
    ApiKey.API_VERSIONS: cluster.anybody,
    ApiKey.CREATE_TOPICS: topic.create_topics,  # CREATE of the cluster, or of each
    ApiKey.DELETE_TOPICS: topic.delete_topics,  # DELETE
    ApiKey.DELETE_RECORDS: topic.delete_records,  # DELETE
    ApiKey.INIT_PRODUCER_ID: txn.init_producer_id,  # WRITE, or IDEMPOTENT_WRITE
    ApiKey.OFFSET_FOR_LEADER_EPOCH: topic.offset_for_leader_epoch,  # DESCRIBE
    ApiKey.ADD_PARTITIONS_TO_TXN: txn.add_partitions_to_txn,  # WRITE, WRITE
    ApiKey.ADD_OFFSETS_TO_TXN: txn.add_offsets_to_txn,  # WRITE, READ of the group
    ApiKey.END_TXN: txn.write_id,
    ApiKey.WRITE_TXN_MARKERS: cluster.write_txn_markers,  # CLUSTER_ACTION, or ALTER
    ApiKey.TXN_OFFSET_COMMIT: txn.txn_offset_commit,  # WRITE, READ, READ
    ApiKey.DESCRIBE_ACLS: cluster.cluster(Op.DESCRIBE),
    ApiKey.CREATE_ACLS: cluster.create_acls,  # ALTER
    ApiKey.DELETE_ACLS: cluster.delete_acls,  # ALTER
    ApiKey.DESCRIBE_CONFIGS: cluster.describe_configs,  # DESCRIBE_CONFIGS
    ApiKey.ALTER_CONFIGS: cluster.alter_configs,  # ALTER_CONFIGS
    ApiKey.DESCRIBE_LOG_DIRS: cluster.describe_log_dirs,  # DESCRIBE
    ApiKey.SASL_AUTHENTICATE: cluster.anybody,
    ApiKey.CREATE_PARTITIONS: topic.create_partitions,  # ALTER
    ApiKey.DELETE_GROUPS: group.delete_groups,  # DELETE
    ApiKey.ELECT_LEADERS: cluster.elect_leaders,  # ALTER
    ApiKey.INCREMENTAL_ALTER_CONFIGS: cluster.incremental_alter_configs,
    ApiKey.LIST_PARTITION_REASSIGNMENTS: cluster.cluster(Op.DESCRIBE),
    ApiKey.OFFSET_DELETE: group.offset_delete,  # DELETE, READ of the topic
    ApiKey.DESCRIBE_CLIENT_QUOTAS: cluster.cluster(Op.DESCRIBE_CONFIGS),
    ApiKey.ALTER_CLIENT_QUOTAS: cluster.alter_client_quotas,  # ALTER_CONFIGS
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: cluster.cluster(Op.DESCRIBE),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: cluster.alter_user_scram_credentials,  # ALTER
    ApiKey.DESCRIBE_CLUSTER: cluster.describe_cluster,
    ApiKey.DESCRIBE_PRODUCERS: topic.describe_producers,  # READ
    ApiKey.DESCRIBE_TRANSACTIONS: txn.describe_transactions,  # DESCRIBE
    ApiKey.LIST_TRANSACTIONS: txn.list_transactions,  # DESCRIBE
    ApiKey.CONSUMER_GROUP_HEARTBEAT: group.consumer_group_heartbeat,  # READ, DESCRIBE
    ApiKey.CONSUMER_GROUP_DESCRIBE: group.consumer_group_describe,  # DESCRIBE
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: cluster.anybody,
    ApiKey.PUSH_TELEMETRY: cluster.anybody,
    ApiKey.LIST_CONFIG_RESOURCES: cluster.cluster(Op.DESCRIBE_CONFIGS),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: topic.describe_topic_partitions,  # DESCRIBE
}

# Their services ask for rights: they answer late, and by paths of their own.
_ASK_THEMSELVES: Final = (ApiKey.PRODUCE, ApiKey.FETCH)


def guarded(
    api_key: ApiKey, handle: Handle, authorization: Authorization | None
) -> Handle:
    """Return what handles an API's requests as far as their senders may make them.

    Raises:
        KeyError: there is no rule for it.
    """
    if authorization is None:
        return handle
    check = RULES[api_key]
    if check is cluster.anybody or api_key in _ASK_THEMSELVES:
        return handle
    guard = _Guard(api_key, check, handle, authorization)
    return guard.handle


class _Guard:
    """Stands before one API's handler."""

    def __init__(
        self,
        api_key: ApiKey,
        check: Check,
        handle: Handle,
        authorization: Authorization,
    ) -> None:
        self._api_key = api_key
        self._check = check
        self._handle = handle
        self._authorization = authorization
        self._request_class: type[Message] | None = None

    def handle(self, request: Request) -> Any:
        access = self._authorization.access(request)
        if access is None:
            return CLOSE  # nobody is there to be answered
        if self._request_class is None:
            self._request_class = request_class(self._api_key)
        version = request.api_version
        message = self._request_class.decode(version, request.body)
        verdict = self._check(access, message, version)
        if verdict is None:
            return self._handle(request)
        if verdict.request is None:
            assert verdict.answer is not None
            return verdict.answer.encode(version)
        request.body = memoryview(verdict.request.encode(version))
        answer = self._handle(request)
        if verdict.amend is None or isinstance(answer, Deferred):
            return answer
        response = response_class(self._api_key).decode(version, memoryview(answer))
        verdict.amend(response)
        return response.encode(version)
