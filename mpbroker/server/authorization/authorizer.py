"""Who may do what: the authorizer's interface, and the one that goes by ACLs.

An authorizer of one's own is a class in Python that ``authorizer.class.name`` names;
each process that executes requests makes one. It imports what it needs from
`mpbroker.extensions`; docs/security.md has an example.

Source: Kafka's Authorizer, StandardAuthorizer; KIP-504, KIP-290, KIP-679.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

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
from mpbroker.server.request_context import RequestContext

_O = AclOperation


class Resource(NamedTuple):
    """One protected thing."""

    type: ResourceType
    name: str


CLUSTER: Final = Resource(ResourceType.CLUSTER, CLUSTER_NAME)


class Authorizer(ABC):
    """Decides who may do what. One in each process; not for several threads.

    What a method raises is a bug: it is logged, and the request answered with
    UNKNOWN_SERVER_ERROR, so nobody gets in by it. No method may wait for long: all
    requests that this process executes wait meanwhile.
    """

    def configure(self, settings: Mapping[str, str]) -> None:  # noqa: B027 - may be
        """Take the broker's settings, by key, before anything is asked.

        Raises:
            ValueError: they are wrong; the message becomes the broker's last words.
        """

    @property
    def version(self) -> int | None:
        """Changes whenever a decision may; None: decisions must not be kept."""
        return None

    @abstractmethod
    def authorize(
        self, context: RequestContext, operation: AclOperation, resource: Resource
    ) -> bool:
        """Whether a request's sender may do something with a resource."""

    def authorize_by_resource_type(
        self,
        context: RequestContext,
        operation: AclOperation,
        resource_type: ResourceType,
    ) -> bool:
        """Whether there is any resource of a kind that the sender may do it with.

        Who may write to some topic may get a producer id. The base class says no, and
        leaves it to IDEMPOTENT_WRITE on the cluster.
        """
        return False

    def everybody_may(self, operation: AclOperation, resource: Resource) -> bool:
        """Whether ``authorize`` says yes whoever asks, until ``version`` changes.

        Asked about topics that a request was let write to or read; what is true of
        everybody then takes one entry, and not one for each who asks.
        """
        return False

    # -- its ACLs, if it has any -------------------------------------------------------

    def acls(self, wanted: AclFilter) -> Iterable[AclBinding]:
        """Return entries that pass a filter.

        Raises:
            ApiError: SECURITY_DISABLED; it keeps none.
        """
        raise _keeps_none()

    def create_acls(self, context: RequestContext, acls: Sequence[AclBinding]) -> None:
        """Add entries, all or none; durable when this returns.

        Raises:
            ApiError: SECURITY_DISABLED, or why it cannot.
        """
        raise _keeps_none()

    def delete_acls(
        self, context: RequestContext, filters: Sequence[AclFilter]
    ) -> Sequence[Sequence[AclBinding]]:
        """Take away what passes any filter, all or nothing; say what, for each.

        Raises:
            ApiError: SECURITY_DISABLED, or why it cannot.
        """
        raise _keeps_none()

    def delete_acls_once(
        self,
        context: RequestContext,
        filters: Sequence[AclFilter],
        request_id: bytes,
    ) -> Sequence[Sequence[AclBinding]]:
        """As ``delete_acls``, for a request that may be executed again.

        Its process may die before the answer; whoever is asked in its place, with the
        same id of 16 bytes, ought to say again what was taken away. The base class
        says what is taken away then, which is nothing.
        """
        return self.delete_acls(context, filters)


def _keeps_none() -> ApiError:
    return ApiError(
        ErrorCode.SECURITY_DISABLED, "The broker's authorizer keeps no ACLs."
    )


class AclStore(Protocol):
    """Where entries are kept; storage.acl_records has the one of the broker."""

    @property
    def version(self) -> int:
        """Changes with every change of them."""

    def __iter__(self) -> Iterator[AclBinding]: ...

    def create(self, acls: Sequence[AclBinding]) -> None: ...

    def delete(
        self, filters: Sequence[AclFilter], request_id: bytes | None = None, /
    ) -> list[list[AclBinding]]: ...


# Allowed with an operation are those that it implies: whoever may read may describe.
# What is denied is that operation alone.
_IMPLIED_BY: Final = {
    operation: frozenset({operation, _O.ALL}) for operation in AclOperation
} | {
    _O.DESCRIBE: frozenset(
        {_O.DESCRIBE, _O.READ, _O.WRITE, _O.DELETE, _O.ALTER, _O.ALL}
    ),
    _O.DESCRIBE_CONFIGS: frozenset({_O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS, _O.ALL}),
}


class _Entries:
    """The entries of one kind of resource, findable by the name of one of it."""

    __slots__ = ("_lengths", "_literal", "_prefixed")

    def __init__(self, acls: Iterable[AclBinding]) -> None:
        self._literal: dict[str, list[AclBinding]] = {}
        self._prefixed: dict[str, list[AclBinding]] = {}
        for acl in acls:
            is_literal = acl.pattern_type is PatternType.LITERAL
            by_name = self._literal if is_literal else self._prefixed
            by_name.setdefault(acl.resource_name, []).append(acl)
        # Few: however many prefixes there are, a name is cut once a length.
        self._lengths = sorted({len(name) for name in self._prefixed})

    def of(self, name: str) -> Iterator[AclBinding]:
        """All that concern a resource."""
        yield from self._literal.get(name, ())
        if name != WILDCARD:
            yield from self._literal.get(WILDCARD, ())
        for length in self._lengths:
            if length > len(name):
                return
            yield from self._prefixed.get(name[:length], ())


_NO_ENTRIES: Final = _Entries(())


class StandardAuthorizer(Authorizer):
    """Goes by super.users, and by access control entries in the metadata log."""

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
            if acl.principal not in (principal, ANYBODY) or acl.host not in (
                host,
                WILDCARD,
            ):
                continue
            if acl.permission_type is AclPermissionType.DENY:
                if acl.operation in (operation, _O.ALL):
                    return False
            elif acl.operation in enough:
                allowed = True  # and yet a later entry may deny it
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
            and acl.host in (host, WILDCARD)
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
            # What no entry names is open, and there are names without end.
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
        """Whether some entry is about every resource of a kind."""
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
    """Whether all that an entry allows is denied by others."""
    name = acl.resource_name
    if acl.pattern_type is PatternType.LITERAL:
        if name == WILDCARD:
            return False  # there is always a name that nobody has denied
        if (PatternType.LITERAL, name) in denied:
            return True
    return any(
        (PatternType.PREFIXED, name[:length]) in denied
        for length in range(1, len(name) + 1)
    )
