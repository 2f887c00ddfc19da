"""Apache Kafka goes on with our directory, and we with its, as its own tools say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
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
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from tests.compat.test_dump_log import dump
from tests.support.apache_kafka import ApacheKafka
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.fetch_clients import (
    OLDER_KAFKAS,
    have_java_tools,
    have_older_kafka,
    older_kafka_dir,
)
from tests.support.metadata import start

pytestmark = pytest.mark.skipif(
    not have_java_tools(),
    reason="no Apache Kafka in .downloads/java: scripts/test fetches it with Maven",
)

AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
CONFIG = {
    "node.id": 1,
    "offsets.topic.num.partitions": 5,
    "transaction.state.log.num.partitions": 5,
    "authorizer.class.name": AUTHORIZER,
    "super.users": "User:ANONYMOUS",
}
PROPERTIES = f"""\
authorizer.class.name={AUTHORIZER}
super.users=User:ANONYMOUS
transaction.state.log.num.partitions=5
"""
QUIET = {"log_level": 0}
_COORDINATOR_COMES = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)
OPEN = "open"  # a topic, and a transactional id
ANY_ACL = AclBindingFilter(
    ResourceType.ANY,
    None,
    ResourcePatternType.ANY,
    None,
    None,
    AclOperation.ANY,
    AclPermissionType.ANY,
)


def _commit(group: Consumer, offset: TopicPartition) -> bool:
    """Commit an offset, unless the group's coordinator has yet to be elected.

    Kafka makes the topic of the offsets at the first question for a coordinator. It
    names the coordinator before that broker has become it, and librdkafka hands the
    error to its user.
    """
    try:
        group.commit(offsets=[offset], asynchronous=False)
    except KafkaException as error:
        if error.args[0].code() not in _COORDINATOR_COMES:
            raise
        return False
    return True


class Client:
    """Makes things on a broker, and looks what is there."""

    def __init__(self, bootstrap: str) -> None:
        self._at = {"bootstrap.servers": bootstrap, **QUIET}
        self._admin = AdminClient(self._at)

    def make(self, name: str, **more: str) -> None:
        """Make a topic with a config, an ACL, a user, records and a group's offsets."""
        config = {"retention.ms": "77777777"}
        config |= {key.replace("_", "."): value for key, value in more.items()}
        topic = NewTopic(name, 3, 1, config=config)
        acl = AclBinding(
            ResourceType.TOPIC,
            name,
            ResourcePatternType.LITERAL,
            "User:alice",
            "*",
            AclOperation.READ,
            AclPermissionType.ALLOW,
        )
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        user = UserScramCredentialUpsertion(f"user-{name}", info, b"pw", b"0" * 16)
        for futures in (
            self._admin.create_topics([topic]),
            self._admin.create_acls([acl]),
            self._admin.alter_user_scram_credentials([user]),
        ):
            for future in futures.values():
                future.result()
        producer = Producer({**self._at, "enable.idempotence": True})
        for number in range(30):
            key, value = b"key %d" % (number % 7), b"%d" % number
            producer.produce(name, value, key, partition=number % 3)
        assert producer.flush(60) == 0
        transactional = Producer({**self._at, "transactional.id": name})
        transactional.init_transactions(60)
        transactional.begin_transaction()
        transactional.produce(name, b"committed", b"key", partition=0)
        transactional.commit_transaction(60)
        group = Consumer({**self._at, "group.id": name, "enable.auto.commit": False})
        wait_until(lambda: _commit(group, TopicPartition(name, 1, 7)), timeout_s=60)
        group.close()

    def state(self) -> dict[str, object]:
        """Return all that can be seen; wait for partitions that have no leader yet."""
        wait_until(self._has_leaders, timeout_s=60)
        names = [n for n in self._topics() if not n.startswith(("__", OPEN))]
        return {name: self._topic(name) for name in names} | {
            "acls": sorted(map(repr, self._admin.describe_acls(ANY_ACL).result())),
            "users": sorted(self._admin.describe_user_scram_credentials().result()),
        }

    def open_transaction(self) -> Producer:
        """Leave a transaction open; it ends if the producer that is returned does."""
        self._admin.create_topics([NewTopic(OPEN, 1, 1)])[OPEN].result()
        producer = Producer(
            {
                **self._at,
                "transactional.id": OPEN,
                "transaction.timeout.ms": 900_000,  # the longest that a broker allows
            }
        )
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(OPEN, b"open", partition=0)
        assert producer.flush(60) == 0
        return producer

    def in_open_topic(self, level: str) -> list[bytes]:
        """Return the records of the topic of open transactions, up to where it ends."""
        reader = Consumer(
            {
                **self._at,
                "group.id": "reader",
                "isolation.level": level,
                "enable.partition.eof": True,
            }
        )
        reader.assign([TopicPartition(OPEN, 0, 0)])
        found = []
        while (message := reader.poll(60)) is not None and message.error() is None:
            found.append(message.value())
        assert message is not None
        reader.close()
        return found

    def end_transaction(self) -> None:
        """Abort the transaction that was left open, and commit another one."""
        producer = Producer({**self._at, "transactional.id": OPEN})
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(OPEN, b"committed", partition=0)
        producer.commit_transaction(60)

    def _topics(self) -> dict[str, object]:
        return dict(self._admin.list_topics(timeout=60).topics)

    def _has_leaders(self) -> bool:
        partitions = [p for t in self._topics().values() for p in t.partitions.values()]
        return all(partition.leader == 1 for partition in partitions)

    def _topic(self, name: str) -> object:
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        (described,) = self._admin.describe_configs([resource]).values()
        configs = {k: v.value for k, v in described.result().items() if v.source == 1}
        reader = Consumer({**self._at, "group.id": "reader"})
        reader.assign([TopicPartition(name, index, 0) for index in range(3)])
        records = reader.consume(31, timeout=60)
        ends = [reader.get_watermark_offsets(TopicPartition(name, i)) for i in range(3)]
        reader.close()
        return (
            configs,
            sorted((m.partition(), m.offset(), m.key(), m.value()) for m in records),
            ends,
            self._offsets(name),
        )

    def _offsets(self, group: str) -> list[tuple[str, int, int]]:
        found: list[tuple[str, int, int]] = []

        def are_there() -> bool:
            asked = [ConsumerGroupTopicPartitions(group)]
            try:
                result = self._admin.list_consumer_group_offsets(asked)[group].result()
            except KafkaException:  # the coordinator loads
                return False
            found[:] = [
                (t.topic, t.partition, t.offset) for t in result.topic_partitions
            ]
            return True

        wait_until(are_there, timeout_s=60)
        return found


def test_a_directory_goes_from_us_to_kafka_and_back(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Broker(data, CONFIG) as ours:
        client = Client(ours.bootstrap)
        client.make("first")
        at_first = client.state()
    start(data).replace_records()  # Kafka begins with a snapshot, which has our rows
    assert len(list(data.glob("__cluster_metadata-0/*.checkpoint"))) == 1
    with ApacheKafka(data, heap="400m", properties=PROPERTIES) as theirs:
        client = Client(theirs.bootstrap)
        assert client.state() == at_first
        client.make("second")
        at_second = client.state()
    with Broker(data, CONFIG) as ours:
        client = Client(ours.bootstrap)
        assert client.state() == at_second
        client.make("third")
        at_third = client.state()
        assert at_third["first"] == at_first["first"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("version", "end"), [*zip(OLDER_KAFKAS, ("stop", "kill"), strict=True)]
)
def test_a_directory_of_an_older_kafka_goes_to_us_and_back(
    tmp_path: Path, version: str, end: str
) -> None:
    if not have_older_kafka(version):
        pytest.skip(f"no Apache Kafka {version} in .downloads: scripts/test fetches it")
    data, jars = tmp_path / "data", older_kafka_dir(version)
    theirs = ApacheKafka(data, heap="400m", properties=PROPERTIES, jars=jars)
    with theirs:
        client = Client(theirs.bootstrap)
        client.make("first")
        client.make("compacted", cleanup_policy="compact", segment_bytes="1048576")
        at_first = client.state()
        left_open = client.open_transaction()
        assert client.in_open_topic("read_committed") == []
        if end == "kill":
            theirs.kill()
    with Broker(data, CONFIG) as ours:
        client = Client(ours.bootstrap)
        assert client.state() == at_first
        assert client.in_open_topic("read_uncommitted") == [b"open"]
        assert client.in_open_topic("read_committed") == []
        client.end_transaction()
        assert client.in_open_topic("read_committed") == [b"committed"]
        client.make("second")
        at_second = client.state()
    with theirs:
        client = Client(theirs.bootstrap)
        assert client.state() == at_second
        assert client.in_open_topic("read_committed") == [b"committed"]
        client.make("third")
    del left_open


def test_kafka_dump_log_reads_our_metadata_log_and_snapshots(tmp_path: Path) -> None:
    folder = tmp_path / "__cluster_metadata-0"
    registry = start(tmp_path)
    for number in range(20):
        registry.create_topic(f"t{number}", 60)
        registry.delete_topic(f"t{number}")
    registry.create_topic("kept", 3, {"retention.ms": "5"})
    start(tmp_path).create_topic("more", 1)
    files = [*folder.glob("*.checkpoint"), *folder.glob("*.log")]
    assert len(files) == 2
    theirs = dump(files, "--cluster-metadata-decoder")
    names = [str(file) for file in sorted(files)]
    ours = subprocess.run(
        [
            sys.executable,
            "-m",
            "mpbroker",
            "dump",
            "--cluster-metadata-decoder",
            *names,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ours.stdout == theirs
    for kind in ("TOPIC", "PARTITION", "CONFIG", "FEATURE_LEVEL"):
        assert f'"type":"{kind}_RECORD"' in theirs
    assert "SnapshotHeader" in theirs and "SnapshotFooter" in theirs
    start(tmp_path).replace_records()  # with fields of our own
    (snapshot,) = folder.glob("*.checkpoint")
    shown = dump([snapshot], "--cluster-metadata-decoder")
    assert shown.count('"type":"PARTITION_RECORD"') == 4
