"""Check the entries and filters of CreateAcls, DeleteAcls and DescribeAcls.

Kafka closes the connection if the number of a resource type, pattern type, operation or
permission is unknown; mpbroker answers INVALID_REQUEST.

Source: Kafka's AclApis, AclControlManager.
"""

from __future__ import annotations

from typing import Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.protocol.acl import (
    CLUSTER_NAME,
    WILDCARD,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.create_acls import AclCreation
from mpbroker.server.authorization.acl_hosts import parse_host
from mpbroker.server.authorization.authorization import Access
from mpbroker.server.errors import invalid_request

_LOG = get_logger(__name__)

# Kafka's MAX_RECORDS_PER_USER_OP.
MAX_ENTRIES: Final = 10_000
# Characters in each text of an entry. A topic's name has at most 249.
MAX_TEXT: Final = 4096


class RequestedFilter(Protocol):
    """Holds a filter in a DescribeAcls or a DeleteAcls request."""

    resource_type_filter: int
    resource_name_filter: str | None
    pattern_type_filter: int
    principal_filter: str | None
    host_filter: str | None
    operation: int
    permission_type: int


def require_authorizer(access: Access | None) -> Access:
    """Refuse a request about ACLs if the broker has no authorizer.

    Returns:
        ``access``, which is not None.

    Raises:
        ApiError: SECURITY_DISABLED: the broker has no authorizer.
    """
    if access is None:
        raise ApiError(ErrorCode.SECURITY_DISABLED, "No Authorizer is configured.")
    return access


def check_count(count: int) -> None:
    """Raise ApiError POLICY_VIOLATION if a request has too many ACLs or ACL filters."""
    if count > MAX_ENTRIES:
        raise ApiError(
            ErrorCode.POLICY_VIOLATION,
            f"{count} entries in one request; at most {MAX_ENTRIES}",
        )


def acl_filter(wanted: RequestedFilter) -> AclFilter:
    """Return the ACL filter that a DescribeAcls or DeleteAcls request has.

    Raises:
        ApiError: INVALID_REQUEST: the request has the unknown number of a resource
            type, pattern type, operation or permission type.
    """
    found = AclFilter(
        ResourceType.of(wanted.resource_type_filter),
        wanted.resource_name_filter,
        PatternType.of(wanted.pattern_type_filter),
        wanted.principal_filter,
        wanted.host_filter,
        AclOperation.of(wanted.operation),
        AclPermissionType.of(wanted.permission_type),
    )
    if found.is_unknown:
        raise invalid_request(
            f"The filter has unknown elements: resource type"
            f" {wanted.resource_type_filter}, pattern type"
            f" {wanted.pattern_type_filter}, operation {wanted.operation},"
            f" permission type {wanted.permission_type}."
        )
    return found


def acl_binding(creation: AclCreation) -> AclBinding:
    """Return the access control entry that a CreateAcls request wants to add.

    Raises:
        ApiError: INVALID_REQUEST: a part of the entry is unknown or not allowed.
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
        raise invalid_request(f"Invalid resourceType {creation.resource_type}.")
    if acl.pattern_type not in (PatternType.LITERAL, PatternType.PREFIXED):
        raise invalid_request(f"Invalid patternType {creation.resource_pattern_type}.")
    if acl.operation <= AclOperation.ANY:
        raise invalid_request(f"Invalid operation {creation.operation}.")
    if acl.permission_type <= AclPermissionType.ANY:
        raise invalid_request(f"Invalid permissionType {creation.permission_type}.")
    if not name:
        raise invalid_request("Invalid empty resource name.")
    if acl.resource_type is ResourceType.CLUSTER and name != CLUSTER_NAME:
        raise invalid_request(
            f"The only valid name for the CLUSTER resource is {CLUSTER_NAME}."
        )
    kind, colon, who = acl.principal.partition(":")
    if not (kind and colon and who):
        raise invalid_request(
            f"Could not parse principal from `{acl.principal:.100}`: it is a type, a"
            " colon and a name, for example User:alice."
        )
    _check_host(acl.host)
    longest = max(len(name), len(acl.principal), len(acl.host))
    if longest > MAX_TEXT:
        raise invalid_request(f"A text of {longest} characters; at most {MAX_TEXT}.")
    return acl


def _check_host(host: str) -> None:
    """Refuse a host that is empty or no network; warn of one that matches nobody.

    Kafka takes the names of machines, too, although it compares addresses alone.

    Raises:
        ApiError: INVALID_REQUEST.
    """
    if not host:
        raise invalid_request("Invalid empty host: * stands for all of them.")
    try:
        found = parse_host(host)
    except ValueError as error:
        raise invalid_request(f"Invalid host: {error}.") from None
    if found is None and host != WILDCARD:
        _LOG.warning(
            "an ACL for the host %.100r matches no client: it is neither * nor an"
            " address nor a network",
            host,
        )
