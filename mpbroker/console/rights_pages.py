"""Show and change ACLs, SCRAM users and client quotas.

Each view and each change is a request of a Kafka client; the broker decides whether the
user may make it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import IntEnum
from http import HTTPStatus
from typing import Any, Final, TypeVar

from mpbroker.client.admin import acl_admin, quota_admin, scram_admin
from mpbroker.client.cluster import Cluster
from mpbroker.console.page_server import HttpError
from mpbroker.console.request_fields import number_of, text_of
from mpbroker.console.sessions import Session
from mpbroker.protocol.acl import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)

PAGE_ROWS: Final = 100
ITERATIONS: Final = 4096  # Kafka's minimum, and the default of its tools
DEFAULT: Final = "<default>"  # as Kafka's tools show it
ENTITIES: Final = ("user", "client-id", "ip")
QUOTAS: Final = (
    "producer_byte_rate",
    "consumer_byte_rate",
    "request_percentage",
    "controller_mutation_rate",
    "connection_creation_rate",
)
_Document = Mapping[str, Any]
_E = TypeVar("_E", bound=IntEnum)
_Key = tuple[str, str, str, str, str]


def list_acls(
    session: Session, match: str, start: int, *, is_fresh: bool = False
) -> dict[str, Any]:
    """Return a page of the ACLs: a row for each principal, resource and host.

    A row has the permissions (ALLOW, DENY or both) of each operation.

    Args:
        session: the user's session.
        match: a part of principals or resource names; case does not count.
        start: the number of rows before the page.
        is_fresh: whether to ask the broker, even if the cached list is recent.
    """

    def ask(cluster: Cluster) -> list[dict[str, Any]]:
        rows: dict[_Key, dict[str, Any]] = {}
        for acl in acl_admin.describe_acls(cluster, AclFilter()):
            key = (
                acl.principal,
                acl.resource_type.name,
                acl.resource_name,
                acl.pattern_type.name,
                acl.host,
            )
            row = rows.setdefault(
                key,
                {
                    "principal": acl.principal,
                    "type": acl.resource_type.name,
                    "name": acl.resource_name,
                    "pattern": acl.pattern_type.name,
                    "host": acl.host,
                    "operations": {},
                },
            )
            # If an operation has both, the broker denies it.
            found = row["operations"].get(acl.operation.name, ())
            row["operations"][acl.operation.name] = sorted(
                {*found, acl.permission_type.name}, reverse=True
            )
        return [rows[key] for key in sorted(rows)]

    return _page(session, "acls", ask, ("principal", "name"), match, start, is_fresh)


def list_users(
    session: Session, match: str, start: int, *, is_fresh: bool = False
) -> dict[str, Any]:
    """Return a page of the users with SCRAM credentials: mechanisms and iterations."""

    def ask(cluster: Cluster) -> list[dict[str, Any]]:
        return [
            {"name": each.name, "mechanisms": each.mechanisms}
            for each in scram_admin.list_users(cluster)
        ]

    return _page(session, "users", ask, ("name",), match, start, is_fresh)


def list_quotas(
    session: Session, match: str, start: int, *, is_fresh: bool = False
) -> dict[str, Any]:
    """Return a page of the entities (users, client ids, addresses) that have quotas.

    The name "<default>" stands for all entities of a kind without quotas of their own.
    """

    def ask(cluster: Cluster) -> list[dict[str, Any]]:
        rows = [
            {
                "entity": {
                    kind: DEFAULT if name is None else name
                    for kind, name in each.entity.items()
                },
                "quotas": each.values,
                "shown": ", ".join(
                    f"{kind} {DEFAULT if name is None else name}"
                    for kind, name in sorted(each.entity.items(), reverse=True)
                ),
            }
            for each in quota_admin.describe_quotas(cluster, {})
        ]
        return sorted(rows, key=lambda row: str(row["shown"]))

    return _page(session, "quotas", ask, ("shown",), match, start, is_fresh)


def _page(
    session: Session,
    what: str,
    ask: Callable[[Cluster], list[dict[str, Any]]],
    columns: tuple[str, ...],
    match: str,
    start: int,
    is_fresh: bool,
) -> dict[str, Any]:
    part = match.casefold()
    found = [
        row
        for row in session.remembered(what, ask, is_fresh=is_fresh)
        if any(part in row[name].casefold() for name in columns)
    ]
    return {
        "total": len(found),
        "start": start,
        "rows": found[start : start + PAGE_ROWS],
    }


# -- changes ---------------------------------------------------------------------------


def create_acl(cluster: Cluster, given: _Document) -> Any:
    acl_admin.create_acls(cluster, [_acl(given)])
    return {}


def delete_acl(cluster: Cluster, given: _Document) -> Any:
    """Delete exactly one ACL.

    Raises:
        HttpError: there is no such ACL.
    """
    if not acl_admin.delete_acls(cluster, AclFilter(*_acl(given))):
        raise HttpError(HTTPStatus.NOT_FOUND, "there is no such ACL")
    return {}


def _acl(given: _Document) -> AclBinding:
    found = AclBinding(
        _code(given, "type", ResourceType),
        _needed(given, "name"),
        _code(given, "pattern", PatternType),
        _needed(given, "principal"),
        _needed(given, "host"),
        _code(given, "operation", AclOperation),
        _code(given, "permission", AclPermissionType),
    )
    # A filter takes more codes, which would delete other ACLs than the one shown.
    if found.pattern_type not in (PatternType.LITERAL, PatternType.PREFIXED):
        raise HttpError(HTTPStatus.BAD_REQUEST, "pattern is not LITERAL or PREFIXED")
    return found


def _code(given: _Document, name: str, codes: type[_E]) -> _E:
    text = text_of(given, name)
    if text in codes.__members__ and text not in ("UNKNOWN", "ANY"):
        return codes[text]
    raise HttpError(HTTPStatus.BAD_REQUEST, f"{name}: there is no {text!r:.40}")


def _needed(given: _Document, name: str) -> str:
    text = text_of(given, name)
    if not text:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} is empty")
    return text


def set_password(cluster: Cluster, given: _Document) -> Any:
    scram_admin.set_password(
        cluster,
        _needed(given, "user"),
        _mechanism(given),
        _needed(given, "password"),
        max(ITERATIONS, min(number_of(given, "iterations", ITERATIONS), 16384)),
    )
    return {}


def remove_password(cluster: Cluster, given: _Document) -> Any:
    scram_admin.remove_credential(cluster, _needed(given, "user"), _mechanism(given))
    return {}


def _mechanism(given: _Document) -> str:
    found = text_of(given, "mechanism")
    if found not in scram_admin.MECHANISMS:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"mechanism: there is no {found!r:.40}")
    return found


def set_quota(cluster: Cluster, given: _Document) -> Any:
    """Set one quota of a user, client id or address; without a value, remove it."""
    key = text_of(given, "key")
    if key not in QUOTAS:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"key: there is no {key!r:.40}")
    entity: dict[str, str | None] = {}
    for kind in ENTITIES:
        name = text_of(given, kind)
        if name:
            entity[kind] = None if name == DEFAULT else name
    if not entity:
        raise HttpError(
            HTTPStatus.BAD_REQUEST, "name a user, a client id or an address"
        )
    value = given.get("value")
    if value is not None:
        try:
            value = float(str(value)[:40])
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise HttpError(HTTPStatus.BAD_REQUEST, "value is not a number above 0")
    quota_admin.alter_quotas(cluster, entity, {key: value})
    return {}


RIGHTS_CHANGES: Final[Mapping[str, Callable[[Cluster, _Document], Any]]] = {
    "/api/acls/create": create_acl,
    "/api/acls/delete": delete_acl,
    "/api/users/set": set_password,
    "/api/users/delete": remove_password,
    "/api/quotas/set": set_quota,
}
