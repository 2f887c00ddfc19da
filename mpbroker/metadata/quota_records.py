"""ClientQuotasImage: the client quotas that the records of the metadata log set.

An entity is a user, a client id, a user with a client id, or an IP address. Each record
sets one value of an entity. An entity with None in the place of a name is the default
for all names that have no quota of their own.

Source: Apache Kafka, ClientQuotaRecord.json; KIP-546.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

USER: Final = "user"
CLIENT_ID: Final = "client-id"
IP: Final = "ip"

# (type, name) pairs, sorted by type, so that equal entities are equal keys.
QuotaEntity = tuple[tuple[str, str | None], ...]


def quota_entity(parts: Mapping[str, str | None]) -> QuotaEntity:
    """Return the key of an entity (user, client id, IP), given its names by type.

    A name of None is the default entity of the type.
    """
    return tuple(sorted(parts.items()))


def client_quota_record(
    entity: QuotaEntity, key: str, value: float | None
) -> dict[str, Any]:
    """Make the record that sets one quota of an entity (user, client id or IP).

    A value of None removes the quota.
    """
    return {
        "type": "ClientQuotaRecord",
        "entity": [{"entityType": kind, "entityName": name} for kind, name in entity],
        "key": key,
        "value": 0.0 if value is None else value,
        "remove": value is None,
    }


class ClientQuotasImage:
    """All client quotas that are set.

    Attributes:
        entities: by entity, its values by key; only entities that have quotas.
        changes: the number of records replayed, so that caches see a change.
    """

    def __init__(self) -> None:
        self.entities: dict[QuotaEntity, dict[str, float]] = {}
        self.changes = 0

    def __len__(self) -> int:
        """Return how many quotas of users, client ids and IP addresses are set."""
        return sum(len(values) for values in self.entities.values())

    def values(self, parts: Mapping[str, str | None]) -> Mapping[str, float]:
        """Return the quotas that are set on exactly this entity, by their keys."""
        return self.entities.get(quota_entity(parts), {})

    def by_name(self, kind: str, key: str) -> dict[str | None, float]:
        """Return the values of one quota, by name, of all entities of one type.

        Args:
            kind: the type, such as "user". An entity of a user and a client id is left
                out.
            key: the quota's key, such as "producer_byte_rate".

        Returns:
            The value by the entity's name; the name None is the default.
        """
        return {
            entity[0][1]: values[key]
            for entity, values in self.entities.items()
            if len(entity) == 1 and entity[0][0] == kind and key in values
        }

    def replay(self, record: Mapping[str, Any]) -> None:
        """Apply one ClientQuotaRecord of the metadata log.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or malformed.
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
        """Yield records that, replayed alone, set all of these quotas."""
        for entity, values in self.entities.items():
            for key, value in values.items():
                yield client_quota_record(entity, key, value)


def described(entity: Iterable[tuple[str, str | None]]) -> str:
    """Return an entity as text for people, such as "user alice, client-id app"."""
    return ", ".join(
        f"{kind} {'<default>' if name is None else name}" for kind, name in entity
    )
