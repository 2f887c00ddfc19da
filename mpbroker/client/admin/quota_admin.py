"""Describe and alter the client quotas of a `Cluster` (KIP-546)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from mpbroker.client.cluster import Cluster
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import alter_client_quotas as alter
from mpbroker.protocol.messages import describe_client_quotas as describe

_EXACT: Final = 0
_DEFAULT: Final = 1

Entity = Mapping[str, str | None]
"""Names by entity type ("user", "client-id", "ip"); None names a type's default."""


class QuotaDescription(NamedTuple):
    """The quotas of one entity.

    Attributes:
        entity: the entity's names, by type ("user", "client-id", "ip"); the name None
            stands for the type's default.
        values: the quotas' values, by key, such as "producer_byte_rate".
    """

    entity: dict[str, str | None]
    values: dict[str, float]


def describe_quotas(cluster: Cluster, entity: Entity) -> list[QuotaDescription]:
    """Return the quotas of each entity that has at least the given names.

    An entity may have a further name, such as a client-id beside the given user.

    Raises:
        ApiError: the broker refused.
    """
    response = cluster.any_broker().request(
        describe.DescribeClientQuotasRequest(
            components=[
                describe.ComponentData(
                    entity_type=kind,
                    match_type=_DEFAULT if name is None else _EXACT,
                    match=name,
                )
                for kind, name in entity.items()
            ],
            strict=False,
        ),
        describe.DescribeClientQuotasResponse,
    )
    _check(response.error_code, response.error_message)
    return [
        QuotaDescription(
            {part.entity_type: part.entity_name for part in entry.entity},
            {value.key: value.value for value in entry.values},
        )
        for entry in response.entries or []
    ]


def alter_quotas(
    cluster: Cluster, entity: Entity, changes: Mapping[str, float | None]
) -> None:
    """Set quotas of one entity; the value None removes a quota.

    Raises:
        ApiError: the broker refused; nothing is changed.
    """
    entry = alter.EntryData(
        entity=[
            alter.EntityData(entity_type=kind, entity_name=name)
            for kind, name in entity.items()
        ],
        ops=[
            alter.OpData(key=key, value=value or 0.0, remove=value is None)
            for key, value in changes.items()
        ],
    )
    response = cluster.controller().request(
        alter.AlterClientQuotasRequest(entries=[entry], validate_only=False),
        alter.AlterClientQuotasResponse,
    )
    for result in response.entries:
        _check(result.error_code, result.error_message)


def _check(code: int, message: str | None) -> None:
    if code:
        error = ErrorCode(code)
        raise ApiError(error, message or error.name)
