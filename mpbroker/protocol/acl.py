"""AclBinding and AclFilter: access control entries, filters of them, and their codes.

Numbers are Kafka's codes, on the wire and in the metadata log. A number that this
release does not know becomes UNKNOWN, which matches nothing and is never stored.

Source: Kafka's AclOperation, AclPermissionType, ResourceType, PatternType, AclBinding
and their filters; KIP-290 for prefixed patterns.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, Self

from mpbroker.base.named_tuple import NamedTuple

WILDCARD: Final = "*"  # as a name or host: all of them
CLUSTER_NAME: Final = "kafka-cluster"  # the name of the one CLUSTER resource
ANYBODY: Final = "User:*"


class _Code(IntEnum):
    @classmethod
    def of(cls, number: int) -> Self:
        """Return the member with a number; UNKNOWN (0) if there is none."""
        try:
            return cls(number)
        except ValueError:
            return cls(0)


class ResourceType(_Code):
    """The type of the resource that an access control entry protects."""

    UNKNOWN = 0
    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(_Code):
    """The way in which an entry's resource name is compared with a resource's name."""

    UNKNOWN = 0
    ANY = 1
    MATCH = 2  # in filters: all entries that apply to the named resource
    LITERAL = 3
    PREFIXED = 4


class AclOperation(_Code):
    """An operation on a resource, which an access control entry allows or denies."""

    UNKNOWN = 0
    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class AclPermissionType(_Code):
    """The effect of an access control entry: it allows or denies the operation."""

    UNKNOWN = 0
    ANY = 1
    DENY = 2
    ALLOW = 3


_O = AclOperation

# The operations of each type of resource: AclEntry.supportedOperations.
OPERATIONS: Final[Mapping[ResourceType, tuple[AclOperation, ...]]] = {
    ResourceType.TOPIC: (
        _O.READ,
        _O.WRITE,
        _O.CREATE,
        _O.DELETE,
        _O.ALTER,
        _O.DESCRIBE,
        _O.DESCRIBE_CONFIGS,
        _O.ALTER_CONFIGS,
    ),
    ResourceType.GROUP: (
        _O.READ,
        _O.DELETE,
        _O.DESCRIBE,
        _O.DESCRIBE_CONFIGS,
        _O.ALTER_CONFIGS,
    ),
    ResourceType.CLUSTER: (
        _O.CREATE,
        _O.ALTER,
        _O.DESCRIBE,
        _O.CLUSTER_ACTION,
        _O.DESCRIBE_CONFIGS,
        _O.ALTER_CONFIGS,
        _O.IDEMPOTENT_WRITE,
    ),
    ResourceType.TRANSACTIONAL_ID: (_O.WRITE, _O.DESCRIBE, _O.TWO_PHASE_COMMIT),
    ResourceType.DELEGATION_TOKEN: (_O.DESCRIBE,),
    ResourceType.USER: (_O.CREATE_TOKENS, _O.DESCRIBE_TOKENS),
}


def shown(code: IntEnum) -> str:
    """Return a code's name for people, as Kafka spells it, such as AlterConfigs."""
    return code.name.title().replace("_", "")


class AclBinding(NamedTuple):
    """An access control entry: it allows or denies a principal one operation.

    Attributes:
        resource_type: the type of the protected resources, such as topics.
        resource_name: a name, a prefix of names, or "*".
        pattern_type: LITERAL or PREFIXED.
        principal: such as "User:alice"; "User:*" is all users.
        host: the IP address of the client, or a network of them; "*" is all hosts.
        operation: the operation on the resources; ALL is all operations.
        permission_type: ALLOW or DENY.
    """

    resource_type: ResourceType
    resource_name: str
    pattern_type: PatternType
    principal: str
    host: str
    operation: AclOperation
    permission_type: AclPermissionType


class AclFilter(NamedTuple):
    """A filter of access control entries.

    A field that is None or ANY matches all entries.
    """

    resource_type: ResourceType = ResourceType.ANY
    resource_name: str | None = None
    pattern_type: PatternType = PatternType.ANY
    principal: str | None = None
    host: str | None = None
    operation: AclOperation = AclOperation.ANY
    permission_type: AclPermissionType = AclPermissionType.ANY

    @property
    def is_unknown(self) -> bool:
        """Whether a field has a code that this release does not know."""
        return 0 in (
            self.resource_type,
            self.pattern_type,
            self.operation,
            self.permission_type,
        )

    def matches(self, acl: AclBinding) -> bool:
        """Return whether an entry matches the filter."""
        return (
            self.resource_type in (ResourceType.ANY, acl.resource_type)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self.operation in (AclOperation.ANY, acl.operation)
            and self.permission_type in (AclPermissionType.ANY, acl.permission_type)
            and self._matches_pattern(acl)
        )

    def _matches_pattern(self, acl: AclBinding) -> bool:
        name, pattern_type = self.resource_name, self.pattern_type
        if pattern_type is PatternType.MATCH:
            if name is None or name == acl.resource_name:
                return True
            if acl.pattern_type is PatternType.PREFIXED:
                return name.startswith(acl.resource_name)
            return acl.resource_name == WILDCARD
        if pattern_type not in (PatternType.ANY, acl.pattern_type):
            return False
        return name is None or name == acl.resource_name
