"""Find the quota of a client: the first of eight levels at which one is set.

    user          client id     requests counted together
    named         named         this client of this user
    named         <default>     this client of this user
    named         -             all clients of this user
    <default>     named         this client of this user
    <default>     <default>     this client of this user
    <default>     -             all clients of this user
    -             named         this client of any user
    -             <default>     this client of any user

Each kind of quota is searched by itself. A client that sends no client id has an empty
client id, which no quota can name.

Source: Kafka's DefaultQuotaCallback in ClientQuotaManager.
"""

from __future__ import annotations

from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.metadata.quota_records import (
    CLIENT_ID,
    USER,
    ClientQuotasImage,
    QuotaEntity,
    quota_entity,
)

_BY_USER: Final = (True, False)
_BY_CLIENT: Final = (False, True)
_BY_BOTH: Final = (True, True)


class Quota(NamedTuple):
    """Describes a client's quota of one kind, and whose requests count for it.

    Attributes:
        user: the user whose requests are counted; "": those of all users.
        client_id: the client id whose requests are counted; "": those of all.
        bound: the rate: bytes/s, percent or partitions/s.
    """

    user: str
    client_id: str
    bound: float


def quota_of(
    image: ClientQuotasImage, key: str, user: str, client_id: str
) -> Quota | None:
    """Return the quota of a client for a key, such as producer_byte_rate.

    Return None if no level has one.
    """
    for entity, (by_user, by_client) in _levels(user, client_id):
        bound = image.entities.get(entity, {}).get(key)
        if bound is not None:
            return Quota(user if by_user else "", client_id if by_client else "", bound)
    return None


def _levels(user: str, client_id: str) -> list[tuple[QuotaEntity, tuple[bool, bool]]]:
    def both(user: str | None, client_id: str | None) -> QuotaEntity:
        return quota_entity({USER: user, CLIENT_ID: client_id})

    return [
        (both(user, client_id), _BY_BOTH),
        (both(user, None), _BY_BOTH),
        (quota_entity({USER: user}), _BY_USER),
        (both(None, client_id), _BY_BOTH),
        (both(None, None), _BY_BOTH),
        (quota_entity({USER: None}), _BY_USER),
        (quota_entity({CLIENT_ID: client_id}), _BY_CLIENT),
        (quota_entity({CLIENT_ID: None}), _BY_CLIENT),
    ]
