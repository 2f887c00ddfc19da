"""The rules of APIs about the cluster and about configs: see apis.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from mpbroker.protocol.acl import AclOperation, ResourceType
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages import alter_client_quotas as quota_messages
from mpbroker.protocol.messages import alter_configs as alter_configs_messages
from mpbroker.protocol.messages import alter_user_scram_credentials as scram_messages
from mpbroker.protocol.messages import create_acls as create_acls_messages
from mpbroker.protocol.messages import delete_acls as delete_acls_messages
from mpbroker.protocol.messages import describe_configs as describe_configs_messages
from mpbroker.protocol.messages import describe_log_dirs as log_dirs_messages
from mpbroker.protocol.messages import elect_leaders as elect_leaders_messages
from mpbroker.protocol.messages import incremental_alter_configs as incremental_messages
from mpbroker.protocol.messages import write_txn_markers as marker_messages
from mpbroker.server.authorization.authorization import (
    CLUSTER_DENIED,
    GROUP_DENIED,
    TOPIC_DENIED,
    Access,
    Rule,
    Verdict,
    refused,
)
from mpbroker.server.authorization.topic_rules import cluster_operations
from mpbroker.server.configs.config_entries import GROUP_RESOURCE, TOPIC_RESOURCE

_O = AclOperation
_DENIED: Final = ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def cluster_rule(operation: AclOperation) -> Rule:
    """Return the rule that asks for one operation on the cluster."""

    def check(access: Access, request: Any, version: int) -> Verdict | None:
        access.require_cluster(operation)
        return None

    return check


def describe_cluster(access: Access, request: Any, version: int) -> Verdict | None:
    """Anybody may; what the sender may do with the cluster is shown if asked for."""
    if not request.include_cluster_authorized_operations:
        return None

    def amend(response: Any) -> None:
        response.cluster_authorized_operations = cluster_operations(access)

    return Verdict(request, amend)


def describe_log_dirs(access: Access, request: Any, version: int) -> Verdict | None:
    if access.may_cluster(_O.DESCRIBE):
        return None
    return refused(log_dirs_messages.DescribeLogDirsResponse(error_code=_DENIED))


def elect_leaders(access: Access, request: Any, version: int) -> Verdict | None:
    if access.may_cluster(_O.ALTER):
        return None
    return refused(
        elect_leaders_messages.ElectLeadersResponse(
            error_code=_DENIED if version >= 1 else ErrorCode.NONE,
            replica_election_results=[
                elect_leaders_messages.ReplicaElectionResult(
                    topic=topic.topic,
                    partition_result=[
                        elect_leaders_messages.PartitionResult(
                            partition_id=partition,
                            error_code=_DENIED,
                            error_message=CLUSTER_DENIED,
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topic_partitions or ()
            ],
        )
    )


def write_txn_markers(access: Access, request: Any, version: int) -> Verdict | None:
    """CLUSTER_ACTION, or ALTER for whoever aborts a hanging transaction (KIP-664)."""
    if access.may_cluster(_O.ALTER, log=False) or access.may_cluster(_O.CLUSTER_ACTION):
        return None
    return refused(
        marker_messages.WriteTxnMarkersResponse(
            markers=[
                marker_messages.WritableTxnMarkerResult(
                    producer_id=marker.producer_id,
                    topics=[
                        marker_messages.WritableTxnMarkerTopicResult(
                            name=topic.name,
                            partitions=[
                                marker_messages.WritableTxnMarkerPartitionResult(
                                    partition_index=index, error_code=_DENIED
                                )
                                for index in topic.partition_indexes
                            ],
                        )
                        for topic in marker.topics
                    ],
                )
                for marker in request.markers
            ]
        )
    )


# -- ACLs and quotas: a refusal for each entry ----------------------------------------


def create_acls(access: Access, request: Any, version: int) -> Verdict | None:
    if access.may_cluster(_O.ALTER):
        return None
    result = create_acls_messages.AclCreationResult(
        error_code=_DENIED, error_message=CLUSTER_DENIED
    )
    return refused(
        create_acls_messages.CreateAclsResponse(
            results=[result] * len(request.creations)
        )
    )


def delete_acls(access: Access, request: Any, version: int) -> Verdict | None:
    if access.may_cluster(_O.ALTER):
        return None
    result = delete_acls_messages.DeleteAclsFilterResult(
        error_code=_DENIED, error_message=CLUSTER_DENIED
    )
    return refused(
        delete_acls_messages.DeleteAclsResponse(
            filter_results=[result] * len(request.filters)
        )
    )


def alter_user_scram_credentials(
    access: Access, request: Any, version: int
) -> Verdict | None:
    if access.may_cluster(_O.ALTER):
        return None
    users = dict.fromkeys(
        each.name for each in (*request.deletions, *request.upsertions)
    )
    return refused(
        scram_messages.AlterUserScramCredentialsResponse(
            results=[
                scram_messages.AlterUserScramCredentialsResult(
                    user=user, error_code=_DENIED, error_message=CLUSTER_DENIED
                )
                for user in users
            ]
        )
    )


def alter_client_quotas(access: Access, request: Any, version: int) -> Verdict | None:
    if access.may_cluster(_O.ALTER_CONFIGS):
        return None
    return refused(
        quota_messages.AlterClientQuotasResponse(
            entries=[
                quota_messages.EntryResult(
                    error_code=_DENIED,
                    error_message=CLUSTER_DENIED,
                    entity=entry.entity,
                )
                for entry in request.entries
            ]
        )
    )


# -- configs --------------------------------------------------------------------------


def _config_denial(
    access: Access, operation: AclOperation, resource: Any
) -> tuple[ErrorCode, str] | None:
    """Why a resource's configs may not be seen, or changed; None: they may."""
    name = resource.resource_name
    if resource.resource_type == TOPIC_RESOURCE:
        if not access.may_topic(operation, name):
            return ErrorCode.TOPIC_AUTHORIZATION_FAILED, TOPIC_DENIED
    elif resource.resource_type == GROUP_RESOURCE:
        if not access.may(operation, ResourceType.GROUP, name):
            return ErrorCode.GROUP_AUTHORIZATION_FAILED, GROUP_DENIED
    elif not access.may_cluster(operation):
        return _DENIED, CLUSTER_DENIED
    return None


def _configs(
    operation: AclOperation, refusal_class: Any, put: Callable[[Any, list[Any]], None]
) -> Rule:
    def check(access: Access, request: Any, version: int) -> Verdict | None:
        refusals = []
        allowed = []
        for resource in request.resources:
            denial = _config_denial(access, operation, resource)
            if denial is None:
                allowed.append(resource)
                continue
            refusals.append(
                refusal_class(
                    error_code=denial[0],
                    error_message=denial[1],
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                )
            )
        if not refusals:
            return None
        request.resources = allowed
        return Verdict(request, lambda response: put(response, refusals))

    return check


def _put_results(response: Any, refusals: list[Any]) -> None:
    response.results += refusals


def _put_responses(response: Any, refusals: list[Any]) -> None:
    response.responses += refusals


describe_configs: Final = _configs(
    _O.DESCRIBE_CONFIGS, describe_configs_messages.DescribeConfigsResult, _put_results
)
alter_configs: Final = _configs(
    _O.ALTER_CONFIGS,
    alter_configs_messages.AlterConfigsResourceResponse,
    _put_responses,
)
incremental_alter_configs: Final = _configs(
    _O.ALTER_CONFIGS,
    incremental_messages.AlterConfigsResourceResponse,
    _put_responses,
)
