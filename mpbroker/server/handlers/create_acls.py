"""CreateAcls: add access control entries.

Source: Kafka protocol guide, "CreateAcls"; AclApis.handleCreateAcls.
"""

from __future__ import annotations

from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.create_acls import (
    AclCreationResult,
    CreateAclsRequest,
    CreateAclsResponse,
)
from mpbroker.server.authorization.acl_requests import (
    acl_binding,
    check_count,
    require_authorizer,
)
from mpbroker.server.handler_context import HandlerContext


def handle_create_acls(
    request: CreateAclsRequest, context: HandlerContext
) -> CreateAclsResponse:
    """Add all valid entries in one step; answer each entry.

    An entry that is not valid gets an error. If the authorizer refuses the valid
    entries, none is added, and all of them get its error.
    """
    access = context.access
    results: list[AclCreationResult | None] = []
    valid = []
    for creation in request.creations:
        try:
            require_authorizer(access)
            check_count(len(request.creations))
            valid.append(acl_binding(creation))
            results.append(None)
        except ApiError as error:
            results.append(_refused(error))
    created = AclCreationResult(error_message=None)
    if valid and access is not None:
        try:
            access.authorizer.create_acls(access.client, valid)
        except ApiError as error:
            created = _refused(error)
    return CreateAclsResponse(results=[each or created for each in results])


def _refused(error: ApiError) -> AclCreationResult:
    return AclCreationResult(error_code=error.error_code, error_message=error.message)
