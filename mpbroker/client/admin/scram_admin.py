"""Users of SCRAM from the client's side (KIP-554)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from mpbroker.client.cluster import Cluster
from mpbroker.client.errors import check_error
from mpbroker.protocol.messages import alter_user_scram_credentials as alter
from mpbroker.protocol.messages import describe_user_scram_credentials as describe

MECHANISMS: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512")
_NUMBERS: Final = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
_NAMES: Final = {number: name for name, number in _NUMBERS.items()}
_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
_SALT_BYTES: Final = 32


class ScramUser(NamedTuple):
    """Who may come, and by what: iterations by mechanism."""

    name: str
    mechanisms: dict[str, int]


def list_users(cluster: Cluster, names: Sequence[str] = ()) -> list[ScramUser]:
    """Return users with credentials: these, or all.

    Raises:
        ApiError: the broker refused; RESOURCE_NOT_FOUND: one of them has none.
    """
    response = cluster.any_broker().request(
        describe.DescribeUserScramCredentialsRequest(
            users=[describe.UserName(name=name) for name in names] or None
        ),
        describe.DescribeUserScramCredentialsResponse,
    )
    check_error(response.error_code, "users", response.error_message)
    found = []
    for result in response.results:
        check_error(result.error_code, f"user {result.user!r}", result.error_message)
        mechanisms = {
            _NAMES.get(each.mechanism, str(each.mechanism)): each.iterations
            for each in result.credential_infos
        }
        found.append(ScramUser(result.user, mechanisms))
    return sorted(found)


# Kafka takes one change of a user a request, so these are of one mechanism.


def set_password(
    cluster: Cluster, name: str, mechanism: str, password: str, iterations: int
) -> None:
    """Let a user in by a password; the broker is told what it needs to check it.

    As in Kafka's tools, the password is taken for what it is in UTF-8.

    Raises:
        ApiError: the broker refused.
    """
    salt = os.urandom(_SALT_BYTES)
    salted = hashlib.pbkdf2_hmac(
        _HASHES[mechanism], password.encode(), salt, iterations
    )
    upsertion = alter.ScramCredentialUpsertion(
        name=name,
        mechanism=_NUMBERS[mechanism],
        iterations=iterations,
        salt=salt,
        salted_password=salted,
    )
    _alter(
        cluster,
        alter.AlterUserScramCredentialsRequest(deletions=[], upsertions=[upsertion]),
    )


def remove_credential(cluster: Cluster, name: str, mechanism: str) -> None:
    """Let a user in by this mechanism no longer.

    Raises:
        ApiError: the broker refused; RESOURCE_NOT_FOUND: there is no such credential.
    """
    deletion = alter.ScramCredentialDeletion(name=name, mechanism=_NUMBERS[mechanism])
    _alter(
        cluster,
        alter.AlterUserScramCredentialsRequest(deletions=[deletion], upsertions=[]),
    )


def _alter(cluster: Cluster, request: alter.AlterUserScramCredentialsRequest) -> None:
    response = cluster.controller().request(
        request, alter.AlterUserScramCredentialsResponse
    )
    for result in response.results:
        check_error(result.error_code, f"user {result.user!r}", result.error_message)
