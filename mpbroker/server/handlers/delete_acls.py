"""DeleteAcls: remove the access control entries that filters match.

Source: Kafka protocol guide, "DeleteAcls"; AclApis.handleDeleteAcls.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpbroker.metadata.meta_properties import random_uuid
from mpbroker.protocol.acl import AclBinding
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.delete_acls import (
    DeleteAclsFilterResult,
    DeleteAclsMatchingAcl,
    DeleteAclsRequest,
    DeleteAclsResponse,
)
from mpbroker.server.authorization.acl_requests import (
    acl_filter,
    check_count,
    require_authorizer,
)
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.intent import Intent, id_words, noted_ids


def handle_delete_acls(
    request: DeleteAclsRequest, context: HandlerContext
) -> DeleteAclsResponse:
    """Remove the entries that the valid filters match; answer each filter.

    Either all these entries are removed, or none. An id of this request is noted before
    the removal (intent.py), and the removing records in the metadata log contain it. So
    a second execution after the death of a handler finds in the log what the first one
    has removed.
    """
    access = context.access
    results: list[DeleteAclsFilterResult | None] = []
    filters = []
    for wanted in request.filters:
        try:
            require_authorizer(access)
            check_count(len(request.filters))
            filters.append(acl_filter(wanted))
            results.append(None)
        except ApiError as error:
            results.append(_refused(error))
    answers: Iterable[DeleteAclsFilterResult] = ()
    if filters and access is not None:
        try:
            deleted = access.authorizer.delete_acls_once(
                access.client, filters, _request_id(context.intent)
            )
            answers = [_deleted(acls) for acls in deleted]
        except ApiError as error:
            answers = [_refused(error) for _ in filters]
    following = iter(answers)
    return DeleteAclsResponse(
        filter_results=[each or next(following) for each in results]
    )


def _request_id(intent: Intent) -> bytes:
    """Return the request's id that an earlier execution noted, or note a new one."""
    noted = noted_ids(intent.earlier())
    if noted:
        return noted[0]
    request_id = random_uuid()
    intent.note(id_words([request_id]))
    return request_id


def _refused(error: ApiError) -> DeleteAclsFilterResult:
    return DeleteAclsFilterResult(
        error_code=error.error_code, error_message=error.message
    )


def _deleted(acls: Iterable[AclBinding]) -> DeleteAclsFilterResult:
    return DeleteAclsFilterResult(
        error_message=None,
        matching_acls=[
            DeleteAclsMatchingAcl(
                error_message=None,
                resource_type=acl.resource_type,
                resource_name=acl.resource_name,
                pattern_type=acl.pattern_type,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission_type,
            )
            for acl in acls
        ],
    )
