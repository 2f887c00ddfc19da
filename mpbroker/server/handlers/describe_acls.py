"""DescribeAcls: list the access control entries that a filter matches.

Source: Kafka protocol guide, "DescribeAcls"; AclApis.handleDescribeAcls.
"""

from __future__ import annotations

from typing import Any

from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.describe_acls import (
    AclDescription,
    DescribeAclsRequest,
    DescribeAclsResource,
    DescribeAclsResponse,
)
from mpbroker.server.authorization.acl_requests import acl_filter, require_authorizer
from mpbroker.server.handler_context import HandlerContext


def handle_describe_acls(
    request: DescribeAclsRequest, context: HandlerContext
) -> DescribeAclsResponse:
    """Answer with the entries that the filter matches, grouped by resource."""
    try:
        authorizer = require_authorizer(context.access).authorizer
        found = authorizer.acls(acl_filter(request))
    except ApiError as error:
        return DescribeAclsResponse(
            error_code=error.error_code, error_message=error.message
        )
    resources: dict[tuple[Any, ...], DescribeAclsResource] = {}
    for acl in found:
        key = acl.resource_type, acl.resource_name, acl.pattern_type
        resource = resources.get(key)
        if resource is None:
            resource = resources[key] = DescribeAclsResource(
                resource_type=acl.resource_type,
                resource_name=acl.resource_name,
                pattern_type=acl.pattern_type,
            )
        resource.acls.append(
            AclDescription(
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission_type,
            )
        )
    return DescribeAclsResponse(error_message=None, resources=list(resources.values()))
