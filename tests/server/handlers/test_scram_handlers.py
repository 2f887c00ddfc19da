"""AlterUserScramCredentials and DescribeUserScramCredentials: Kafka's validation."""

from __future__ import annotations

import pytest

from mpbroker.metadata.metadata_image import MetadataImage
from mpbroker.metadata.scram_credentials import (
    ScramCredentialReader,
    ScramMechanism,
    credential_of_salted_password,
)
from mpbroker.protocol.error_code import ErrorCode as E
from mpbroker.protocol.messages import alter_user_scram_credentials as alter
from mpbroker.protocol.messages import describe_user_scram_credentials as describe
from mpbroker.server.handlers.alter_user_scram_credentials import (
    handle_alter_user_scram_credentials,
)
from mpbroker.server.handlers.describe_user_scram_credentials import (
    handle_describe_user_scram_credentials,
)
from mpbroker.server.intent import NO_INTENT
from tests.server.contexts import context
from tests.support.scram import credential_of_password

SALT = b"s" * 16


class Registry:
    """A metadata log without a file."""

    def __init__(self) -> None:
        self.image = MetadataImage()
        self.scram_credentials = self.image.scram

    def change(self, decide) -> None:
        for record in decide(self.image):
            self.image.replay(record)


def put(name="alice", mechanism=1, iterations=4096, salt=SALT, salted=b"p" * 32):
    return alter.ScramCredentialUpsertion(
        name=name,
        mechanism=mechanism,
        iterations=iterations,
        salt=salt,
        salted_password=salted,
    )


def delete(name="alice", mechanism=1):
    return alter.ScramCredentialDeletion(name=name, mechanism=mechanism)


def altered(registry, upsertions=(), deletions=(), intent=NO_INTENT):
    request = alter.AlterUserScramCredentialsRequest(
        upsertions=list(upsertions), deletions=list(deletions)
    )
    request = type(request).decode(0, memoryview(request.encode(0)))
    answer = handle_alter_user_scram_credentials(
        request, context(registry, intent=intent)
    )
    answer = type(answer).decode(0, memoryview(answer.encode(0)))
    return {result.user: result.error_code for result in answer.results}


def described(registry, *names):
    users = [describe.UserName(name=name) for name in names] or None
    request = describe.DescribeUserScramCredentialsRequest(users=users)
    answer = handle_describe_user_scram_credentials(request, context(registry))
    return {
        result.user: result.error_code
        or [(info.mechanism, info.iterations) for info in result.credential_infos]
        for result in answer.results
    }


class Notes:
    """The notes in a request's slot, which outlive its handler."""

    def __init__(self, *, deadly=False) -> None:
        self.words = []
        self._is_deadly = deadly

    def earlier(self):
        return self.words

    def note(self, words) -> None:
        self.words = list(words)
        if self._is_deadly:
            raise InterruptedError


def test_a_deletion_has_the_same_answer_after_any_death():
    deletions = [delete("nobody"), delete(), delete("bob"), delete("bob")]
    answer = {"nobody": E.RESOURCE_NOT_FOUND, "alice": 0, "bob": E.DUPLICATE_RESOURCE}
    registry, notes = Registry(), Notes()
    altered(registry, [put(), put("bob")])
    changes = {"deletions": deletions, "upsertions": [put("carol")], "intent": notes}
    for _ in range(3):  # the answers to the first two were lost
        assert altered(registry, **changes) == {**answer, "carol": 0}
    assert described(registry) == {"bob": [(1, 4096)], "carol": [(1, 4096)]}
    # Another request finds what there is.
    assert altered(registry, deletions=deletions, intent=Notes()) == {
        **answer,
        "alice": E.RESOURCE_NOT_FOUND,
    }


def test_a_deletion_that_was_noted_and_not_made_is_made():
    registry, notes = Registry(), Notes(deadly=True)
    altered(registry, [put()])
    with pytest.raises(InterruptedError):
        altered(registry, deletions=[delete()], intent=notes)
    again = Notes()
    again.words = notes.words
    assert altered(registry, deletions=[delete()], intent=again) == {"alice": 0}
    assert described(registry) == {}


def test_users_are_put_described_and_deleted():
    registry = Registry()
    assert altered(registry, [put(), put("bob")]) == {"alice": 0, "bob": 0}
    second = put(mechanism=2, salted=b"p" * 64, iterations=8192)
    assert altered(registry, [second]) == {"alice": 0}
    assert described(registry) == {"alice": [(1, 4096), (2, 8192)], "bob": [(1, 4096)]}
    assert altered(registry, deletions=[delete(), delete("bob")]) == {
        "alice": 0,
        "bob": 0,
    }
    assert described(registry, "alice", "bob") == {
        "alice": [(2, 8192)],
        "bob": E.RESOURCE_NOT_FOUND,
    }


def test_keys_made_of_the_password_are_stored_and_the_password_is_not():
    registry = Registry()
    by_password = credential_of_password(
        ScramMechanism.SCRAM_SHA_256, "wonder", SALT, 4096
    )
    import hashlib

    salted = hashlib.pbkdf2_hmac("sha256", b"wonder", SALT, 4096)
    altered(registry, [put(salted=salted)])
    kept = registry.image.scram.of("alice")[ScramMechanism.SCRAM_SHA_256]
    assert kept == by_password
    assert kept == credential_of_salted_password(
        ScramMechanism.SCRAM_SHA_256, salted, SALT, 4096
    )


@pytest.mark.parametrize("size", [1, 18, 1024])
def test_a_salted_password_of_another_length_is_kept_with_whole_keys(size):
    registry = Registry()
    altered(registry, [put(mechanism=2, salted=b"p" * size)])
    kept = registry.image.scram.of("alice")[ScramMechanism.SCRAM_SHA_512]
    assert len(kept.stored_key) == len(kept.server_key) == 64


@pytest.mark.parametrize(
    ("upsertions", "deletions", "code"),
    [
        ([put(name="")], [], E.UNACCEPTABLE_CREDENTIAL),
        ([put(iterations=4095)], [], E.UNACCEPTABLE_CREDENTIAL),
        ([put(iterations=16385)], [], E.UNACCEPTABLE_CREDENTIAL),
        ([put(salt=b"")], [], E.UNACCEPTABLE_CREDENTIAL),
        ([put(salted=b"")], [], E.UNACCEPTABLE_CREDENTIAL),
        ([put(salted=bytes(1025))], [], E.UNACCEPTABLE_CREDENTIAL),
        ([put(mechanism=0)], [], E.UNSUPPORTED_SASL_MECHANISM),
        ([put(mechanism=3)], [], E.UNSUPPORTED_SASL_MECHANISM),
        ([], [delete(mechanism=9)], E.UNSUPPORTED_SASL_MECHANISM),
        ([], [delete()], E.RESOURCE_NOT_FOUND),
        ([put(), put()], [], E.DUPLICATE_RESOURCE),
        ([put(), put(mechanism=2, salted=b"p" * 64)], [], E.DUPLICATE_RESOURCE),
        ([put(), put(mechanism=2, salted=b"")], [], E.DUPLICATE_RESOURCE),
        ([put(mechanism=2, salted=b""), put()], [], E.UNACCEPTABLE_CREDENTIAL),
        ([put()], [delete()], E.RESOURCE_NOT_FOUND),
    ],
)
def test_a_user_with_a_mistake_is_not_changed_and_others_are(
    upsertions, deletions, code
):
    registry = Registry()
    results = altered(registry, [*upsertions, put("other")], deletions)
    assert results.pop("other") == 0
    assert list(results.values()) == [code]
    assert described(registry) == {"other": [(1, 4096)]}


def test_a_user_is_changed_once_a_request_for_all_mechanisms_together():
    registry = Registry()
    other = put(mechanism=2, salted=b"p" * 64)
    altered(registry, [put()])
    altered(registry, [other])
    # Of two deletions, a deletion and an upsertion, of one mechanism or of two.
    for upsertions, deletions in (
        ([], [delete(), delete()]),
        ([], [delete(), delete(mechanism=2)]),
        ([other], [delete()]),
        ([put(), other], [delete()]),
    ):
        assert altered(registry, upsertions, deletions) == {
            "alice": E.DUPLICATE_RESOURCE
        }
    assert described(registry) == {"alice": [(1, 4096), (2, 4096)]}


def test_a_user_named_twice_is_refused():
    registry = Registry()
    altered(registry, [put()])
    assert described(registry, "alice", "alice") == {"alice": E.DUPLICATE_RESOURCE}


def test_credentials_survive_the_log_and_a_processor_reads_them_there():
    registry = Registry()
    altered(registry, [put(), put("bob")])
    again = MetadataImage()
    records = [record for group in registry.image.records() for record in group]
    for record in records:
        again.replay(record)
    assert list(again.scram.records()) == list(registry.image.scram.records())
    assert len(records) == registry.image.live_record_count()

    class Log:
        def read_new(self):
            taken, records[:] = list(records), []
            return taken

    reader = ScramCredentialReader(Log)
    assert reader.credential("bob", ScramMechanism.SCRAM_SHA_256) is not None
    assert reader.credential("bob", ScramMechanism.SCRAM_SHA_512) is None
    assert reader.credential("eve", ScramMechanism.SCRAM_SHA_256) is None
