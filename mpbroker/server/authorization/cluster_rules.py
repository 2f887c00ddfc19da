"""Define the authorization rules of the APIs about the cluster and about configs.

A rule takes the sender's access, the request and the version of the API. It removes the
parts of the request that are denied, and returns a function that adds their refusals to
the response (rulings.py). If all is denied, it may return the whole answer. apis.py
names the rule of each API.
"""

from __future__ import annotations

from typing import Any, Final

from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    EntryResult,
)
from mpbroker.protocol.messages.alter_configs import (
    AlterConfigsRequest,
    AlterConfigsResourceResponse,
)
from mpbroker.protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)
from mpbroker.protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
)
from mpbroker.protocol.messages.create_acls import (
    AclCreationResult,
    CreateAclsRequest,
    CreateAclsResponse,
)
from mpbroker.protocol.messages.delete_acls import (
    DeleteAclsFilterResult,
    DeleteAclsRequest,
    DeleteAclsResponse,
)
from mpbroker.protocol.messages.describe_cluster import (
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResult,
)
from mpbroker.protocol.messages.describe_log_dirs import (
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
)
from mpbroker.protocol.messages.elect_leaders import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    PartitionResult,
    ReplicaElectionResult,
)
from mpbroker.protocol.messages.incremental_alter_configs import (
    IncrementalAlterConfigsRequest,
)
from mpbroker.protocol.messages.write_txn_markers import (
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from mpbroker.server.authorization.authorization import (
    CLUSTER_DENIED,
    GROUP_DENIED,
    TOPIC_DENIED,
    Access,
)
from mpbroker.server.authorization.rulings import Amend, append_to, take_denied
from mpbroker.server.authorization.topic_rules import cluster_operations
from mpbroker.server.configs.config_entries import GROUP_RESOURCE, TOPIC_RESOURCE

_O = AclOperation
_DENIED: Final = ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def describe_cluster(
    access: Access, request: DescribeClusterRequest, version: int
) -> Amend | None:
    """Require nothing. Show the sender's operations if the request wants them."""
    if not request.include_cluster_authorized_operations:
        return None

    def amend(response: DescribeClusterResponse) -> None:
        response.cluster_authorized_operations = cluster_operations(access)

    return amend


def describe_log_dirs(
    access: Access, request: DescribeLogDirsRequest, version: int
) -> DescribeLogDirsResponse | None:
    """Require DESCRIBE permission for the cluster."""
    if access.may_cluster(_O.DESCRIBE):
        return None
    return DescribeLogDirsResponse(error_code=_DENIED)


def alter_replica_log_dirs(
    access: Access, request: AlterReplicaLogDirsRequest, version: int
) -> AlterReplicaLogDirsResponse | None:
    """Require ALTER of the cluster."""
    if access.may_cluster(_O.ALTER):
        return None
    refused: dict[str, dict[int, AlterReplicaLogDirPartitionResult]] = {}
    for each in request.dirs:
        for topic in each.topics:
            for index in topic.partitions:
                refused.setdefault(topic.name, {})[index] = (
                    AlterReplicaLogDirPartitionResult(
                        partition_index=index, error_code=_DENIED
                    )
                )
    return AlterReplicaLogDirsResponse(
        results=[
            AlterReplicaLogDirTopicResult(
                topic_name=name, partitions=list(partitions.values())
            )
            for name, partitions in refused.items()
        ]
    )


def elect_leaders(
    access: Access, request: ElectLeadersRequest, version: int
) -> ElectLeadersResponse | None:
    """Require ALTER permission for the cluster."""
    if access.may_cluster(_O.ALTER):
        return None
    return ElectLeadersResponse(
        error_code=_DENIED if version >= 1 else ErrorCode.NONE,
        replica_election_results=[
            ReplicaElectionResult(
                topic=topic.topic,
                partition_result=[
                    PartitionResult(
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


def write_txn_markers(
    access: Access, request: WriteTxnMarkersRequest, version: int
) -> WriteTxnMarkersResponse | None:
    """Require CLUSTER_ACTION or ALTER of the cluster.

    ALTER lets an administrator abort a hanging transaction (KIP-664). A refusal is an
    error for each partition.
    """
    if access.may_cluster(_O.ALTER, log=False) or access.may_cluster(_O.CLUSTER_ACTION):
        return None
    return WriteTxnMarkersResponse(
        markers=[
            WritableTxnMarkerResult(
                producer_id=marker.producer_id,
                topics=[
                    WritableTxnMarkerTopicResult(
                        name=topic.name,
                        partitions=[
                            WritableTxnMarkerPartitionResult(
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


# -- ACLs, credentials and quotas: a refusal for each entry ---------------------------


def create_acls(
    access: Access, request: CreateAclsRequest, version: int
) -> CreateAclsResponse | None:
    """Require ALTER permission for the cluster."""
    if access.may_cluster(_O.ALTER):
        return None
    result = AclCreationResult(error_code=_DENIED, error_message=CLUSTER_DENIED)
    return CreateAclsResponse(results=[result] * len(request.creations))


def delete_acls(
    access: Access, request: DeleteAclsRequest, version: int
) -> DeleteAclsResponse | None:
    """Require ALTER permission for the cluster."""
    if access.may_cluster(_O.ALTER):
        return None
    result = DeleteAclsFilterResult(error_code=_DENIED, error_message=CLUSTER_DENIED)
    return DeleteAclsResponse(filter_results=[result] * len(request.filters))


def alter_user_scram_credentials(
    access: Access, request: AlterUserScramCredentialsRequest, version: int
) -> AlterUserScramCredentialsResponse | None:
    """Require ALTER permission for the cluster."""
    if access.may_cluster(_O.ALTER):
        return None
    deleted = (each.name for each in request.deletions)
    upserted = (each.name for each in request.upsertions)
    return AlterUserScramCredentialsResponse(
        results=[
            AlterUserScramCredentialsResult(
                user=user, error_code=_DENIED, error_message=CLUSTER_DENIED
            )
            for user in dict.fromkeys((*deleted, *upserted))
        ]
    )


def alter_client_quotas(
    access: Access, request: AlterClientQuotasRequest, version: int
) -> AlterClientQuotasResponse | None:
    """Require ALTER_CONFIGS permission for the cluster."""
    if access.may_cluster(_O.ALTER_CONFIGS):
        return None
    return AlterClientQuotasResponse(
        entries=[
            EntryResult(
                error_code=_DENIED, error_message=CLUSTER_DENIED, entity=entry.entity
            )
            for entry in request.entries
        ]
    )


# -- configs --------------------------------------------------------------------------


def describe_configs(
    access: Access, request: DescribeConfigsRequest, version: int
) -> Amend | None:
    """Require DESCRIBE_CONFIGS permission for each resource.

    For a resource that is neither a topic nor a group, require it of the cluster.
    """
    return append_to(
        "results",
        _refused_resources(access, request, _O.DESCRIBE_CONFIGS, DescribeConfigsResult),
    )


def alter_configs(
    access: Access,
    request: AlterConfigsRequest | IncrementalAlterConfigsRequest,
    version: int,
) -> Amend | None:
    """Require ALTER_CONFIGS permission for each resource.

    For a resource that is neither a topic nor a group, require it of the cluster.
    """
    return append_to(
        "responses",
        _refused_resources(
            access, request, _O.ALTER_CONFIGS, AlterConfigsResourceResponse
        ),
    )


def _refused_resources(
    access: Access, request: Any, operation: AclOperation, refusal: Any
) -> list[Any]:
    """Remove the denied resources from a request; return their refusals.

    Args:
        access: the sender's access.
        request: a request with a list ``resources``.
        operation: the operation to require.
        refusal: the class of the refusals.
    """
    denied = take_denied(
        request,
        "resources",
        lambda each: _may_configs(access, operation, each),
    )
    refusals = []
    for resource in denied:
        code, message = _DENIALS.get(resource.resource_type, (_DENIED, CLUSTER_DENIED))
        refusals.append(
            refusal(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
        )
    return refusals


# The error of a denied resource, by its type. All other types need the cluster's
# permission.
_DENIALS: Final = {
    TOPIC_RESOURCE: (ErrorCode.TOPIC_AUTHORIZATION_FAILED, TOPIC_DENIED),
    GROUP_RESOURCE: (ErrorCode.GROUP_AUTHORIZATION_FAILED, GROUP_DENIED),
}


def _may_configs(access: Access, operation: AclOperation, resource: Any) -> bool:
    name = resource.resource_name
    if resource.resource_type == TOPIC_RESOURCE:
        return access.may_topic(operation, name)
    if resource.resource_type == GROUP_RESOURCE:
        return access.may_group(operation, name)
    return access.may_cluster(operation)
