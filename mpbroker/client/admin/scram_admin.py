"""List, set and remove the SCRAM credentials of users (KIP-554).

Kafka accepts one change for each user in a request, so each function changes one
mechanism.
"""

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
    """A user that has SCRAM credentials.

    Attributes:
        mechanisms: the number of iterations of each credential, by mechanism.
    """

    name: str
    mechanisms: dict[str, int]


def list_users(cluster: Cluster, names: Sequence[str] = ()) -> list[ScramUser]:
    """Return users and their credentials: all users, or those that ``names`` names.

    Raises:
        ApiError: RESOURCE_NOT_FOUND, if a named user has no credentials; or another
            refusal.
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


def set_password(
    cluster: Cluster, name: str, mechanism: str, password: str, iterations: int
) -> None:
    """Set a user's password for one mechanism.

    The broker gets a salted hash, not the password. As in Kafka's tools, the password
    is encoded in UTF-8 and not normalized.

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
    """Remove a user's credential for one mechanism.

    Raises:
        ApiError: RESOURCE_NOT_FOUND, if there is no such credential; or another
            refusal.
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
