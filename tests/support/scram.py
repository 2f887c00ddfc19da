"""SCRAM credentials as a client's tool derives them."""

from __future__ import annotations

import hashlib

from mpbroker.metadata.scram_credentials import (
    ScramCredential,
    ScramMechanism,
    credential_of_salted_password,
)


def credential_of_password(
    mechanism: ScramMechanism, password: str, salt: bytes, iterations: int
) -> ScramCredential:
    salted = hashlib.pbkdf2_hmac(
        mechanism.hash_name, password.encode(), salt, iterations
    )
    return credential_of_salted_password(mechanism, salted, salt, iterations)
