"""AdminClient, against the broker under test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpbroker.base.config_def import ConfigError
from mpbroker.client.admin.admin_client import (
    EARLIEST,
    LATEST,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    ConfigResourceType,
    ConfigSource,
    PatternType,
    ResourceType,
    TopicPartition,
)
from mpbroker.client.consumer.consumer import Consumer
from mpbroker.client.errors import BrokerUnavailableError, ClientError
from mpbroker.producer import Producer
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.ports import reusable_port


@pytest.fixture
def admin(bootstrap: str) -> Iterator[AdminClient]:
    with AdminClient(bootstrap_servers=bootstrap) as admin:
        yield admin


@pytest.fixture
def topic(admin: AdminClient, topic_name: str) -> Iterator[str]:
    """A topic of two partitions."""
    admin.create_topic(topic_name, partitions=2)
    yield topic_name
    admin.delete_topic(topic_name)


def write(bootstrap: str, topic: str, times_ms: list[int]) -> None:
    with Producer(bootstrap_servers=bootstrap) as producer:
        for time_ms in times_ms:
            producer.send(topic, b"value", partition=1, timestamp_ms=time_ms)


def refusal_of(call, *arguments, **options) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        call(*arguments, **options)
    return caught.value.error_code


def test_a_topic_is_created_listed_described_grown_and_deleted(admin, topic_name):
    created = admin.create_topic(topic_name, partitions=2, replication_factor=1)
    assert (created.name, created.partitions) == (topic_name, 2)
    assert created in admin.list_topics()
    described = admin.describe_topic(topic_name)
    assert described.topic_id == created.topic_id is not None
    (node,) = admin.describe_cluster().brokers
    assert [tuple(each) for each in described.partitions] == [
        (0, node, [node], [node]),
        (1, node, [node], [node]),
    ]
    admin.create_partitions(topic_name, 3)
    assert len(admin.describe_topic(topic_name).partitions) == 3
    admin.delete_topic(topic_name)
    assert topic_name not in [each.name for each in admin.list_topics()]
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert refusal_of(admin.describe_topic, topic_name) is unknown
    assert refusal_of(admin.delete_topic, topic_name) is unknown


def test_a_topic_that_exists_is_refused_and_validation_creates_none(admin, topic):
    exists = ErrorCode.TOPIC_ALREADY_EXISTS
    assert refusal_of(admin.create_topic, topic) is exists
    created = admin.create_topic(f"{topic}-b", partitions=1, validate_only=True)
    assert (created.name, created.topic_id) == (f"{topic}-b", None)
    assert f"{topic}-b" not in [each.name for each in admin.list_topics()]


def test_internal_topics_are_listed_if_they_are_asked_for(admin, bootstrap, topic):
    with Consumer(bootstrap_servers=bootstrap, group_id=f"g-{topic}") as consumer:
        consumer.commit({(topic, 1): 0})
    offsets = "__consumer_offsets"
    assert offsets not in [each.name for each in admin.list_topics()]
    found = {each.name: each for each in admin.list_topics(list_internal=True)}
    assert found[offsets].is_internal and not found[topic].is_internal
    admin.delete_group(f"g-{topic}")


def test_offsets_are_found_by_time_and_records_are_deleted(admin, bootstrap, topic):
    now_ms = int(time.time() * 1000)
    write(bootstrap, topic, [now_ms, now_ms + 10, now_ms + 20])
    where = TopicPartition(topic, 1)
    ends = admin.list_offsets({where: LATEST, (topic, 0): LATEST})
    assert {each: found.offset for each, found in ends.items()} == {
        where: 3,
        TopicPartition(topic, 0): 0,
    }
    assert admin.list_offsets({where: now_ms + 5})[where] == (1, now_ms + 10)
    assert admin.list_offsets({where: now_ms + 21})[where].offset == -1
    assert admin.delete_records({(topic, 1): 2}) == {where: 2}
    assert admin.list_offsets({where: EARLIEST})[where].offset == 2
    beyond = ErrorCode.OFFSET_OUT_OF_RANGE
    assert refusal_of(admin.delete_records, {where: 4}) is beyond


def test_configs_are_described_set_and_put_back(admin, topic):
    resource = ConfigResource(ConfigResourceType.TOPIC, topic)
    admin.alter_configs(resource, {"retention.ms": "1000", "segment.ms": "2000"})
    (entry,) = admin.describe_configs(resource, ["retention.ms"])
    assert (entry.name, entry.value) == ("retention.ms", "1000")
    assert entry.source is ConfigSource.TOPIC_CONFIG
    admin.alter_configs(resource, {"segment.ms": "3000"}, ["retention.ms"])
    set_here = {
        each.name: each.value
        for each in admin.describe_configs(resource)
        if each.source is ConfigSource.TOPIC_CONFIG
    }
    assert set_here == {"segment.ms": "3000"}
    invalid = ErrorCode.INVALID_CONFIG
    assert refusal_of(admin.alter_configs, resource, {"retention.ms": "x"}) is invalid


def test_a_brokers_configs_are_described(admin):
    controller = str(admin.describe_cluster().controller_id)
    resource = ConfigResource(ConfigResourceType.BROKER, controller)
    (entry,) = admin.describe_configs(resource, ["num.io.threads"])
    assert int(entry.value) >= 1
    assert not entry.is_sensitive


def test_a_group_is_listed_described_moved_and_deleted(admin, bootstrap, topic):
    now_ms = int(time.time() * 1000)
    write(bootstrap, topic, [now_ms, now_ms + 10, now_ms + 20])
    group, first, second = f"g-{topic}", (topic, 0), (topic, 1)
    settings = {"group_id": group, "auto_offset_reset": "earliest"}
    with Consumer(bootstrap_servers=bootstrap, **settings) as consumer:
        consumer.subscribe([topic])
        while not consumer.poll(1000):
            pass
        consumer.commit()
        (member,) = admin.describe_group(group).members
        assert member.partitions == [first, second]
        (listed,) = [each for each in admin.list_groups() if each.group_id == group]
        assert (listed.state, listed.protocol_type) == ("Stable", "consumer")
        member_is_there = ErrorCode.UNKNOWN_MEMBER_ID
        assert refusal_of(admin.alter_group_offsets, group, {second: 0}) is (
            member_is_there
        )
        assert refusal_of(admin.delete_group, group) is ErrorCode.NON_EMPTY_GROUP
    assert admin.list_group_offsets(group)[second] == 3
    admin.alter_group_offsets(group, {second: 1})
    assert admin.list_group_offsets(group)[second] == 1
    for to, offset in ((EARLIEST, 0), (LATEST, 3), (now_ms + 5, 1), (now_ms + 99, 3)):
        moved = admin.reset_group_offsets(group, [topic], to)
        assert moved == admin.list_group_offsets(group) == {first: 0, second: offset}
    assert [each.group_id for each in admin.list_groups(["empty"])].count(group) == 1
    admin.delete_group(group)
    assert admin.list_group_offsets(group) == {}
    not_found = ErrorCode.GROUP_ID_NOT_FOUND
    assert refusal_of(admin.describe_group, group) is not_found


def test_quotas_are_set_and_removed(admin, topic_name):
    entity = {"client-id": topic_name}
    admin.alter_quotas(entity, {"producer_byte_rate": 1e6, "consumer_byte_rate": 2e6})
    (described,) = admin.describe_quotas(entity)
    assert described.entity == entity
    assert described.values == {"producer_byte_rate": 1e6, "consumer_byte_rate": 2e6}
    assert described in admin.describe_quotas()
    admin.alter_quotas(entity, dict.fromkeys(described.values))
    assert admin.describe_quotas(entity) == []


def test_scram_users_are_created_listed_and_deleted(admin, topic_name):
    user = f"user-{topic_name}"
    admin.set_scram_password(user, "SCRAM-SHA-256", "secret")
    admin.set_scram_password(user, "SCRAM-SHA-512", "secret", iterations=8192)
    (found,) = admin.list_scram_users([user])
    assert found == (user, {"SCRAM-SHA-256": 4096, "SCRAM-SHA-512": 8192})
    assert found in admin.list_scram_users()
    for mechanism in found.mechanisms:
        admin.delete_scram_credential(user, mechanism)
    not_found = ErrorCode.RESOURCE_NOT_FOUND
    assert refusal_of(admin.list_scram_users, [user]) is not_found
    assert refusal_of(admin.delete_scram_credential, user, "SCRAM-SHA-256") is (
        not_found
    )


def test_acls_are_created_described_and_deleted(make_broker):
    broker = make_broker(
        {
            "authorizer.class.name": (
                "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
            ),
            "super.users": "User:ANONYMOUS",
        }
    )
    acl = AclBinding(
        ResourceType.TOPIC,
        "events",
        PatternType.LITERAL,
        "User:alice",
        "*",
        AclOperation.READ,
        AclPermissionType.ALLOW,
    )
    other = acl._replace(principal="User:bob")
    with AdminClient(bootstrap_servers=broker.bootstrap) as admin:
        admin.create_acls([acl, other])
        assert sorted(admin.describe_acls()) == [acl, other]
        assert admin.describe_acls(AclFilter(principal="User:bob")) == [other]
        assert admin.delete_acls(AclFilter(principal="User:alice")) == [acl]
        assert admin.describe_acls() == [other]


def test_acls_are_refused_by_a_broker_without_an_authorizer(own_broker):
    with AdminClient(bootstrap_servers=own_broker.bootstrap) as admin:
        assert refusal_of(admin.describe_acls) is ErrorCode.SECURITY_DISABLED


def test_settings_are_checked_before_anything_is_asked():
    with pytest.raises(ConfigError, match=r"bootstrap\.servers is not set"):
        AdminClient()
    with pytest.raises(ConfigError, match=r"request\.timeout\.ms"):
        AdminClient({"bootstrap.servers": "a:1"}, request_timeout=1)


def test_a_broker_that_is_not_there_is_an_error_that_names_it():
    with (
        AdminClient(
            {"bootstrap.servers": "127.0.0.1:1", "default.api.timeout.ms": 300}
        ) as admin,
        pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1:1"),
    ):
        admin.list_topics()


def test_a_broker_that_is_away_for_a_while_is_waited_for(tmp_path):
    port = reusable_port()
    settings = {"listeners": f"PLAINTEXT://127.0.0.1:{port}"}
    with (
        AdminClient(bootstrap_servers=f"127.0.0.1:{port}") as admin,
        ThreadPoolExecutor(1) as thread,
    ):
        with Broker(tmp_path / "data", settings):
            admin.create_topic("kept")
        listing = thread.submit(admin.list_topics)
        # Several attempts have failed before it is there again.
        wait_until(lambda: admin._brokers.client.failures(0) > 2)
        assert not listing.done()
        with Broker(tmp_path / "data", settings):
            assert [topic.name for topic in listing.result()] == ["kept"]


def test_a_closed_client_and_a_forked_one_say_what_they_are(bootstrap):
    admin = AdminClient(bootstrap_servers=bootstrap)
    admin.list_topics()
    child = os.fork()
    if not child:
        code = 1
        try:
            admin.close()  # of no effect here
            admin.list_topics()
        except ClientError as error:
            code = 42 if "after the fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    admin.list_topics()
    admin.close()
    admin.close()
    with pytest.raises(ClientError, match="the admin client is closed"):
        admin.list_topics()
