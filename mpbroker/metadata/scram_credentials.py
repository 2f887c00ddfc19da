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
from typing import Any, Final, Protocol

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import LogReplacedError

# Kafka's limits of the iterations that a client may set.
MIN_ITERATIONS: Final = 4096
MAX_ITERATIONS: Final = 16384

_PUT: Final = "UserScramCredentialRecord"
_REMOVE: Final = "RemoveUserScramCredentialRecord"
_TOKEN: Final = "DelegationTokenRecord"
_REMOVE_TOKEN: Final = "RemoveDelegationTokenRecord"


class ScramMechanism(IntEnum):
    """A SCRAM mechanism, with its number in Kafka's APIs and records."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def mechanism_name(self) -> str:
        """The mechanism's name in SASL, such as SCRAM-SHA-256."""
        return self.name.replace("_", "-")

    @property
    def hash_name(self) -> str:
        """The name of the mechanism's hash in hashlib, such as sha256."""
        return "sha256" if self is ScramMechanism.SCRAM_SHA_256 else "sha512"

    @property
    def key_bytes(self) -> int:
        """The length of the mechanism's keys in bytes."""
        return 32 if self is ScramMechanism.SCRAM_SHA_256 else 64


class ScramCredential(NamedTuple):
    """The values by which a server checks a password, and proves that it has them.

    Attributes:
        salt: random bytes.
        stored_key: the hash of the client key (RFC 5802); ``key_bytes`` long.
        server_key: the server key (RFC 5802); ``key_bytes`` long.
        iterations: the number of times that the password is hashed.
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
        iterations: the number of times that the client has hashed the password.
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
    """The SCRAM credentials of users, after the records that were replayed so far."""

    def __init__(self) -> None:
        self._by_user: dict[str, dict[ScramMechanism, ScramCredential]] = {}

    def of(self, name: str) -> dict[ScramMechanism, ScramCredential]:
        """Return a user's credentials by SCRAM mechanism; empty: no such user."""
        return self._by_user.get(name, {})

    def users(self) -> list[str]:
        """Return the names of all users with credentials."""
        return list(self._by_user)

    def __len__(self) -> int:
        return sum(map(len, self._by_user.values()))

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the metadata records that set all of these credentials."""
        for name, credentials in self._by_user.items():
            for mechanism, credential in credentials.items():
                yield scram_credential_record(name, mechanism, credential)

    def replay(self, record: dict[str, Any]) -> None:
        """Apply a record that sets or removes a credential.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or malformed.
        """
        REPLAY[record["type"]](self, record)

    def put(self, record: dict[str, Any]) -> None:
        """Apply a UserScramCredentialRecord, which sets a user's credential."""
        mechanism = ScramMechanism(record["mechanism"])
        self._by_user.setdefault(str(record["name"]), {})[mechanism] = ScramCredential(
            _bytes(record["salt"]),
            _bytes(record["storedKey"]),
            _bytes(record["serverKey"]),
            int(record["iterations"]),
        )

    def remove(self, record: dict[str, Any]) -> None:
        """Apply a RemoveUserScramCredentialRecord, which removes a credential."""
        name = str(record["name"])
        credentials = self._by_user.get(name, {})
        credentials.pop(ScramMechanism(record["mechanism"]), None)
        if not credentials:
            self._by_user.pop(name, None)


# How each record changes the credentials, by its type.
REPLAY: Final = {_PUT: ScramCredentials.put, _REMOVE: ScramCredentials.remove}


class RecordReader(Protocol):
    """Reads the metadata log's records, from the first on; a MetadataLog is one."""

    def read_new(self) -> Iterable[dict[str, Any]]:
        """Return the committed records that were not returned before.

        Raises:
            LogReplacedError: a snapshot has replaced records that were not read yet;
                the caller opens the log again.
        """
        ...

    def close(self) -> None:
        """Close the metadata log."""
        ...


class ScramCredentialReader:
    """Reads SCRAM credentials and delegation tokens for a processor.

    A processor is a process that serves connections. All other records are ignored. The
    log is opened at the first login, so a processor without SCRAM never reads it.

    Args:
        open_log: opens the metadata log for this process.
    """

    def __init__(self, open_log: Callable[[], RecordReader]) -> None:
        self._open_log = open_log
        self._log: RecordReader | None = None
        self._credentials = ScramCredentials()
        self._tokens: dict[str, dict[str, Any]] = {}

    def credential(
        self, name: str, mechanism: ScramMechanism
    ) -> ScramCredential | None:
        """Return a user's committed SCRAM credential for a mechanism.

        Returns:
            None if there is no such user, or no credential for this mechanism.

        Raises:
            CorruptLogError: the log is damaged.
        """
        self._catch_up()
        return self._credentials.of(name).get(mechanism)

    def _catch_up(self) -> None:
        for record in self._read_new():
            replay = REPLAY.get(record.get("type", ""))
            if replay is not None:
                replay(self._credentials, record)
            elif record.get("type") == _TOKEN:
                self._tokens[record["tokenId"]] = record
            elif record.get("type") == _REMOVE_TOKEN:
                self._tokens.pop(record["tokenId"], None)

    def token(self, token_id: str) -> dict[str, Any] | None:
        """Return the committed record of a delegation token; None: there is none.

        Raises:
            CorruptLogError: the log is damaged.
        """
        self._catch_up()
        return self._tokens.get(token_id)

    def _read_new(self) -> Iterable[dict[str, Any]]:
        if self._log is None:
            self._log = self._open_log()
        try:
            return self._log.read_new()
        except LogReplacedError:
            # There was no login for a long time, and a snapshot has replaced the
            # records.
            self._log.close()
            self._log = self._open_log()
            self._credentials = ScramCredentials()
            self._tokens = {}
            return self._log.read_new()


def _text(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()


def _bytes(text: str) -> bytes:
    return a2b_base64(text, strict_mode=True)
