"""SCRAM users: what the metadata log keeps of their passwords, and who may read it.

Kept are the salt and the two keys that RFC 5802 derives from a password, never the
password: neither the log nor whoever reads it can log in with them.

Source: RFC 5802 section 3; KIP-554; Kafka's UserScramCredentialRecord and
RemoveUserScramCredentialRecord.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol

# Kafka's limits for what a client may ask for.
MIN_ITERATIONS: Final = 4096
MAX_ITERATIONS: Final = 16384

_PUT: Final = "UserScramCredentialRecord"
_REMOVE: Final = "RemoveUserScramCredentialRecord"


class ScramMechanism(IntEnum):
    """Numbers as in Kafka's APIs and records."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def mechanism_name(self) -> str:
        """As SASL spells it."""
        return self.name.replace("_", "-")

    @property
    def hash_name(self) -> str:
        """As hashlib spells it."""
        return "sha256" if self is ScramMechanism.SCRAM_SHA_256 else "sha512"

    @property
    def key_bytes(self) -> int:
        return 32 if self is ScramMechanism.SCRAM_SHA_256 else 64


class ScramCredential(NamedTuple):
    """What a server must know to check a password and to prove itself."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


def credential_of_salted_password(
    mechanism: ScramMechanism, salted: bytes, salt: bytes, iterations: int
) -> ScramCredential:
    """Derive a credential from what AlterUserScramCredentials brings."""
    # Imported here: OpenSSL's hashes are for brokers that have such users.
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
    """A user's credential, new or instead of an older one."""
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
    return {"type": _REMOVE, "name": name, "mechanism": int(mechanism)}


class ScramCredentials:
    """The credentials that the records replayed so far add up to."""

    def __init__(self) -> None:
        self._by_user: dict[str, dict[ScramMechanism, ScramCredential]] = {}

    def of(self, name: str) -> dict[ScramMechanism, ScramCredential]:
        """Return a user's credentials; none: there is no such user."""
        return self._by_user.get(name, {})

    def users(self) -> list[str]:
        return list(self._by_user)

    def __len__(self) -> int:
        return sum(map(len, self._by_user.values()))

    def records(self) -> Iterator[dict[str, Any]]:
        """Records that replay to these."""
        for name, credentials in self._by_user.items():
            for mechanism, credential in credentials.items():
                yield scram_credential_record(name, mechanism, credential)

    def replay(self, record: dict[str, Any]) -> None:
        """Apply a record of either type."""
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
    """A processor's view of the credentials: it reads nothing else in the log.

    The log is opened at the first login, so whoever uses no SCRAM reads nothing.
    """

    def __init__(self, open_log: Callable[[], RecordReader]) -> None:
        """Take what opens this process's view of the metadata log."""
        self._open_log = open_log
        self._log: RecordReader | None = None
        self._credentials = ScramCredentials()

    def credential(
        self, name: str, mechanism: ScramMechanism
    ) -> ScramCredential | None:
        """Return what is committed now; None: no such user, or not with that."""
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
