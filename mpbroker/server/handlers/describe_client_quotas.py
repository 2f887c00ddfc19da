"""DescribeClientQuotas: list the quotas of all entities that a filter matches.

Source: Kafka protocol guide, "DescribeClientQuotas"; KIP-546; ClientQuotasImage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from mpbroker.metadata.quota_records import (
    CLIENT_ID,
    IP,
    USER,
    QuotaEntity,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.describe_client_quotas import (
    ComponentData,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
    EntityData,
    EntryData,
    ValueData,
)
from mpbroker.server.errors import invalid_request
from mpbroker.server.handler_context import HandlerContext

_EXACT: Final = 0
_DEFAULT: Final = 1
_SPECIFIED: Final = 2  # matches any name, and the default
_MATCHES: Final = {
    _EXACT: "MATCH_TYPE_EXACT",
    _DEFAULT: "MATCH_TYPE_DEFAULT",
    _SPECIFIED: "MATCH_TYPE_SPECIFIED",
}
_TYPES: Final = (USER, CLIENT_ID, IP)


class _Filter:
    """Keeps the types and names that an entity must have to match a request's filter.

    Args:
        components: the parts of the filter.
        strict: whether an entity that has further types does not match.

    Raises:
        ApiError: the filter is invalid: INVALID_REQUEST, or UNSUPPORTED_VERSION if it
            has an unknown type of entity.
    """

    def __init__(self, components: Iterable[ComponentData], *, strict: bool) -> None:
        self._names: dict[str, str | None] = {}
        self._types: set[str] = set()
        self._strict = strict
        for component in components:
            self._add(component)
        named = self._names.keys() | self._types
        if IP in named and len(named) > 1:
            raise invalid_request(
                "Invalid entity filter component combination. IP filter component"
                " should not be used with user or clientId filter component.",
            )
        self._size = len(named)

    def _add(self, component: ComponentData) -> None:
        kind, match, name = (
            component.entity_type,
            component.match_type,
            component.match,
        )
        if not kind:
            raise invalid_request("Invalid empty entity type.")
        if kind in self._names or kind in self._types:
            raise invalid_request(
                f"Entity type {kind} cannot appear more than once in the filter.",
            )
        if kind not in _TYPES:
            raise ApiError(
                ErrorCode.UNSUPPORTED_VERSION, f"Unsupported entity type {kind}"
            )
        if match not in _MATCHES:
            raise invalid_request(f"Unknown match type {match}")
        if match == _EXACT and name is None:
            raise invalid_request(
                "Request specified MATCH_TYPE_EXACT, but set match string to null.",
            )
        if match != _EXACT and name is not None:
            raise invalid_request(
                f"Request specified {_MATCHES[match]}, but also specified a match"
                " string.",
            )
        if match == _SPECIFIED:
            self._types.add(kind)
        else:
            self._names[kind] = name

    def matches(self, entity: QuotaEntity) -> bool:
        if self._strict and len(entity) != self._size:
            return False
        parts = dict(entity)
        return self._types <= parts.keys() and all(
            kind in parts and parts[kind] == name for kind, name in self._names.items()
        )


def handle_describe_client_quotas(
    request: DescribeClientQuotasRequest, context: HandlerContext
) -> DescribeClientQuotasResponse:
    """Answer with the quotas of all matching entities, or with the filter's error."""
    try:
        wanted = _Filter(request.components, strict=request.strict)
    except ApiError as error:
        return DescribeClientQuotasResponse(
            error_code=error.error_code, error_message=str(error), entries=None
        )
    return DescribeClientQuotasResponse(
        error_code=ErrorCode.NONE,
        error_message=None,
        entries=[
            _entry(entity, values)
            for entity, values in context.broker.registry.client_quotas.entities.items()
            if wanted.matches(entity)
        ],
    )


def _entry(entity: QuotaEntity, values: Mapping[str, float]) -> EntryData:
    return EntryData(
        entity=[
            EntityData(entity_type=kind, entity_name=name) for kind, name in entity
        ],
        values=[ValueData(key=key, value=value) for key, value in values.items()],
    )
