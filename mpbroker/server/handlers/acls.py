"""DescribeAcls, CreateAcls and DeleteAcls: what the authorizer goes by.

What Kafka's messages call unknown elements, numbers of no resource, operation or
pattern, closes the connection there; here it is INVALID_REQUEST.

Source: Kafka protocol guide; AclApis, AclControlManager.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from mpbroker.metadata.meta_properties import random_uuid
from mpbroker.protocol.acl import (
    CLUSTER_NAME,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.create_acls import (
    AclCreation,
    AclCreationResult,
    CreateAclsRequest,
    CreateAclsResponse,
)
from mpbroker.protocol.messages.delete_acls import (
    DeleteAclsFilterResult,
    DeleteAclsMatchingAcl,
    DeleteAclsRequest,
    DeleteAclsResponse,
)
from mpbroker.protocol.messages.describe_acls import (
    AclDescription,
    DescribeAclsRequest,
    DescribeAclsResource,
    DescribeAclsResponse,
)
from mpbroker.server.authorization.authorizer import Authorizer
from mpbroker.server.intent import NO_INTENT, Intent, id_words, noted_ids
from mpbroker.server.request_context import RequestContext

# Kafka's MAX_RECORDS_PER_USER_OP.
MAX_ENTRIES: Final = 10_000
# In any one of the texts of an entry: a topic's name has 249, an address fewer.
MAX_TEXT: Final = 4096

_NO_AUTHORIZER: Final = "No Authorizer is configured."


class Asker(NamedTuple):
    """Who asks, and the authorizer that is asked; None: there is none."""

    authorizer: Authorizer
    context: RequestContext


def handle_describe_acls(
    request: DescribeAclsRequest, asker: Asker | None
) -> DescribeAclsResponse:
    """Return entries that pass a filter, by resource."""
    try:
        if asker is None:
            raise ApiError(ErrorCode.SECURITY_DISABLED, _NO_AUTHORIZER)
        found = asker.authorizer.acls(_filter(request))
    except ApiError as error:
        return DescribeAclsResponse(
            error_code=error.error_code, error_message=error.message
        )
    resources: dict[tuple[Any, ...], DescribeAclsResource] = {}
    for acl in found:
        resource = resources.get(acl[:3])
        if resource is None:
            resource = resources[acl[:3]] = DescribeAclsResource(
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


def handle_create_acls(
    request: CreateAclsRequest, asker: Asker | None
) -> CreateAclsResponse:
    """Add what is valid, all of it or nothing."""
    results: list[AclCreationResult | None] = []
    valid = []
    for creation in request.creations:
        try:
            if asker is None:
                raise ApiError(ErrorCode.SECURITY_DISABLED, _NO_AUTHORIZER)
            _check_count(len(request.creations))
            valid.append(_checked(creation))
            results.append(None)
        except ApiError as error:
            results.append(_refused(error))
    created = AclCreationResult(error_message=None)
    if valid and asker is not None:
        try:
            asker.authorizer.create_acls(asker.context, valid)
        except ApiError as error:
            created = _refused(error)
    return CreateAclsResponse(results=[each or created for each in results])


def handle_delete_acls(
    request: DeleteAclsRequest, asker: Asker | None, intent: Intent = NO_INTENT
) -> DeleteAclsResponse:
    """Take away what passes the valid filters, all of it or nothing.

    Args:
        intent: gets the request's id, by which the metadata log knows what it has
            taken away if it is executed again.
    """
    results: list[DeleteAclsFilterResult | None] = []
    filters = []
    for wanted in request.filters:
        try:
            if asker is None:
                raise ApiError(ErrorCode.SECURITY_DISABLED, _NO_AUTHORIZER)
            _check_count(len(request.filters))
            filters.append(_filter(wanted))
            results.append(None)
        except ApiError as error:
            results.append(_refused_filter(error))
    answers: Iterable[DeleteAclsFilterResult] = ()
    if filters and asker is not None:
        try:
            deleted = asker.authorizer.delete_acls_once(
                asker.context, filters, _request_id(intent)
            )
            answers = [_deleted(acls) for acls in deleted]
        except ApiError as error:
            answers = [_refused_filter(error) for _ in filters]
    following = iter(answers)
    return DeleteAclsResponse(
        filter_results=[each or next(following) for each in results]
    )


def _request_id(intent: Intent) -> bytes:
    """The id that an earlier execution has noted, or one that is noted now."""
    noted = noted_ids(intent.earlier())
    if noted:
        return noted[0]
    request_id = random_uuid()
    intent.note(id_words([request_id]))
    return request_id


def _check_count(count: int) -> None:
    if count > MAX_ENTRIES:
        raise ApiError(
            ErrorCode.POLICY_VIOLATION,
            f"{count} entries in one request; at most {MAX_ENTRIES}",
        )


def _filter(request: Any) -> AclFilter:
    wanted = AclFilter(
        ResourceType.of(request.resource_type_filter),
        request.resource_name_filter,
        PatternType.of(request.pattern_type_filter),
        request.principal_filter,
        request.host_filter,
        AclOperation.of(request.operation),
        AclPermissionType.of(request.permission_type),
    )
    if wanted.is_unknown:
        raise _invalid(
            f"The filter has unknown elements: resource type"
            f" {request.resource_type_filter}, pattern type"
            f" {request.pattern_type_filter}, operation {request.operation},"
            f" permission type {request.permission_type}."
        )
    return wanted


def _checked(creation: AclCreation) -> AclBinding:
    """Return what is to be created.

    Raises:
        ApiError: INVALID_REQUEST; it makes no sense.
    """
    acl = AclBinding(
        ResourceType.of(creation.resource_type),
        creation.resource_name,
        PatternType.of(creation.resource_pattern_type),
        creation.principal,
        creation.host,
        AclOperation.of(creation.operation),
        AclPermissionType.of(creation.permission_type),
    )
    name = acl.resource_name
    if acl.resource_type <= ResourceType.ANY:
        raise _invalid(f"Invalid resourceType {creation.resource_type}.")
    if acl.pattern_type not in (PatternType.LITERAL, PatternType.PREFIXED):
        raise _invalid(f"Invalid patternType {creation.resource_pattern_type}.")
    if acl.operation <= AclOperation.ANY:
        raise _invalid(f"Invalid operation {creation.operation}.")
    if acl.permission_type <= AclPermissionType.ANY:
        raise _invalid(f"Invalid permissionType {creation.permission_type}.")
    if not name:
        raise _invalid("Invalid empty resource name.")
    if acl.resource_type is ResourceType.CLUSTER and name != CLUSTER_NAME:
        raise _invalid(
            f"The only valid name for the CLUSTER resource is {CLUSTER_NAME}."
        )
    kind, colon, who = acl.principal.partition(":")
    if not (kind and colon and who):
        raise _invalid(
            f"Could not parse principal from `{acl.principal:.100}`: it is a type, a"
            " colon and a name, for example User:alice."
        )
    longest = max(len(name), len(acl.principal), len(acl.host))
    if longest > MAX_TEXT:
        raise _invalid(f"A text of {longest} characters; at most {MAX_TEXT}.")
    return acl


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, message)


def _refused(error: ApiError) -> AclCreationResult:
    return AclCreationResult(error_code=error.error_code, error_message=error.message)


def _refused_filter(error: ApiError) -> DeleteAclsFilterResult:
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
