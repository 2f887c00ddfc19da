"""Define the authorizer's interface, and the authorizer that decides by ACLs.

The setting ``authorizer.class.name`` may name a Python class of the operator's. Each
process that executes requests makes one instance of it. The class imports what it needs
from `mpbroker.extensions`; docs/security.md has an example.

Source: Kafka's Authorizer, StandardAuthorizer; KIP-504, KIP-290, KIP-679.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.protocol.acl import (
    ANYBODY,
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
from mpbroker.server.authorization.acl_hosts import matches_host
from mpbroker.server.request_context import RequestContext

_O = AclOperation


class Resource(NamedTuple):
    """Names a resource that permissions are about: a topic, a group or another."""

    type: ResourceType
    name: str


CLUSTER: Final = Resource(ResourceType.CLUSTER, CLUSTER_NAME)


class Authorizer(ABC):
    """Decides whether a request's sender has a permission.

    Each process that executes requests has one instance, which only one thread uses.
    An unexpected exception from a method is logged as a bug, and the request is
    answered with UNKNOWN_SERVER_ERROR, without access. Methods must return quickly:
    all requests of this process wait meanwhile.
    """

    def configure(self, settings: Mapping[str, str]) -> None:  # noqa: B027 - optional
        """Take the broker's settings, by key. The base class does nothing.

        Called once, before other methods.

        Raises:
            ValueError: a setting is wrong; the broker prints the message and ends.
        """

    @property
    def version(self) -> int | None:
        """A number that changes whenever decisions may change.

        None means that decisions must not be kept. The base class returns None.
        """
        return None

    @abstractmethod
    def authorize(
        self, context: RequestContext, operation: AclOperation, resource: Resource
    ) -> bool:
        """Return whether a request's sender may use an operation on a resource."""

    def authorize_by_resource_type(
        self,
        context: RequestContext,
        operation: AclOperation,
        resource_type: ResourceType,
    ) -> bool:
        """Return whether the sender has a permission for any resource of a type.

        One resource is enough. The broker asks this about WRITE to topics, before it
        gives a producer id to a sender without IDEMPOTENT_WRITE on the cluster. The
        base class returns False.

        Source: KIP-679.
        """
        return False

    def everybody_may(self, operation: AclOperation, resource: Resource) -> bool:
        """Return whether ``authorize`` allows all senders, until ``version`` changes.

        The broker asks this about topics that a request was just allowed to write to or
        read. The C code that executes requests without Python then keeps one permission
        for all senders, instead of one for each. The base class returns False.
        """
        return False

    # -- ACLs, for authorizers that have any -------------------------------------------

    def acls(self, wanted: AclFilter) -> Iterable[AclBinding]:
        """Return the access control entries that match a filter.

        The base class raises SECURITY_DISABLED.

        Raises:
            ApiError: SECURITY_DISABLED: the authorizer has no ACLs.
        """
        raise _keeps_none()

    def create_acls(self, context: RequestContext, acls: Sequence[AclBinding]) -> None:
        """Add all these access control entries. If there is an error, add none.

        The entries must be durable when this method returns. The base class raises
        SECURITY_DISABLED.

        Raises:
            ApiError: no entry was added. SECURITY_DISABLED: the authorizer has no ACLs.
        """
        raise _keeps_none()

    def delete_acls(
        self, context: RequestContext, filters: Sequence[AclFilter]
    ) -> Sequence[Sequence[AclBinding]]:
        """Remove the access control entries that match any of the filters.

        If there is an error, no entry is removed. The base class raises
        SECURITY_DISABLED.

        Returns:
            For each filter, the removed entries that it matches.

        Raises:
            ApiError: no entry was removed. SECURITY_DISABLED: the authorizer has no
                ACLs.
        """
        raise _keeps_none()

    def delete_acls_once(
        self,
        context: RequestContext,
        filters: Sequence[AclFilter],
        request_id: bytes,
    ) -> Sequence[Sequence[AclBinding]]:
        """Remove entries like ``delete_acls``, for a request that may be repeated.

        If the process dies before it has answered, another process calls this method
        again, with the same ``request_id`` of 16 bytes. Then the method should return
        the entries that the first call removed. The base class calls ``delete_acls``,
        so its second call finds nothing to remove, and returns no entries.
        """
        return self.delete_acls(context, filters)


def _keeps_none() -> ApiError:
    return ApiError(
        ErrorCode.SECURITY_DISABLED, "The broker's authorizer keeps no ACLs."
    )


class AclStore(Protocol):
    """Keeps the access control entries. The broker's store is in the metadata log."""

    @property
    def version(self) -> int:
        """A number that changes with every change of the entries."""

    def __iter__(self) -> Iterator[AclBinding]: ...

    def create(self, acls: Sequence[AclBinding]) -> None: ...

    def delete(
        self, filters: Sequence[AclFilter], request_id: bytes | None = None, /
    ) -> list[list[AclBinding]]: ...


# The operations whose ALLOW entries allow an operation: READ implies DESCRIBE. A DENY
# entry denies only its own operation, or all with ALL.
_IMPLIED_BY: Final = {
    operation: frozenset({operation, _O.ALL}) for operation in AclOperation
} | {
    _O.DESCRIBE: frozenset(
        {_O.DESCRIBE, _O.READ, _O.WRITE, _O.DELETE, _O.ALTER, _O.ALL}
    ),
    _O.DESCRIBE_CONFIGS: frozenset({_O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS, _O.ALL}),
}


class _Entries:
    """Finds the entries about one type of resource by the resource's name."""

    __slots__ = ("_lengths", "_literal", "_prefixed")

    def __init__(self, acls: Iterable[AclBinding]) -> None:
        self._literal: dict[str, list[AclBinding]] = {}
        self._prefixed: dict[str, list[AclBinding]] = {}
        for acl in acls:
            is_literal = acl.pattern_type is PatternType.LITERAL
            by_name = self._literal if is_literal else self._prefixed
            by_name.setdefault(acl.resource_name, []).append(acl)
        # Prefixes are many, but their lengths are few: a name is cut once per length.
        self._lengths = sorted({len(name) for name in self._prefixed})

    def of(self, name: str) -> Iterator[AclBinding]:
        """Yield all access control entries about the resource with a name."""
        yield from self._literal.get(name, ())
        if name != WILDCARD:
            yield from self._literal.get(WILDCARD, ())
        for length in self._lengths:
            if length > len(name):
                return
            yield from self._prefixed.get(name[:length], ())


_NO_ENTRIES: Final = _Entries(())


class StandardAuthorizer(Authorizer):
    """Decides by super.users, and by access control entries in the metadata log.

    Args:
        acls: the entries.
        super_users: principals that may do everything: ``User:alice``.
        allow_everyone_if_no_acl_found: whether everything is allowed on a resource
            that no entry is about (allow.everyone.if.no.acl.found).
    """

    def __init__(
        self,
        acls: AclStore,
        super_users: Iterable[str] = (),
        *,
        allow_everyone_if_no_acl_found: bool = False,
    ) -> None:
        self._acls = acls
        self._super_users = frozenset(super_users)
        self._default = allow_everyone_if_no_acl_found
        self._indexed = -1
        self._entries: dict[ResourceType, _Entries] = {}

    @property
    def version(self) -> int:
        return self._acls.version

    def authorize(
        self, context: RequestContext, operation: AclOperation, resource: Resource
    ) -> bool:
        principal, host = context.principal, context.host
        if principal in self._super_users:
            return True
        enough = _IMPLIED_BY[operation]
        found = allowed = False
        for acl in self._of(resource):
            found = True
            if acl.principal not in (principal, ANYBODY) or not matches_host(
                acl.host, host
            ):
                continue
            if acl.permission_type is AclPermissionType.DENY:
                if acl.operation in (operation, _O.ALL):
                    return False
            elif acl.operation in enough:
                allowed = True  # continue: a later entry may deny
        return allowed if found else self._default

    def everybody_may(self, operation: AclOperation, resource: Resource) -> bool:
        enough = _IMPLIED_BY[operation]
        found = allowed = False
        for acl in self._of(resource):
            found = True
            if acl.permission_type is AclPermissionType.DENY:
                if acl.operation in (operation, _O.ALL):
                    return False
            elif (
                acl.operation in enough
                and acl.principal == ANYBODY
                and acl.host == WILDCARD
            ):
                allowed = True
        return allowed if found else self._default

    def authorize_by_resource_type(
        self,
        context: RequestContext,
        operation: AclOperation,
        resource_type: ResourceType,
    ) -> bool:
        principal, host = context.principal, context.host
        if principal in self._super_users:
            return True
        mine = [
            acl
            for acl in self._acls
            if acl.resource_type is resource_type
            and acl.principal in (principal, ANYBODY)
            and matches_host(acl.host, host)
            and acl.operation in (operation, _O.ALL)
        ]
        denied = {
            (acl.pattern_type, acl.resource_name)
            for acl in mine
            if acl.permission_type is AclPermissionType.DENY
        }
        if (PatternType.LITERAL, WILDCARD) in denied:
            return False
        if self._default and not self._names_all(resource_type):
            # Some name of this type is in no entry, and so it is allowed.
            return True
        return any(
            acl.permission_type is AclPermissionType.ALLOW
            and not _is_denied(acl, denied)
            for acl in mine
        )

    def acls(self, wanted: AclFilter) -> Iterable[AclBinding]:
        return [acl for acl in self._acls if wanted.matches(acl)]

    def create_acls(self, context: RequestContext, acls: Sequence[AclBinding]) -> None:
        self._acls.create(acls)

    def delete_acls(
        self, context: RequestContext, filters: Sequence[AclFilter]
    ) -> list[list[AclBinding]]:
        return self._acls.delete(filters)

    def delete_acls_once(
        self,
        context: RequestContext,
        filters: Sequence[AclFilter],
        request_id: bytes,
    ) -> list[list[AclBinding]]:
        return self._acls.delete(filters, request_id)

    def _names_all(self, resource_type: ResourceType) -> bool:
        """Return whether any entry is about all resources of a type (the name "*")."""
        return any(
            acl.resource_type is resource_type
            and acl.pattern_type is PatternType.LITERAL
            and acl.resource_name == WILDCARD
            for acl in self._acls
        )

    def _of(self, resource: Resource) -> Iterator[AclBinding]:
        if self._indexed != self._acls.version:
            by_type: dict[ResourceType, list[AclBinding]] = {}
            for acl in self._acls:
                by_type.setdefault(acl.resource_type, []).append(acl)
            self._entries = {kind: _Entries(acls) for kind, acls in by_type.items()}
            self._indexed = self._acls.version
        return self._entries.get(resource.type, _NO_ENTRIES).of(resource.name)


def _is_denied(acl: AclBinding, denied: set[tuple[PatternType, str]]) -> bool:
    """Return whether DENY entries deny all resources that an ALLOW entry allows.

    Args:
        acl: the ALLOW entry.
        denied: pattern type and resource name of the DENY entries.
    """
    name = acl.resource_name
    if acl.pattern_type is PatternType.LITERAL:
        if name == WILDCARD:
            return False  # some name is always left that no entry denies
        if (PatternType.LITERAL, name) in denied:
            return True
    return any(
        (PatternType.PREFIXED, name[:length]) in denied
        for length in range(1, len(name) + 1)
    )
