"""AlterUserScramCredentials: set and remove SCRAM credentials of users.

As in Kafka, a request may name each user only once, for one mechanism. If it names a
user twice, both changes are refused, since the answer has only one result for each
user.

Source: Kafka protocol guide, "AlterUserScramCredentials"; KIP-554; Kafka's
ScramControlManager, which also has the texts of the errors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from mpbroker.metadata.metadata_image import MetadataImage
from mpbroker.metadata.scram_credentials import (
    MAX_ITERATIONS,
    MIN_ITERATIONS,
    ScramCredentials,
    ScramMechanism,
    credential_of_salted_password,
    remove_scram_credential_record,
    scram_credential_record,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from mpbroker.server.handler_context import HandlerContext

_MECHANISMS: Final = {int(mechanism) for mechanism in ScramMechanism}
_MAX_SALT_BYTES: Final = 1024  # Kafka's clients make 32
_MAX_SALTED_BYTES: Final = 1024  # mechanisms make 32 and 64

Records = Sequence[dict[str, Any]]
Change = ScramCredentialDeletion | ScramCredentialUpsertion
Refusals = dict[str, tuple[ErrorCode, str]]


def handle_alter_user_scram_credentials(
    request: AlterUserScramCredentialsRequest, context: HandlerContext
) -> AlterUserScramCredentialsResponse:
    """Change the credentials of all users whose changes are valid.

    Deletions are noted before they are made (intent.py): a word for each deletion of
    the request, 1 if it will be made. So a second execution after the death of a
    handler knows what the first one has deleted. If the metadata log cannot be written,
    nothing is changed, and all users get KAFKA_STORAGE_ERROR.
    """
    intent = context.intent
    changes: list[Change] = [*request.deletions, *request.upsertions]
    refused: Refusals = {}
    ours = {
        each.name
        for each, noted in zip(request.deletions, intent.earlier(), strict=False)
        if noted
    }

    def decide(image: MetadataImage) -> Records:
        gone = {name for name in ours if not _is_there(name, changes, image.scram)}
        refused.update(_refusals(changes, image.scram, gone))
        going = [each.name not in refused and each.name not in gone for each in changes]
        if any(going[: len(request.deletions)]):
            intent.note(
                [
                    int(goes or each.name in gone)
                    for each, goes in zip(request.deletions, going, strict=False)
                ]
            )
        return [
            _record(each) for each, goes in zip(changes, going, strict=True) if goes
        ]

    try:
        context.broker.registry.change(decide)
    except ApiError as error:
        unchanged = (ErrorCode(error.error_code), str(error))
        for each in changes:
            refused.setdefault(each.name, unchanged)
    return AlterUserScramCredentialsResponse(
        results=[
            AlterUserScramCredentialsResult(
                user=name, error_code=code, error_message=message
            )
            for name in dict.fromkeys(each.name for each in changes)
            for code, message in [refused.get(name, (ErrorCode.NONE, None))]
        ]
    )


def _is_there(
    name: str, changes: Sequence[Change], credentials: ScramCredentials
) -> bool:
    """Return whether the credential that a user's first change names exists."""
    first = next(each for each in changes if each.name == name)
    return first.mechanism in credentials.of(name)


def _refusals(
    changes: Sequence[Change], credentials: ScramCredentials, gone: Collection[str]
) -> Refusals:
    """Return the error of each user whose changes are refused.

    It is the error of the first wrong change, or DUPLICATE_RESOURCE if the user is
    named twice.

    Args:
        changes: the changes of the request.
        credentials: all credentials that exist now.
        gone: users whose credentials an earlier execution has deleted.
    """
    refused: Refusals = {}
    seen = set()
    for each in changes:
        if each.name in refused:
            continue
        reason = None if each.name in gone else _reason(each, credentials)
        if each.name in seen:
            reason = (
                ErrorCode.DUPLICATE_RESOURCE,
                "A user credential cannot be altered twice in the same request",
            )
        seen.add(each.name)
        if reason is not None:
            refused[each.name] = reason
    return refused


def _reason(
    change: Change, credentials: ScramCredentials
) -> tuple[ErrorCode, str] | None:
    if not change.name:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"
    if change.mechanism not in _MECHANISMS:
        return ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"
    if isinstance(change, ScramCredentialDeletion):
        if change.mechanism in credentials.of(change.name):
            return None
        return (
            ErrorCode.RESOURCE_NOT_FOUND,
            "Attempt to delete a user credential that does not exist",
        )
    if change.iterations < MIN_ITERATIONS:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too few iterations"
    if change.iterations > MAX_ITERATIONS:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too many iterations"
    if not 0 < len(change.salt) <= _MAX_SALT_BYTES:
        return (
            ErrorCode.UNACCEPTABLE_CREDENTIAL,
            f"A salt of {len(change.salt)} bytes; it must have 1 to {_MAX_SALT_BYTES}",
        )
    # As in Kafka, any length but 0 is accepted. With a length that the mechanism does
    # not make, a client that computes it from the password cannot log in. The stored
    # keys have their full length even then. Tools send such lengths, and Kafka takes
    # them, so they are not refused.
    if not 0 < len(change.salted_password) <= _MAX_SALTED_BYTES:
        return (
            ErrorCode.UNACCEPTABLE_CREDENTIAL,
            f"A salted password of {len(change.salted_password)} bytes; it must have 1"
            f" to {_MAX_SALTED_BYTES}",
        )
    return None


def _record(change: Change) -> dict[str, Any]:
    mechanism = ScramMechanism(change.mechanism)
    if isinstance(change, ScramCredentialDeletion):
        return remove_scram_credential_record(change.name, mechanism)
    credential = credential_of_salted_password(
        mechanism, bytes(change.salted_password), bytes(change.salt), change.iterations
    )
    return scram_credential_record(change.name, mechanism, credential)
