"""ACLs as clients see them: made and shown by their admin calls, and obeyed.

One broker with two listeners: on one everybody is User:ANONYMOUS, on the other they
are who they prove to be by a password; admin is a super user.
"""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kafka.errors
import pytest
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.admin import ACL, ACLFilter, ResourcePattern, ResourcePatternFilter
from kafka.admin import ACLOperation as PyOperation
from kafka.admin import ACLPermissionType as PyPermission
from kafka.admin import ACLResourcePatternType as PyPattern
from kafka.admin import ResourceType as PyResource
from kafka.structs import TopicPartition as PyTopicPartition

from tests.support.apache_kafka import java_command
from tests.support.broker import Broker
from tests.support.fetch_clients import have_java_tools
from tests.support.patience import LONGEST_S

MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule required"
STANDARD = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
CONFIG = {
    "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
    "sasl.enabled.mechanisms": "PLAIN",
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
        f'{MODULE} user_admin="admin-secret" user_alice="alice-secret";'
    ),
    "authorizer.class.name": STANDARD,
    "super.users": "User:admin",
    "group.initial.rebalance.delay.ms": 0,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.num.partitions": 1,
}
TOOLS = "org.apache.kafka.tools"
DENIED_TOPIC = KafkaError.TOPIC_AUTHORIZATION_FAILED


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("acls") / "data", CONFIG) as started:
        yield started


def login(broker: Broker, name: str) -> dict[str, Any]:
    """librdkafka's settings to be somebody."""
    return {
        "bootstrap.servers": broker.listeners["SASL_PLAINTEXT"],
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": name,
        "sasl.password": f"{name}-secret",
    }


def nobody(broker: Broker) -> dict[str, Any]:
    return {"bootstrap.servers": broker.listeners["PLAINTEXT"]}


@pytest.fixture
def admin(broker: Broker) -> AdminClient:
    return AdminClient(login(broker, "admin"))


@pytest.fixture
def topic(admin: AdminClient) -> str:
    name = f"acls-{uuid.uuid4().hex[:12]}"
    admin.create_topics([NewTopic(name, 1)])[name].result()
    return name


def allow(
    kind: ResourceType,
    name: str,
    operation: AclOperation,
    *,
    principal: str = "User:ANONYMOUS",
    host: str = "*",
    permission: AclPermissionType = AclPermissionType.ALLOW,
    pattern: ResourcePatternType = ResourcePatternType.LITERAL,
) -> AclBinding:
    return AclBinding(kind, name, pattern, principal, host, operation, permission)


ALL = AclBindingFilter(
    ResourceType.ANY,
    None,
    ResourcePatternType.ANY,
    None,
    None,
    AclOperation.ANY,
    AclPermissionType.ANY,
)


def of(name: str) -> AclBindingFilter:
    """Everything that says something about a resource of a name."""
    return AclBindingFilter(
        ResourceType.ANY,
        name,
        ResourcePatternType.MATCH,
        None,
        None,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )


@pytest.fixture
def grant(admin: AdminClient) -> Iterator[Callable[..., None]]:
    """Create entries that are gone after the test."""

    def create(*acls: AclBinding) -> None:
        for future in admin.create_acls(list(acls)).values():
            future.result()

    yield create
    (gone,) = admin.delete_acls([ALL]).values()
    gone.result()


def refusal(ask: Callable[[], Any]) -> int:
    with pytest.raises(KafkaException) as caught:
        ask()
    return int(caught.value.args[0].code())


def produce(settings: dict[str, Any], topic: str, **more: Any) -> KafkaError | None:
    """Produce one message; return what it met."""
    producer = Producer({**settings, **more})
    told: list[KafkaError | None] = []
    producer.produce(topic, b"x", on_delivery=lambda error, _: told.append(error))
    assert producer.flush(LONGEST_S) == 0
    return told[0]


def consume(settings: dict[str, Any], topic: str) -> Any:
    """Return the value of the first message, or the code of the first error."""
    consumer = Consumer({**settings, "group.id": "unused", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        message = consumer.poll(LONGEST_S)
        assert message is not None
        error = message.error()
        return message.value() if error is None else error.code()
    finally:
        consumer.close()


# -- their admin calls -----------------------------------------------------------------


def test_librdkafka_creates_shows_and_deletes_acls(admin, grant) -> None:
    wanted = [
        allow(ResourceType.TOPIC, "größe", AclOperation.READ, principal="User:Zoë"),
        allow(ResourceType.TOPIC, "*", AclOperation.DESCRIBE, host="192.0.2.7"),
        allow(
            ResourceType.GROUP,
            "team-",
            AclOperation.ALL,
            pattern=ResourcePatternType.PREFIXED,
            permission=AclPermissionType.DENY,
        ),
        allow(ResourceType.BROKER, "kafka-cluster", AclOperation.ALTER),
        allow(ResourceType.TRANSACTIONAL_ID, "t", AclOperation.WRITE),
    ]
    grant(*wanted)
    grant(wanted[0])
    assert set(admin.describe_acls(ALL).result()) == set(wanted)
    assert set(admin.describe_acls(of("größe")).result()) == {*wanted[:2]}
    assert set(admin.describe_acls(of("team-a")).result()) == {*wanted[1:3]}
    (deleted,) = admin.delete_acls([of("team-a")]).values()
    assert set(deleted.result()) == set(wanted[1:3])
    assert len(admin.describe_acls(ALL).result()) == 3


def test_librdkafka_is_told_what_is_wrong_with_an_acl(admin) -> None:
    for acl in (
        allow(ResourceType.BROKER, "another", AclOperation.ALTER),
        allow(ResourceType.TOPIC, "t", AclOperation.READ, principal="alice"),
    ):
        (future,) = admin.create_acls([acl]).values()
        assert refusal(future.result) == KafkaError.INVALID_REQUEST
    assert admin.describe_acls(ALL).result() == []


def test_kafka_python_creates_shows_and_deletes_acls(broker, admin, grant) -> None:
    client = KafkaAdminClient(
        bootstrap_servers=broker.listeners["SASL_PLAINTEXT"],
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        sasl_plain_username="admin",
        sasl_plain_password="admin-secret",
    )
    try:
        acl = ACL(
            principal="User:bob",
            host="*",
            operation=PyOperation.WRITE,
            permission_type=PyPermission.ALLOW,
            resource_pattern=ResourcePattern(PyResource.TOPIC, "p", PyPattern.PREFIXED),
        )
        made = client.create_acls([acl])
        assert made["failed"] == []
        wanted = ACLFilter(
            principal=None,
            host=None,
            operation=PyOperation.ANY,
            permission_type=PyPermission.ANY,
            resource_pattern=ResourcePatternFilter(PyResource.ANY, None, PyPattern.ANY),
        )
        found, error = client.describe_acls(wanted)
        assert error is kafka.errors.NoError
        assert found == [acl]
        ((_, matching, error),) = client.delete_acls([wanted])
        assert error is kafka.errors.NoError
        assert list(matching) == [acl]
    finally:
        client.close()


def test_who_may_not_sees_and_changes_no_acls(broker) -> None:
    client = AdminClient(nobody(broker))
    denied = KafkaError.CLUSTER_AUTHORIZATION_FAILED
    acl = allow(ResourceType.TOPIC, "t", AclOperation.ALL)
    for future in (
        *client.create_acls([acl]).values(),
        *client.delete_acls([ALL]).values(),
    ):
        assert refusal(future.result) == denied


def test_kafka_python_is_told_why_it_is_shown_no_acls(broker, own_broker) -> None:
    everything = ACLFilter(
        principal=None,
        host=None,
        operation=PyOperation.ANY,
        permission_type=PyPermission.ANY,
        resource_pattern=ResourcePatternFilter(PyResource.ANY, None, PyPattern.ANY),
    )
    for address, error in (
        (
            broker.listeners["PLAINTEXT"],
            kafka.errors.ClusterAuthorizationFailedError,
        ),
        (own_broker.bootstrap, kafka.errors.SecurityDisabledError),
    ):
        client = KafkaAdminClient(bootstrap_servers=address)
        try:
            with pytest.raises(error):
                client.describe_acls(everything)
        finally:
            client.close()


def test_without_an_authorizer_acls_are_said_to_be_disabled(own_broker) -> None:
    client = AdminClient({"bootstrap.servers": own_broker.bootstrap})
    disabled = KafkaError.SECURITY_DISABLED
    acl = allow(ResourceType.TOPIC, "t", AclOperation.ALL)
    for future in client.create_acls([acl]).values():
        assert refusal(future.result) == disabled


# -- and obeyed -----------------------------------------------------------------------


def test_librdkafka_is_denied_a_topic_and_then_allowed(broker, topic, grant) -> None:
    quick = {"message.timeout.ms": LONGEST_S * 1000}
    # It looks for its group's coordinator, though it needs none.
    grant(allow(ResourceType.GROUP, "unused", AclOperation.READ))
    error = produce(nobody(broker), topic, **quick)
    assert error is not None and error.code() == DENIED_TOPIC
    grant(allow(ResourceType.TOPIC, topic, AclOperation.WRITE))
    assert produce(nobody(broker), topic, **quick) is None
    assert consume(nobody(broker), topic) == DENIED_TOPIC
    grant(allow(ResourceType.TOPIC, topic, AclOperation.READ, host="127.0.0.1"))
    assert consume(nobody(broker), topic) == b"x"
    assert produce(login(broker, "alice"), topic, **quick) is not None


def test_a_denial_by_host_or_name_counts_from_the_next_request_on(
    broker, topic, grant
) -> None:
    """Also for what took the short cut: a topic that everybody may write to."""
    grant(
        allow(ResourceType.TOPIC, topic, AclOperation.ALL, principal="User:*"),
        allow(ResourceType.GROUP, "unused", AclOperation.READ),
    )
    producer = Producer({**nobody(broker), "acks": 1, "linger.ms": 0})
    told: list[Any] = []

    def send() -> Any:
        producer.produce(topic, b"x", on_delivery=lambda error, _: told.append(error))
        assert producer.flush(LONGEST_S) == 0
        return told.pop()

    assert [send() for _ in range(10)] == [None] * 10
    deny = AclPermissionType.DENY
    grant(
        allow(
            ResourceType.TOPIC,
            topic,
            AclOperation.WRITE,
            host="127.0.0.1",
            permission=deny,
        )
    )
    error = send()
    assert error is not None and error.code() == DENIED_TOPIC
    assert consume(nobody(broker), topic) == b"x"


def test_topics_that_may_not_be_described_are_not_listed(broker, topic, grant) -> None:
    client = AdminClient(nobody(broker))
    assert topic not in client.list_topics(timeout=LONGEST_S).topics
    (described,) = client.list_topics(topic, timeout=LONGEST_S).topics.values()
    assert described.error.code() == DENIED_TOPIC
    grant(allow(ResourceType.TOPIC, topic, AclOperation.DESCRIBE))
    assert topic in client.list_topics(timeout=LONGEST_S).topics
    (future,) = client.create_topics([NewTopic("new", 1)]).values()
    assert refusal(future.result) == DENIED_TOPIC
    (future,) = client.delete_topics([topic]).values()
    assert refusal(future.result) == DENIED_TOPIC


def test_a_group_needs_the_group_and_the_topic(broker, topic, grant) -> None:
    group = f"group-of-{topic}"
    settings = {
        **login(broker, "alice"),
        "group.id": group,
        "auto.offset.reset": "earliest",
    }
    alice = {"principal": "User:alice"}
    assert produce(login(broker, "admin"), topic) is None

    def first() -> Any:
        consumer = Consumer(settings)
        try:
            consumer.subscribe([topic])
            message = consumer.poll(LONGEST_S)
            assert message is not None
            if message.error() is not None:
                return message.error().code()
            consumer.commit(message, asynchronous=False)
            return message.value()
        finally:
            consumer.close()

    grant(allow(ResourceType.TOPIC, topic, AclOperation.READ, **alice))
    assert first() == KafkaError.GROUP_AUTHORIZATION_FAILED
    grant(allow(ResourceType.GROUP, group, AclOperation.READ, **alice))
    assert first() == b"x"


def test_a_transaction_needs_its_id_and_the_topic(broker, topic, grant) -> None:
    identity = f"id-of-{topic}"
    settings = {**login(broker, "alice"), "transactional.id": identity}
    alice = {"principal": "User:alice"}
    denied = KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert refusal(lambda: Producer(settings).init_transactions(LONGEST_S)) == denied
    grant(
        allow(ResourceType.TRANSACTIONAL_ID, identity, AclOperation.WRITE, **alice),
        allow(ResourceType.TOPIC, topic, AclOperation.DESCRIBE, **alice),
    )
    producer = Producer(settings)
    producer.init_transactions(LONGEST_S)
    producer.begin_transaction()
    told: list[Any] = []
    producer.produce(topic, b"x", on_delivery=lambda error, _: told.append(error))
    with pytest.raises(KafkaException):
        producer.commit_transaction(LONGEST_S)
    assert told[0] is not None
    grant(allow(ResourceType.TOPIC, topic, AclOperation.WRITE, **alice))
    producer = Producer(settings)
    producer.init_transactions(LONGEST_S)
    producer.begin_transaction()
    producer.produce(topic, b"y")
    producer.commit_transaction(LONGEST_S)


def test_who_may_write_to_a_topic_may_do_so_idempotently(broker, topic, grant) -> None:
    settings = {**login(broker, "alice"), "enable.idempotence": True}
    grant(allow(ResourceType.TOPIC, topic, AclOperation.WRITE, principal="User:alice"))
    assert produce(settings, topic) is None


def test_kafka_python_is_told_the_same(broker, topic, grant) -> None:
    address = broker.listeners["PLAINTEXT"]
    consumer = KafkaConsumer(bootstrap_servers=address, consumer_timeout_ms=1000)
    producer = KafkaProducer(bootstrap_servers=address, acks=1)
    try:
        with pytest.raises(kafka.errors.TopicAuthorizationFailedError):
            producer.send(topic, b"x").get(LONGEST_S)
        grant(
            allow(ResourceType.TOPIC, topic, AclOperation.WRITE),
            allow(ResourceType.TOPIC, topic, AclOperation.READ),
        )
        producer.send(topic, b"x").get(LONGEST_S)
        consumer.assign([PyTopicPartition(topic, 0)])
        consumer.seek_to_beginning()
        assert next(consumer).value == b"x"
    finally:
        producer.close()
        consumer.close()


def test_acls_survive_the_kill_of_all_processes(tmp_path: Path) -> None:
    config = {**CONFIG, "allow.everyone.if.no.acl.found": "true"}
    with Broker(tmp_path / "data", config) as first:
        client = AdminClient(login(first, "admin"))
        acl = allow(ResourceType.TOPIC, "t", AclOperation.READ, principal="User:alice")
        for future in client.create_acls([acl]).values():
            future.result()
        first.kill()
        first.start()
        client = AdminClient(login(first, "admin"))
        assert client.describe_acls(ALL).result() == [acl]
        error = produce(nobody(first), "t", **{"message.timeout.ms": 20_000})
        assert error is not None and error.code() == DENIED_TOPIC
        assert produce(nobody(first), "open") is None


# -- tools ----------------------------------------------------------------------------


@pytest.mark.skipif(
    not have_java_tools(), reason="no Apache Kafka in .downloads/java: scripts/test"
)
def test_kafka_acls_adds_lists_and_removes(broker, admin, grant, tmp_path) -> None:
    login_file = tmp_path / "admin.properties"
    login_file.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.jaas.config="
        f'{MODULE} username="admin" password="admin-secret";\n'
    )

    def tool(*arguments: str) -> str:
        done = subprocess.run(
            java_command(
                f"{TOOLS}.AclCommand",
                "--bootstrap-server",
                broker.listeners["SASL_PLAINTEXT"],
                "--command-config",
                str(login_file),
                *arguments,
            ),
            capture_output=True,
            text=True,
            timeout=2 * LONGEST_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    bob = (
        "--allow-principal",
        "User:bob",
        "--topic",
        "java-",
        "--resource-pattern-type",
    )
    tool("--add", *bob, "prefixed", "--producer")
    listed = tool("--list", "--topic", "java-x", "--resource-pattern-type", "match")
    assert "name=java-, patternType=PREFIXED" in listed
    for operation in ("WRITE", "DESCRIBE", "CREATE"):
        assert f"principal=User:bob, host=*, operation={operation}" in listed
    assert len(admin.describe_acls(of("java-x")).result()) == 3
    tool("--remove", *bob, "prefixed", "--producer", "--force")
    assert admin.describe_acls(ALL).result() == []
