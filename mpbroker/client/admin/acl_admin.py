"""Describe, create and delete the ACLs of a `Cluster`.

Every function raises ApiError, with the broker's words, if the broker refuses:
SECURITY_DISABLED if it has no authorizer.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpbroker.client.cluster import Cluster
from mpbroker.client.errors import check_error
from mpbroker.protocol.acl import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from mpbroker.protocol.messages.create_acls import (
    AclCreation,
    CreateAclsRequest,
    CreateAclsResponse,
)
from mpbroker.protocol.messages.delete_acls import (
    DeleteAclsFilter,
    DeleteAclsRequest,
    DeleteAclsResponse,
)
from mpbroker.protocol.messages.describe_acls import (
    DescribeAclsRequest,
    DescribeAclsResponse,
)


def describe_acls(cluster: Cluster, wanted: AclFilter) -> list[AclBinding]:
    """Return the ACLs that match a filter."""
    request = DescribeAclsRequest(
        resource_type_filter=wanted.resource_type,
        resource_name_filter=wanted.resource_name,
        pattern_type_filter=wanted.pattern_type,
        principal_filter=wanted.principal,
        host_filter=wanted.host,
        operation=wanted.operation,
        permission_type=wanted.permission_type,
    )
    response = cluster.request(request, DescribeAclsResponse)
    check_error(response.error_code, "ACLs", response.error_message)
    return [
        AclBinding(
            ResourceType.of(resource.resource_type),
            resource.resource_name,
            PatternType.of(resource.pattern_type),
            acl.principal,
            acl.host,
            AclOperation.of(acl.operation),
            AclPermissionType.of(acl.permission_type),
        )
        for resource in response.resources
        for acl in resource.acls
    ]


def create_acls(cluster: Cluster, acls: Sequence[AclBinding]) -> None:
    """Add ACLs; ACLs that exist already stay."""
    request = CreateAclsRequest(
        creations=[
            AclCreation(
                resource_type=acl.resource_type,
                resource_name=acl.resource_name,
                resource_pattern_type=acl.pattern_type,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission_type,
            )
            for acl in acls
        ]
    )
    results = cluster.controller().request(request, CreateAclsResponse).results
    for result in results:
        check_error(result.error_code, "ACL", result.error_message)


def delete_acls(cluster: Cluster, wanted: AclFilter) -> list[AclBinding]:
    """Delete the ACLs that match a filter; return them."""
    request = DeleteAclsRequest(
        filters=[
            DeleteAclsFilter(
                resource_type_filter=wanted.resource_type,
                resource_name_filter=wanted.resource_name,
                pattern_type_filter=wanted.pattern_type,
                principal_filter=wanted.principal,
                host_filter=wanted.host,
                operation=wanted.operation,
                permission_type=wanted.permission_type,
            )
        ]
    )
    response = cluster.controller().request(request, DeleteAclsResponse)
    (result,) = response.filter_results
    check_error(result.error_code, "ACLs", result.error_message)
    for acl in result.matching_acls:
        check_error(acl.error_code, "ACL", acl.error_message)
    return [
        AclBinding(
            ResourceType.of(acl.resource_type),
            acl.resource_name,
            PatternType.of(acl.pattern_type),
            acl.principal,
            acl.host,
            AclOperation.of(acl.operation),
            AclPermissionType.of(acl.permission_type),
        )
        for acl in result.matching_acls
    ]
