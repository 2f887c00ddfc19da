"""List the APIs that are served, one row for each.

To serve another API write three things: its message in protocol/messages/, its handler
in handlers/, and its row in this module, which also names the API's authorization rule.
The message and the handler are found by the API's name:

    CREATE_TOPICS   protocol/messages/create_topics.py   CreateTopicsRequest
                                                         CreateTopicsResponse
                    handlers/create_topics.py            handle_create_topics()

A handler takes the request message and a HandlerContext and returns the response
message. message_apis.py decodes the request, applies the row's authorization rule,
calls the handler and encodes the response. An API that the coordinator executes has a
method instead of a handler; coordinator/coordinator_apis.py finds it. A handler and a
rule are imported when the first request needs them. An API that Kafka 4.4 does not have
also needs its key in protocol/api_key.py and its row in protocol/headers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from importlib import import_module
from typing import Any, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.metadata.features import GROUP_VERSION, SHARE_VERSION, STREAMS_VERSION
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import FLEXIBLE_FROM

_K = ApiKey
_O = AclOperation


class Forwarded(Enum):
    """Says whether a handler process forwards an API's requests to the coordinator."""

    NEVER = "the handler process executes all requests"
    SOMETIMES = "the API's handler decides for each request"
    ALWAYS = "the handler process forwards all requests undecoded"


class Api(NamedTuple):
    """Describes one API: served versions, authorization rule, where it executes.

    Attributes:
        key: the API's number in the protocol.
        versions: the oldest and the newest version that are served. The range holds
            every version that a known client needs.
        rule: the permission that the sender needs if the broker has an authorizer.
            An AclOperation: this operation on the cluster, for the whole request.
            "module:function": a rule in authorization/, which may refuse parts of the
            request. OPEN: no permission is needed.
        forwarded: whether the coordinator executes the requests.
        in_bytes: a service of the handler process decodes and encodes the bytes
            itself; handlers/ has no function that takes the decoded message.
        is_data: the API moves records. The control plane does not serve it, because
            such requests would delay the others on its listener.
        feature: the feature without which the coordinator refuses the API with
            UNSUPPORTED_VERSION.
        needs_receiver: served only if the broker has a receiver for clients' metrics.
    """

    key: ApiKey
    versions: tuple[int, int]
    rule: AclOperation | str | None
    forwarded: Forwarded = Forwarded.NEVER
    in_bytes: bool = False
    is_data: bool = False
    needs_receiver: bool = False
    feature: str | None = None

    @property
    def name(self) -> str:
        """The name of the API's modules and methods, for example create_topics."""
        return self.key.name.lower()

    def handler(self) -> Any:
        """Import and return the handler: handlers/<name>.py, handle_<name>()."""
        module = import_module(f"mpbroker.server.handlers.{self.name}")
        return getattr(module, f"handle_{self.name}")


OPEN: Final = None
_ALWAYS: Final = Forwarded.ALWAYS
_SOMETIMES: Final = Forwarded.SOMETIMES

# fmt: off
_ROWS: Final = (
    # The services of Produce and Fetch ask the authorizer for WRITE or READ of each
    # topic. The rule in Produce's row is for forwarded requests: the coordinator
    # applies it before it adds the partitions to the producer's transaction.
    Api(_K.PRODUCE, (3, 13), "topic_rules:forwarded_produce", _SOMETIMES,
        in_bytes=True, is_data=True),
    Api(_K.FETCH, (4, 18), OPEN, in_bytes=True, is_data=True),
    Api(_K.API_VERSIONS, (0, 4), OPEN, in_bytes=True),

    # -- topics and partitions ---------------------------------------------------------
    Api(_K.METADATA, (0, 13), "topic_rules:metadata"),
    Api(_K.DESCRIBE_TOPIC_PARTITIONS, (0, 0), "topic_rules:describe_topic_partitions"),
    Api(_K.CREATE_TOPICS, (2, 7), "topic_rules:create_topics"),
    Api(_K.DELETE_TOPICS, (1, 6), "topic_rules:delete_topics"),
    Api(_K.CREATE_PARTITIONS, (0, 3), "topic_rules:create_partitions"),
    Api(_K.LIST_OFFSETS, (1, 11), "topic_rules:list_offsets"),
    Api(_K.OFFSET_FOR_LEADER_EPOCH, (2, 4), "topic_rules:offset_for_leader_epoch"),
    Api(_K.DELETE_RECORDS, (0, 2), "topic_rules:delete_records"),
    Api(_K.DESCRIBE_PRODUCERS, (0, 0), "topic_rules:describe_producers"),

    # -- the cluster and configs -------------------------------------------------------
    Api(_K.DESCRIBE_CLUSTER, (0, 2), "cluster_rules:describe_cluster"),
    Api(_K.ALTER_REPLICA_LOG_DIRS, (1, 2), "cluster_rules:alter_replica_log_dirs"),
    Api(_K.DESCRIBE_LOG_DIRS, (1, 5), "cluster_rules:describe_log_dirs"),
    Api(_K.DESCRIBE_QUORUM, (0, 2), _O.DESCRIBE),
    Api(_K.UPDATE_FEATURES, (0, 2), _O.ALTER),
    Api(_K.ADD_RAFT_VOTER, (0, 1), _O.ALTER),
    Api(_K.REMOVE_RAFT_VOTER, (0, 0), _O.ALTER),
    Api(_K.UNREGISTER_BROKER, (0, 0), _O.ALTER),
    Api(_K.ELECT_LEADERS, (0, 2), "cluster_rules:elect_leaders"),
    Api(_K.ALTER_PARTITION_REASSIGNMENTS, (0, 1), _O.ALTER),
    Api(_K.LIST_PARTITION_REASSIGNMENTS, (0, 0), _O.DESCRIBE),
    Api(_K.DESCRIBE_CONFIGS, (1, 4), "cluster_rules:describe_configs"),
    Api(_K.ALTER_CONFIGS, (0, 2), "cluster_rules:alter_configs"),
    Api(_K.INCREMENTAL_ALTER_CONFIGS, (0, 1), "cluster_rules:alter_configs"),
    Api(_K.LIST_CONFIG_RESOURCES, (0, 1), _O.DESCRIBE_CONFIGS),

    # -- users, ACLs, quotas, clients' metrics -----------------------------------------
    Api(_K.SASL_HANDSHAKE, (0, 1), OPEN),
    Api(_K.SASL_AUTHENTICATE, (0, 2), OPEN),
    Api(_K.DESCRIBE_USER_SCRAM_CREDENTIALS, (0, 0), _O.DESCRIBE),
    Api(_K.ALTER_USER_SCRAM_CREDENTIALS, (0, 0),
        "cluster_rules:alter_user_scram_credentials"),
    Api(_K.CREATE_DELEGATION_TOKEN, (1, 3), "token_rules:create_delegation_token"),
    Api(_K.RENEW_DELEGATION_TOKEN, (1, 2), OPEN),
    Api(_K.EXPIRE_DELEGATION_TOKEN, (1, 2), OPEN),
    Api(_K.DESCRIBE_DELEGATION_TOKEN, (1, 3),
        "token_rules:describe_delegation_token"),
    Api(_K.DESCRIBE_ACLS, (1, 3), _O.DESCRIBE),
    Api(_K.CREATE_ACLS, (1, 3), "cluster_rules:create_acls"),
    Api(_K.DELETE_ACLS, (1, 3), "cluster_rules:delete_acls"),
    Api(_K.DESCRIBE_CLIENT_QUOTAS, (0, 1), _O.DESCRIBE_CONFIGS),
    Api(_K.ALTER_CLIENT_QUOTAS, (0, 1), "cluster_rules:alter_client_quotas"),
    Api(_K.GET_TELEMETRY_SUBSCRIPTIONS, (0, 0), OPEN, needs_receiver=True),
    Api(_K.PUSH_TELEMETRY, (0, 0), OPEN, needs_receiver=True),

    # -- groups ------------------------------------------------------------------------
    Api(_K.FIND_COORDINATOR, (0, 6), "group_rules:find_coordinator"),
    Api(_K.JOIN_GROUP, (0, 9), "group_rules:read_group", _ALWAYS),
    Api(_K.SYNC_GROUP, (0, 5), "group_rules:read_group", _ALWAYS),
    Api(_K.HEARTBEAT, (0, 4), "group_rules:read_group", _ALWAYS),
    Api(_K.LEAVE_GROUP, (0, 5), "group_rules:read_group", _ALWAYS),
    Api(_K.CONSUMER_GROUP_HEARTBEAT, (0, 1), "group_rules:consumer_group_heartbeat",
        _ALWAYS, feature=GROUP_VERSION),
    Api(_K.SHARE_GROUP_HEARTBEAT, (1, 1), "group_rules:consumer_group_heartbeat",
        _ALWAYS, feature=SHARE_VERSION),
    Api(_K.STREAMS_GROUP_HEARTBEAT, (0, 0), "group_rules:streams_group_heartbeat",
        _ALWAYS, feature=STREAMS_VERSION),
    Api(_K.SHARE_FETCH, (1, 2), "group_rules:read_group", _ALWAYS, is_data=True,
        feature=SHARE_VERSION),
    Api(_K.SHARE_ACKNOWLEDGE, (1, 2), "group_rules:read_group", _ALWAYS,
        is_data=True, feature=SHARE_VERSION),
    Api(_K.OFFSET_COMMIT, (2, 10), "group_rules:offset_commit", _ALWAYS),
    Api(_K.OFFSET_FETCH, (1, 10), "group_rules:offset_fetch", _ALWAYS),
    Api(_K.OFFSET_DELETE, (0, 0), "group_rules:offset_delete", _ALWAYS),
    Api(_K.LIST_GROUPS, (0, 5), "group_rules:list_groups", _ALWAYS),
    Api(_K.DESCRIBE_GROUPS, (0, 6), "group_rules:describe_groups", _ALWAYS),
    Api(_K.CONSUMER_GROUP_DESCRIBE, (0, 1), "group_rules:consumer_group_describe",
        _ALWAYS),
    Api(_K.SHARE_GROUP_DESCRIBE, (1, 1), "group_rules:share_group_describe", _ALWAYS),
    Api(_K.STREAMS_GROUP_DESCRIBE, (0, 0), "group_rules:streams_group_describe",
        _ALWAYS, feature=STREAMS_VERSION),
    Api(_K.DESCRIBE_SHARE_GROUP_OFFSETS, (0, 1),
        "group_rules:describe_share_group_offsets", _ALWAYS),
    Api(_K.ALTER_SHARE_GROUP_OFFSETS, (0, 0), "group_rules:read_group", _ALWAYS),
    Api(_K.DELETE_SHARE_GROUP_OFFSETS, (0, 0),
        "group_rules:delete_share_group_offsets", _ALWAYS),
    Api(_K.INITIALIZE_SHARE_GROUP_STATE, (0, 0),
        "share_state_rules:share_group_state", _ALWAYS),
    Api(_K.READ_SHARE_GROUP_STATE, (0, 0),
        "share_state_rules:share_group_state", _ALWAYS),
    Api(_K.WRITE_SHARE_GROUP_STATE, (0, 1),
        "share_state_rules:share_group_state", _ALWAYS),
    Api(_K.DELETE_SHARE_GROUP_STATE, (0, 0),
        "share_state_rules:share_group_state", _ALWAYS),
    Api(_K.READ_SHARE_GROUP_STATE_SUMMARY, (0, 1),
        "share_state_rules:share_group_state", _ALWAYS),
    Api(_K.DELETE_GROUPS, (0, 2), "group_rules:delete_groups", _ALWAYS),

    # -- transactions ------------------------------------------------------------------
    Api(_K.INIT_PRODUCER_ID, (0, 5), "transaction_rules:init_producer_id", _SOMETIMES),
    Api(_K.ADD_PARTITIONS_TO_TXN, (0, 5), "transaction_rules:add_partitions_to_txn",
        _ALWAYS),
    Api(_K.ADD_OFFSETS_TO_TXN, (0, 4), "transaction_rules:add_offsets_to_txn", _ALWAYS),
    Api(_K.TXN_OFFSET_COMMIT, (0, 5), "transaction_rules:txn_offset_commit", _ALWAYS),
    Api(_K.END_TXN, (0, 5), "transaction_rules:write_id", _ALWAYS),
    Api(_K.WRITE_TXN_MARKERS, (1, 2), "cluster_rules:write_txn_markers", _ALWAYS),
    Api(_K.DESCRIBE_TRANSACTIONS, (0, 0), "transaction_rules:describe_transactions",
        _ALWAYS),
    Api(_K.LIST_TRANSACTIONS, (0, 2), "transaction_rules:list_transactions", _ALWAYS),
)
# fmt: on

APIS: Final[Mapping[ApiKey, Api]] = {row.key: row for row in _ROWS}


def served(*, has_receiver: bool, is_control_plane: bool = False) -> list[Api]:
    """Return the APIs that a process serves: their rows in this module's list.

    Args:
        has_receiver: whether the broker has a receiver for clients' metrics.
        is_control_plane: whether the process serves the control plane's listener,
            where the rows with ``is_data`` are left out.
    """
    return [
        row
        for row in APIS.values()
        if (has_receiver or not row.needs_receiver)
        and not (is_control_plane and row.is_data)
    ]


def forwarded_apis() -> dict[int, tuple[int, int, int]]:
    """Return the versions of the APIs that are forwarded without being decoded.

    Returns:
        For each API key: the oldest, the newest and the first flexible version.
    """
    return {
        int(row.key): (*row.versions, FLEXIBLE_FROM[row.key])
        for row in APIS.values()
        if row.forwarded is Forwarded.ALWAYS
    }


def advertised_versions(rows: Iterable[Api]) -> dict[int, tuple[int, int]]:
    """Return the oldest and newest version that ApiVersions advertises, by API key.

    Produce is advertised from version 0 although versions 0 to 2 are refused: if the
    oldest version is higher, librdkafka concludes that the broker does not know gzip,
    snappy and lz4 (KAFKA-18659).
    """
    return {
        int(row.key): (
            0 if row.key is ApiKey.PRODUCE else row.versions[0],
            row.versions[1],
        )
        for row in rows
    }
