"""Client quotas as the metadata log has them: one record a value of an entity.

An entity names a user, a client id, both, or an IP address; None instead of a name is
the default for all that have no quota of their own.

Source: Apache Kafka, ClientQuotaRecord.json; KIP-546.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

USER: Final = "user"
CLIENT_ID: Final = "client-id"
IP: Final = "ip"

# (type, name) pairs in the order of their types, which makes it one thing to look up.
QuotaEntity = tuple[tuple[str, str | None], ...]


def quota_entity(parts: Mapping[str, str | None]) -> QuotaEntity:
    """Return the entity of these names by type; None is the default's name."""
    return tuple(sorted(parts.items()))


def client_quota_record(
    entity: QuotaEntity, key: str, value: float | None
) -> dict[str, Any]:
    """One quota of an entity; None takes it away."""
    return {
        "type": "ClientQuotaRecord",
        "entity": [{"entityType": kind, "entityName": name} for kind, name in entity],
        "key": key,
        "value": 0.0 if value is None else value,
        "remove": value is None,
    }


class ClientQuotasImage:
    """All quotas that are set.

    Attributes:
        entities: values by key, by entity; only entities that have any.
        changes: +1 with every record, for whoever keeps what follows from them.
    """

    def __init__(self) -> None:
        self.entities: dict[QuotaEntity, dict[str, float]] = {}
        self.changes = 0

    def __len__(self) -> int:
        """How many values there are."""
        return sum(len(values) for values in self.entities.values())

    def values(self, parts: Mapping[str, str | None]) -> Mapping[str, float]:
        """Return what is set on exactly this entity."""
        return self.entities.get(quota_entity(parts), {})

    def by_name(self, kind: str, key: str) -> dict[str | None, float]:
        """Return one key's values of the entities that are of one type and no other."""
        return {
            entity[0][1]: values[key]
            for entity, values in self.entities.items()
            if len(entity) == 1 and entity[0][0] == kind and key in values
        }

    def replay(self, record: Mapping[str, Any]) -> None:
        """Apply one record.

        Raises:
            KeyError, TypeError, ValueError: it has not the shape of one.
        """
        entity = quota_entity(
            {
                str(part["entityType"]): (
                    None if part["entityName"] is None else str(part["entityName"])
                )
                for part in record["entity"]
            }
        )
        key = str(record["key"])
        self.changes += 1
        if not record["remove"]:
            self.entities.setdefault(entity, {})[key] = float(record["value"])
            return
        values = self.entities.get(entity, {})
        values.pop(key, None)
        if not values:
            self.entities.pop(entity, None)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield records that replay to this image."""
        for entity, values in self.entities.items():
            for key, value in values.items():
                yield client_quota_record(entity, key, value)


def described(entity: Iterable[tuple[str, str | None]]) -> str:
    """Name an entity for people."""
    return ", ".join(
        f"{kind} {'<default>' if name is None else name}" for kind, name in entity
    )
