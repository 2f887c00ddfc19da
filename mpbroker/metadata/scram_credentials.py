"""ScramCredentials: the SCRAM credentials of users, from the metadata log.

The log has a salt, a number of iterations and the two keys that RFC 5802 derives from a
password. It does not have the password, and its content is not enough to log in.

Source: RFC 5802 section 3; KIP-554; Kafka's UserScramCredentialRecord and
RemoveUserScramCredentialRecord.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol

# Kafka's limits of the iterations that a client may set.
MIN_ITERATIONS: Final = 4096
MAX_ITERATIONS: Final = 16384

_PUT: Final = "UserScramCredentialRecord"
_REMOVE: Final = "RemoveUserScramCredentialRecord"


class ScramMechanism(IntEnum):
    """A SCRAM mechanism, with its number in Kafka's APIs and records."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def mechanism_name(self) -> str:
        """The name in SASL, such as SCRAM-SHA-256."""
        return self.name.replace("_", "-")

    @property
    def hash_name(self) -> str:
        """The name of its hash in hashlib, such as sha256."""
        return "sha256" if self is ScramMechanism.SCRAM_SHA_256 else "sha512"

    @property
    def key_bytes(self) -> int:
        """The length of its keys in bytes."""
        return 32 if self is ScramMechanism.SCRAM_SHA_256 else 64


class ScramCredential(NamedTuple):
    """The values by which a server checks a password, and proves that it knows it.

    Attributes:
        salt: random bytes.
        stored_key: the hash of the client key; key_bytes long.
        server_key: key_bytes long.
        iterations: how often the password is hashed.
    """

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


def credential_of_salted_password(
    mechanism: ScramMechanism, salted: bytes, salt: bytes, iterations: int
) -> ScramCredential:
    """Derive a credential from the fields of an AlterUserScramCredentials request.

    Args:
        mechanism: the mechanism.
        salted: the salted password, which the client has computed.
        salt: the salt.
        iterations: how often the client has hashed the password.
    """
    # Imported here: only brokers with SCRAM users need OpenSSL's hashes.
    import hashlib
    import hmac

    client_key = hmac.digest(salted, b"Client Key", mechanism.hash_name)
    return ScramCredential(
        salt,
        hashlib.new(mechanism.hash_name, client_key).digest(),
        hmac.digest(salted, b"Server Key", mechanism.hash_name),
        iterations,
    )


def scram_credential_record(
    name: str, mechanism: ScramMechanism, credential: ScramCredential
) -> dict[str, Any]:
    """Make the record that sets or replaces a user's credential for a mechanism."""
    return {
        "type": _PUT,
        "name": name,
        "mechanism": int(mechanism),
        "salt": _text(credential.salt),
        "storedKey": _text(credential.stored_key),
        "serverKey": _text(credential.server_key),
        "iterations": credential.iterations,
    }


def remove_scram_credential_record(
    name: str, mechanism: ScramMechanism
) -> dict[str, Any]:
    """Make the record that removes a user's credential for a mechanism."""
    return {"type": _REMOVE, "name": name, "mechanism": int(mechanism)}


class ScramCredentials:
    """The credentials after the records that were replayed so far."""

    def __init__(self) -> None:
        self._by_user: dict[str, dict[ScramMechanism, ScramCredential]] = {}

    def of(self, name: str) -> dict[ScramMechanism, ScramCredential]:
        """Return a user's credentials by mechanism; empty: there is no such user."""
        return self._by_user.get(name, {})

    def users(self) -> list[str]:
        """Return the names of all users."""
        return list(self._by_user)

    def __len__(self) -> int:
        return sum(map(len, self._by_user.values()))

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield records that replay to these credentials."""
        for name, credentials in self._by_user.items():
            for mechanism, credential in credentials.items():
                yield scram_credential_record(name, mechanism, credential)

    def replay(self, record: dict[str, Any]) -> None:
        """Apply a record of either type.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or malformed.
        """
        REPLAY[record["type"]](self, record)

    def put(self, record: dict[str, Any]) -> None:
        """Replay a UserScramCredentialRecord."""
        mechanism = ScramMechanism(record["mechanism"])
        self._by_user.setdefault(str(record["name"]), {})[mechanism] = ScramCredential(
            _bytes(record["salt"]),
            _bytes(record["storedKey"]),
            _bytes(record["serverKey"]),
            int(record["iterations"]),
        )

    def remove(self, record: dict[str, Any]) -> None:
        """Replay a RemoveUserScramCredentialRecord."""
        name = str(record["name"])
        credentials = self._by_user.get(name, {})
        credentials.pop(ScramMechanism(record["mechanism"]), None)
        if not credentials:
            self._by_user.pop(name, None)


# How each record changes the credentials, by its type.
REPLAY: Final = {_PUT: ScramCredentials.put, _REMOVE: ScramCredentials.remove}


class RecordReader(Protocol):
    """The part of MetadataLog that a reader of credentials needs."""

    def read_new(self) -> Iterable[dict[str, Any]]:
        """Return the committed records that were not returned before."""
        ...


class ScramCredentialReader:
    """The credentials as a processor reads them; it ignores all other records.

    The log is opened at the first login, so a processor without SCRAM never reads it.

    Args:
        open_log: opens the metadata log for this process.
    """

    def __init__(self, open_log: Callable[[], RecordReader]) -> None:
        self._open_log = open_log
        self._log: RecordReader | None = None
        self._credentials = ScramCredentials()

    def credential(
        self, name: str, mechanism: ScramMechanism
    ) -> ScramCredential | None:
        """Return a user's committed credential.

        Returns:
            None if there is no such user, or no credential for this mechanism.

        Raises:
            CorruptLogError: the log is damaged.
        """
        if self._log is None:
            self._log = self._open_log()
        for record in self._log.read_new():
            replay = REPLAY.get(record.get("type", ""))
            if replay is not None:
                replay(self._credentials, record)
        return self._credentials.of(name).get(mechanism)


def _text(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()


def _bytes(text: str) -> bytes:
    return a2b_base64(text, strict_mode=True)
