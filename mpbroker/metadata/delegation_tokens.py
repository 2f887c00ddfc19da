"""DelegationToken: a secret with which clients authenticate as its owner (KIP-48).

A token is an id in the metadata log and a MAC of this id, which only the broker can
compute: its key is ``delegation.token.secret.key``. With SCRAM, the id is the user name
and the MAC, in base64, is the password. So the content of the log is not enough to log
in.

Source: KIP-48, KIP-900; Kafka's DelegationTokenRecord, DelegationTokenManager and
DelegationTokenControlManager.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.metadata.scram_credentials import (
    MIN_ITERATIONS,
    ScramCredential,
    ScramMechanism,
    credential_of_salted_password,
)

USER: Final = "User"
_PREFIX: Final = "User:"


class DelegationToken(NamedTuple):
    """A delegation token.

    Attributes:
        token_id: the id, as text.
        owner: the principal that the token authenticates, such as ``User:alice``.
        requester: the principal that has created the token.
        renewers: other principals that may renew the token.
        issued_ms: the time at which the token was made, by the wall clock.
        max_ms: the latest time at which the token expires.
        expires_ms: the time at which the token expires unless it is renewed.
    """

    token_id: str
    owner: str
    requester: str
    renewers: tuple[str, ...]
    issued_ms: int
    max_ms: int
    expires_ms: int

    @property
    def user(self) -> str:
        """The owner's name, without the prefix ``User:``."""
        return self.owner.removeprefix(_PREFIX)

    @property
    def principals(self) -> tuple[str, ...]:
        """The principals that may describe, renew and expire the token."""
        return self.owner, self.requester, *self.renewers

    def belongs_to(self, principal: str) -> bool:
        """Return whether a principal may describe, renew and expire the token."""
        return principal in self.principals

    @property
    def ends_ms(self) -> int:
        """The time (ms) at which the token ends, unless it is renewed."""
        return min(self.max_ms, self.expires_ms)

    def has_expired(self, now_ms: int) -> bool:
        """Whether the token has expired, so that no login with it succeeds."""
        return self.ends_ms < now_ms

    def record(self) -> dict[str, Any]:
        """Make the record that creates or changes the token."""
        return {
            "type": "DelegationTokenRecord",
            "owner": self.owner,
            "requester": self.requester,
            "renewers": list(self.renewers),
            "issueTimestamp": self.issued_ms,
            "maxTimestamp": self.max_ms,
            "expirationTimestamp": self.expires_ms,
            "tokenId": self.token_id,
        }

    def removal(self) -> dict[str, Any]:
        """Make the record that removes the token."""
        return {"type": "RemoveDelegationTokenRecord", "tokenId": self.token_id}


def token_of_record(record: Mapping[str, Any]) -> DelegationToken:
    """Return the token of a DelegationTokenRecord."""
    return DelegationToken(
        str(record["tokenId"]),
        str(record["owner"]),
        str(record["requester"]),
        tuple(map(str, record["renewers"])),
        int(record["issueTimestamp"]),
        int(record["maxTimestamp"]),
        int(record["expirationTimestamp"]),
    )


class TokenSettings(NamedTuple):
    """The settings ``delegation.token.*`` of a broker that serves tokens."""

    secret_key: str
    max_lifetime_ms: int
    expiry_time_ms: int

    def hmac(self, token_id: str) -> bytes:
        """Return the MAC of a token's id: HMAC-SHA-512 with the secret key."""
        import hmac  # few brokers have tokens

        return hmac.digest(self.secret_key.encode(), token_id.encode(), "sha512")


class TokenLogin(NamedTuple):
    """The credential that checks a login with a token, and the session it gives.

    Attributes:
        user: the name of the token's owner, who is authenticated.
        credential: the SCRAM credential that checks the MAC as a password.
        expires_ms: the end of the session, by the wall clock.
    """

    user: str
    credential: ScramCredential
    expires_ms: int


def token_login(
    token: DelegationToken, settings: TokenSettings, mechanism: ScramMechanism
) -> TokenLogin:
    """Compute the credential that checks a login with a token. This takes some ms."""
    import hashlib
    import hmac

    mac = settings.hmac(token.token_id)
    # The salt is the same at each attempt, and of no use without the secret key.
    salt = hmac.digest(mac, mechanism.mechanism_name.encode(), "sha256")
    salted = hashlib.pbkdf2_hmac(
        mechanism.hash_name, b64encode(mac), salt, MIN_ITERATIONS
    )
    credential = credential_of_salted_password(mechanism, salted, salt, MIN_ITERATIONS)
    return TokenLogin(token.user, credential, token.ends_ms)


# A function that returns the login for a token's id and a mechanism; None: there is no
# such token, or it has expired.
TokenLoginOf = Callable[[str, ScramMechanism], TokenLogin | None]
