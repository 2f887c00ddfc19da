"""AlterClientQuotas: set and remove quotas of users, client ids and IP addresses.

Source: Kafka protocol guide, "AlterClientQuotas"; KIP-546; ClientQuotaControlManager.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

from mpbroker.metadata.metadata_image import MetadataImage
from mpbroker.metadata.quota_records import (
    CLIENT_ID,
    IP,
    USER,
    QuotaEntity,
    client_quota_record,
    described,
    quota_entity,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    EntityData,
    EntryData,
    EntryResult,
    OpData,
)
from mpbroker.server.errors import invalid_request
from mpbroker.server.handler_context import HandlerContext

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
REQUEST_PERCENTAGE: Final = "request_percentage"
CONTROLLER_MUTATION_RATE: Final = "controller_mutation_rate"
CONNECTION_CREATION_RATE: Final = "connection_creation_rate"

_LONG: Final = "LONG"
_INT: Final = "INT"
_DOUBLE: Final = "DOUBLE"
_LARGEST: Final = {_LONG: 2.0**63 - 1, _INT: 2.0**31 - 1, _DOUBLE: math.inf}
_CLIENT_KEYS: Final = {
    PRODUCER_BYTE_RATE: _LONG,
    CONSUMER_BYTE_RATE: _LONG,
    REQUEST_PERCENTAGE: _DOUBLE,
    CONTROLLER_MUTATION_RATE: _DOUBLE,
}
_IP_KEYS: Final = {CONNECTION_CREATION_RATE: _INT}
_EPSILON: Final = 1e-6

Records = Sequence[dict[str, Any]]


def handle_alter_client_quotas(
    request: AlterClientQuotasRequest, context: HandlerContext
) -> AlterClientQuotasResponse:
    """Change the quotas of all entities whose entries are valid; answer each entry.

    An entry with a mistake gets an error and changes nothing. If the metadata log
    cannot be written, nothing is changed, and the valid entries get
    KAFKA_STORAGE_ERROR.
    """
    results: list[EntryResult] = []
    wanted: list[tuple[QuotaEntity, dict[str, float | None]]] = []
    named = Counter(_named(entry.entity) for entry in request.entries)
    unknown_hosts = context.broker.unknown_hosts(_addresses(request.entries))
    for entry in request.entries:
        result = EntryResult(
            error_code=ErrorCode.NONE,
            error_message=None,
            entity=[
                EntityData(entity_type=part.entity_type, entity_name=part.entity_name)
                for part in entry.entity
            ],
        )
        results.append(result)
        try:
            entity = _entity(entry.entity, unknown_hosts)
            if named[_named(entry.entity)] > 1:
                raise invalid_request(f"Ignoring duplicate entity {described(entity)}")
            wanted.append((entity, _changes(entity, entry.ops)))
        except ApiError as error:
            result.error_code, result.error_message = error.error_code, str(error)

    def records(image: MetadataImage) -> Records:
        quotas = image.client_quotas.entities
        return [
            client_quota_record(entity, key, value)
            for entity, changes in wanted
            for key, value in changes.items()
            if quotas.get(entity, {}).get(key) != value
        ]

    if wanted and not request.validate_only:
        try:
            context.broker.registry.change(records)
        except ApiError as error:
            for result in results:
                if result.error_code == ErrorCode.NONE:
                    result.error_code, result.error_message = (
                        error.error_code,
                        str(error),
                    )
    return AlterClientQuotasResponse(entries=results)


def _named(entity: Iterable[EntityData]) -> tuple[tuple[str, str | None], ...]:
    pairs = ((part.entity_type, part.entity_name) for part in entity)
    return tuple(sorted(pairs, key=repr))


def _addresses(entries: Iterable[EntryData]) -> set[str]:
    """Return the texts that entries name as IP addresses, or as hosts."""
    return {
        part.entity_name
        for entry in entries
        for part in entry.entity
        if part.entity_type == IP and part.entity_name
    }


def _entity(parts: Sequence[EntityData], unknown_hosts: Container[str]) -> QuotaEntity:
    """Return the entity (user, client id or IP address) whose quotas an entry changes.

    Args:
        parts: types and names, as in the request.
        unknown_hosts: texts that are neither an IP address nor a known host name.

    Raises:
        ApiError: INVALID_REQUEST: the parts are not those of a valid entity.
    """
    if not parts:
        raise invalid_request("Invalid empty client quota entity")
    names: dict[str, str | None] = {}
    for part in parts:
        kind, name = part.entity_type, part.entity_name
        if kind in names:
            raise invalid_request(
                f"Invalid client quota entity, duplicate entity entry {kind}"
            )
        if kind not in (USER, CLIENT_ID, IP):
            raise invalid_request(f"Unhandled client quota entity type: {kind}")
        if name == "":
            raise invalid_request(f"Empty {kind} not supported")
        names[kind] = name
    if IP in names and len(names) > 1:
        raise invalid_request(
            "Invalid quota entity combination, IP entity should not be used with User"
            " or ClientId"
        )
    address = names.get(IP)
    if address is not None and address in unknown_hosts:
        raise invalid_request(f"{address} is not a valid IP or resolvable host.")
    return quota_entity(names)


def _changes(
    entity: QuotaEntity, operations: Iterable[OpData]
) -> dict[str, float | None]:
    """Return the new value of each key of an entry; None removes the quota.

    Raises:
        ApiError: INVALID_REQUEST: a key is named twice, or the entity cannot have the
            key or the value.
    """
    keys = _IP_KEYS if entity[0][0] == IP else _CLIENT_KEYS
    changes: dict[str, float | None] = {}
    for operation in operations:
        key = operation.key
        if key in changes:
            raise invalid_request(
                f"Duplicate quota key {key} not updating quota for this entity"
                f" {described(entity)}"
            )
        if not operation.remove:
            _check(keys, key, operation.value)
        changes[key] = None if operation.remove else operation.value
    return changes


def _check(keys: Mapping[str, str], key: str, value: float) -> None:
    if key not in keys:
        raise invalid_request(
            f"Invalid configuration key {key}; this entity may have"
            f" {', '.join(sorted(keys))}"
        )
    # 0 blocks all connections from an address, which is useful; for rates it is not.
    if not (value > 0 or (value == 0 and key == CONNECTION_CREATION_RATE)):
        raise invalid_request(f"Quota {key} must be greater than 0, not {value:g}")
    kind = keys[key]
    if value > _LARGEST[kind] or math.isinf(value):
        raise invalid_request(
            f"Proposed value for {key} is too large for a {kind}: {value:g}"
        )
    if kind != _DOUBLE and abs(value - round(value)) > _EPSILON:
        raise invalid_request(f"{key} cannot be a fractional value, as {value:g} is")
