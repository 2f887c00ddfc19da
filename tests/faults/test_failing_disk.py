"""The metadata log cannot be written: whatever would change it is refused by a code.

The connection stays, and once the disk is well the same requests succeed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    EntityData,
    EntryData,
    OpData,
)
from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker

STANDARD_AUTHORIZER: Final = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
WITHIN_S: Final = 60
KEPT, DOOMED = "kept", "doomed"  # topics that are there before


class Failing(NamedTuple):
    """A broker whose disk fails while ``fails`` is there, and a client of it."""

    admin: AdminClient
    fails: Path
    address: tuple[str, int]


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failing]:
    folder = tmp_path_factory.mktemp("failing")
    fails = folder / "fails"
    command = [sys.executable, "-m", "tests.faults.failing_syncs", str(fails)]
    config = {
        "authorizer.class.name": STANDARD_AUTHORIZER,
        "allow.everyone.if.no.acl.found": "true",
    }
    with Broker(folder / "data", config, command=command) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
        for made in admin.create_topics(
            [NewTopic(KEPT, 1, 1), NewTopic(DOOMED, 1, 1)]
        ).values():
            made.result(WITHIN_S)
        (made,) = admin.create_acls([AclBinding(*acl_of("other"))]).values()
        made.result(WITHIN_S)
        yield Failing(admin, fails, address_of(broker))


def alter_config(admin: AdminClient) -> dict[Any, Any]:
    entry = ConfigEntry(
        "retention.ms", "5000000", incremental_operation=AlterConfigOpType.SET
    )
    topic = ConfigResource(ResourceType.TOPIC, KEPT, incremental_configs=[entry])
    return admin.incremental_alter_configs([topic])


def add_user(admin: AdminClient) -> dict[Any, Any]:
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    user = UserScramCredentialUpsertion("alice", info, b"secret", b"salt")
    return admin.alter_user_scram_credentials([user])


def acl_of(topic: str) -> tuple[Any, ...]:
    """Return the fields of an entry, which are those of a filter for it, too."""
    return (
        *(ResourceType.TOPIC, topic, ResourcePatternType.LITERAL),
        *("User:ANONYMOUS", "*", AclOperation.ALL, AclPermissionType.ALLOW),
    )


def add_acl(admin: AdminClient) -> dict[Any, Any]:
    return admin.create_acls([AclBinding(*acl_of(KEPT))])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda admin: admin.create_topics([NewTopic("new", 1, 1)]), id="create"
        ),
        pytest.param(
            lambda admin: admin.create_partitions([NewPartitions(KEPT, 2)]),
            id="partitions",
        ),
        pytest.param(alter_config, id="config"),
        pytest.param(add_user, id="user"),
        pytest.param(lambda admin: admin.delete_topics([DOOMED]), id="delete"),
        pytest.param(add_acl, id="acl"),
        pytest.param(
            lambda admin: admin.delete_acls([AclBindingFilter(*acl_of("other"))]),
            id="delete-acl",
        ),
    ],
)
def test_a_change_is_refused_while_the_disk_fails_and_made_afterwards(
    failing: Failing, change: Callable[[AdminClient], dict[Any, Any]]
) -> None:
    failing.fails.touch()
    try:
        (refused,) = change(failing.admin).values()
        with pytest.raises(KafkaException) as raised:
            refused.result(WITHIN_S)
    finally:
        failing.fails.unlink()
    assert raised.value.args[0].name() == "KAFKA_STORAGE_ERROR"
    (made,) = change(failing.admin).values()
    made.result(WITHIN_S)


def test_a_quota_is_refused_while_the_disk_fails_and_set_afterwards(
    failing: Failing,
) -> None:
    entity = [EntityData(entity_type="client-id", entity_name="one")]
    rate = OpData(key="producer_byte_rate", value=1e9, remove=False)
    request = AlterClientQuotasRequest(entries=[EntryData(entity=entity, ops=[rate])])
    framed = wire.request((request.api_key, 1), request.encode(1))
    with wire.Connection(failing.address, WITHIN_S) as connection:

        def ask() -> int:
            answer = AlterClientQuotasResponse.decode(1, connection.ask(framed)[5:])
            return answer.entries[0].error_code

        failing.fails.touch()
        try:
            assert ask() == ErrorCode.KAFKA_STORAGE_ERROR
        finally:
            failing.fails.unlink()
        assert ask() == ErrorCode.NONE
