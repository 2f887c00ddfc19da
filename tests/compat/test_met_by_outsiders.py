"""What people met who came from Apache Kafka: each kind asked of both brokers.

A row asks by the same bytes, or by the same client, and says what Apache Kafka 4.4.0
answers. tests/compat/test_reference.py runs this module against that Kafka; here it
runs against us. Where we differ on purpose a row says both, and docs/differences.md
tells why. More about numbers 1, 2, 5 and 6 is in tests/compat/test_answers.py. Numbers
that are about one broker's files, clients or commands are named in ELSEWHERE.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    ScramCredentialUpsertion,
)
from mpbroker.protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
)
from mpbroker.protocol.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
)
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)
from mpbroker.protocol.messages.create_acls import (
    AclCreation,
    CreateAclsRequest,
    CreateAclsResponse,
)
from mpbroker.protocol.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from mpbroker.protocol.messages.delete_topics import (
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
)
from mpbroker.protocol.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)
from mpbroker.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from mpbroker.protocol.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from mpbroker.protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
)
from mpbroker.protocol.messages.leave_group import (
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
)
from mpbroker.protocol.messages.list_groups import ListGroupsRequest, ListGroupsResponse
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
)
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.messages.sasl_authenticate import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
)
from mpbroker.protocol.messages.sasl_handshake import (
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from mpbroker.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from mpbroker.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.broker.load import frame
from tests.client import certificates
from tests.compat.adapters.line_client import LineClient
from tests.compat.test_answers import Wire, alter, batch, now_ms, told
from tests.support import batch_forgery
from tests.support.apache_kafka import (
    AUDIENCE,
    ISSUER,
    LISTENERS_VARIABLE,
    PASSWORD,
    PROTOCOLS,
    USER,
    java_command,
    one_line,
    token,
    write_jwks,
)
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.fetch_clients import ROOT, have_java_clients
from tests.support.patience import LONGEST_S

IS_KAFKA: Final = LISTENERS_VARIABLE in os.environ
TOPIC, GROUP = 2, 32  # types of resources in requests about configs
_NOT_YET: Final = {
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
}
_PLAIN: Final = "org.apache.kafka.common.security.plain.PlainLoginModule required"


def config_of_ours(directory: Path) -> dict[str, object]:
    """As tests/support/apache_kafka.py sets up Kafka for this module."""
    jaas = f'{_PLAIN} user_{USER}="{PASSWORD}";'
    return {
        "listeners": ",".join(f"{each}://127.0.0.1:0" for each in PROTOCOLS),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": one_line(certificates.BROKER_KEY),
        "ssl.keystore.certificate.chain": one_line(certificates.BROKER),
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,OAUTHBEARER",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": jaas,
        "listener.name.sasl_ssl.plain.sasl.jaas.config": jaas,
        "sasl.oauthbearer.jwks.endpoint.url": write_jwks(directory / "jwks.json"),
        "sasl.oauthbearer.expected.issuer": ISSUER,
        "sasl.oauthbearer.expected.audience": AUDIENCE,
        "authorizer.class.name": (
            "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
        ),
        "super.users": "User:ANONYMOUS",
        "allow.everyone.if.no.acl.found": "true",
        "group.initial.rebalance.delay.ms": 0,
        "offsets.topic.num.partitions": 1,
        "transaction.state.log.num.partitions": 1,
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 200,
    }


@pytest.fixture(scope="module")
def listeners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The addresses of the broker under test, by protocol."""
    if IS_KAFKA:
        yield json.loads(os.environ[LISTENERS_VARIABLE])
        return
    directory = tmp_path_factory.mktemp("outsiders")
    with Broker(directory / "data", config_of_ours(directory)) as broker:
        yield broker.listeners


# -- a client --------------------------------------------------------------------------


def name_of(code: int) -> str:
    return ErrorCode(code).name


class Client(Wire):
    """A connection to the broker, and what more than one row asks of it.

    Attributes:
        bootstrap: the address of the listener without a login.
        listeners: the addresses by protocol.
    """

    def __init__(self, listeners: Mapping[str, str], protocol: str = "PLAINTEXT"):
        super().__init__(listeners[protocol])
        self.listeners = listeners
        self.bootstrap = listeners["PLAINTEXT"]
        if protocol.endswith("SSL"):
            context = ssl.create_default_context(cadata=certificates.AUTHORITY)
            self.sock: socket.socket = context.wrap_socket(
                self.sock, server_hostname="localhost"
            )

    def find(self, key: str, key_type: int = 0) -> None:
        """Ask for a coordinator, which makes its topic."""
        request = FindCoordinatorRequest(key_type=key_type, coordinator_keys=[key])
        self.ask(request, 6, FindCoordinatorResponse)

    def beat(
        self, group: str, member: str, epoch: int, **more: Any
    ) -> ConsumerGroupHeartbeatResponse:
        request = ConsumerGroupHeartbeatRequest(
            group_id=group, member_id=member, member_epoch=epoch, **more
        )
        return self.ask(request, 1, ConsumerGroupHeartbeatResponse)

    def commit(
        self,
        group: str,
        topic: str,
        *partitions: int,
        member: str = "",
        epoch: int = -1,
        version: int = 9,
    ) -> list[str]:
        """Commit an offset of each partition; return the name of each error."""
        rows = [
            OffsetCommitRequestPartition(
                partition_index=number, committed_offset=1, committed_metadata=None
            )
            for number in partitions
        ]
        request = OffsetCommitRequest(
            group_id=group,
            member_id=member,
            generation_id_or_member_epoch=epoch,
            topics=[OffsetCommitRequestTopic(name=topic, partitions=rows)],
        )
        (answer,) = self.ask(request, version, OffsetCommitResponse).topics
        codes = {each.partition_index: each.error_code for each in answer.partitions}
        return [name_of(codes[number]) for number in partitions]

    def leave(self, group: str, *members: tuple[str, str | None]) -> list[str]:
        """Remove members, each named by its id and its instance id."""
        request = LeaveGroupRequest(
            group_id=group,
            members=[
                MemberIdentity(member_id=member, group_instance_id=instance)
                for member, instance in members
            ],
        )
        answer = self.ask(request, 5, LeaveGroupResponse)
        assert answer.error_code == ErrorCode.NONE
        return [name_of(each.error_code) for each in answer.members]

    def members(self, group: str) -> list[str]:
        """Return the members of a group that speaks KIP-848."""
        request = ConsumerGroupDescribeRequest(group_ids=[group])
        (answer,) = self.ask(request, 1, ConsumerGroupDescribeResponse).groups
        return [each.member_id for each in answer.members]

    def init(
        self, name: str, producer: tuple[int, int] = (-1, -1), timeout_ms: int = 60_000
    ) -> InitProducerIdResponse:
        """Ask for a producer id, and again while the coordinator comes."""
        request = InitProducerIdRequest(
            transactional_id=name,
            transaction_timeout_ms=timeout_ms,
            producer_id=producer[0],
            producer_epoch=producer[1],
        )
        found: list[InitProducerIdResponse] = []

        def is_told() -> bool:
            found[:] = [self.ask(request, 5, InitProducerIdResponse)]
            return found[0].error_code not in _NOT_YET

        self.find(name, 1)
        wait_until(is_told)
        return found[0]

    def begin(self, topic: str, timeout_ms: int = 60_000) -> tuple[int, int]:
        """Leave a transaction open that has one record; its id is the topic's name."""
        given = self.init(topic, timeout_ms=timeout_ms)
        assert given.error_code == ErrorCode.NONE
        producer = given.producer_id, given.producer_epoch
        builder = RecordBatchBuilder(
            producer_id=producer[0],
            producer_epoch=producer[1],
            base_sequence=0,
            transactional=True,
        )
        builder.append(now_ms(), None, b"value")
        data = PartitionProduceData(index=0, records=bytes(builder.build()))
        request = ProduceRequest(
            transactional_id=topic,
            acks=-1,
            timeout_ms=10_000,
            topic_data=[TopicProduceData(name=topic, partition_data=[data])],
        )

        def is_written() -> bool:
            answer = self.ask(request, 12, ProduceResponse)
            (row,) = answer.responses[0].partition_responses
            return row.error_code == ErrorCode.NONE

        wait_until(is_written)
        return producer

    def end(self, name: str, producer: tuple[int, int], commit: bool) -> EndTxnResponse:
        request = EndTxnRequest(
            transactional_id=name,
            producer_id=producer[0],
            producer_epoch=producer[1],
            committed=commit,
        )
        return self.ask(request, 5, EndTxnResponse)

    def state_of(self, name: str) -> str:
        """Return the state of a transaction."""
        request = DescribeTransactionsRequest(transactional_ids=[name])
        answer = self.ask(request, 0, DescribeTransactionsResponse)
        return answer.transaction_states[0].transaction_state

    def create_all(self, *topics: CreatableTopic, timeout_ms: int = 10_000) -> Any:
        request = CreateTopicsRequest(topics=list(topics), timeout_ms=timeout_ms)
        return self.ask(request, 7, CreateTopicsResponse).topics

    def deny(self, topic: str, host: str) -> str:
        """Deny a topic to `USER` at a host; return the name of the error."""
        acl = AclCreation(
            resource_type=2,
            resource_name=topic,
            principal=f"User:{USER}",
            host=host,
            operation=2,
            permission_type=2,
        )
        request = CreateAclsRequest(creations=[acl])
        (answer,) = self.ask(request, 3, CreateAclsResponse).results
        return name_of(answer.error_code)

    def log_in(self, mechanism: str, said: bytes) -> SaslAuthenticateResponse:
        request = SaslHandshakeRequest(mechanism=mechanism)
        self.ask(request, 1, SaslHandshakeResponse)
        say = SaslAuthenticateRequest(auth_bytes=said)
        return self.ask(say, 2, SaslAuthenticateResponse)


class Member:
    """A member of a group that speaks KIP-848; the group has the topic's name."""

    def __init__(
        self, client: Client, topic: str, name: str, instance: str | None = None
    ):
        self._client = client
        self._topic, self._name, self._instance = topic, name, instance
        (found,) = client.describe(MetadataRequestTopic(name=topic))
        self._topic_id = found.topic_id
        self.epoch = 0
        self.has: list[int] = []
        client.find(topic)
        # Kafka's reference node forgets members fast, and a test may be slow.
        alter_config(client, GROUP, topic, "consumer.session.timeout.ms", "45000")
        wait_until(self.beat)

    def beat(self) -> bool:
        """Say what it has, and take what it is given; return whether that was heard."""
        own = TopicPartitions(topic_id=self._topic_id, partitions=self.has)
        answer = self._client.beat(
            self._topic,
            self._name,
            self.epoch,
            instance_id=self._instance,
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=[self._topic],
            topic_partitions=[own] if self.has else [],
        )
        if answer.error_code in _NOT_YET:
            return False
        assert answer.error_code == ErrorCode.NONE, answer
        self.epoch = answer.member_epoch
        if answer.assignment is not None:
            rows = answer.assignment.topic_partitions
            self.has = sorted(number for row in rows for number in row.partitions)
        return True


def alter_config(client: Wire, kind: int, name: str, key: str, value: str) -> str:
    config = AlterableConfig(name=key, config_operation=0, value=value)
    resource = AlterConfigsResource(
        resource_type=kind, resource_name=name, configs=[config]
    )
    request = IncrementalAlterConfigsRequest(resources=[resource])
    (answer,) = client.ask(request, 1, IncrementalAlterConfigsResponse).responses
    return name_of(answer.error_code)


def a_topic(name: str, **configs: str) -> CreatableTopic:
    return CreatableTopic(
        name=name,
        num_partitions=1,
        replication_factor=1,
        configs=[
            CreatableTopicConfig(name=key.replace("_", "."), value=value)
            for key, value in configs.items()
        ],
    )


# -- 1 and 2: bytes --------------------------------------------------------------------


def librdkafka_in_latin_1(client: Client, topic: str) -> object:
    if shutil.which("kcat") is None:
        pytest.skip("no kcat on PATH (Debian: apt-get install kcat)")
    where = ["-b", client.bootstrap, "-L", "-X"]
    command = [b"kcat", b"-q", *map(os.fsencode, where), b"client.id=f\xfcr"]
    done = subprocess.run(command, capture_output=True, timeout=LONGEST_S, check=False)
    return done.returncode


def transactional_id_in_latin_1(client: Client, topic: str) -> object:
    before = client.init("t\ufffdt!")
    request = InitProducerIdRequest(
        transactional_id="tttt", transaction_timeout_ms=1000
    )
    bent = {b"tttt": b"t\xfct!"}
    answer = client.ask_bent(request, 5, InitProducerIdResponse, bent)
    same = answer.producer_epoch == before.producer_epoch + 1
    return name_of(answer.error_code), client.state_of("t\ufffdt!"), same


def config_in_latin_1(client: Client, topic: str) -> object:
    client.create(topic)
    config = AlterableConfig(name="retention.ms", config_operation=0, value="vvvv")
    resource = AlterConfigsResource(
        resource_type=TOPIC, resource_name=topic, configs=[config]
    )
    request = IncrementalAlterConfigsRequest(resources=[resource])
    bent = {b"vvvv": b"v\xfc\xff!"}
    answer = client.ask_bent(request, 1, IncrementalAlterConfigsResponse, bent)
    return [name_of(each.error_code) for each in answer.responses]


def rest_behind_requests(client: Client, topic: str) -> object:
    """Return those that are not answered."""
    requests = [
        (ApiVersionsRequest(client_software_name="t", client_software_version="1"), 4),
        (MetadataRequest(topics=[]), 13),
        (CreateTopicsRequest(topics=[]), 7),
        (DeleteTopicsRequest(topics=[], timeout_ms=1000), 6),
        (DescribeConfigsRequest(resources=[]), 4),
        (IncrementalAlterConfigsRequest(resources=[]), 1),
        (ListOffsetsRequest(replica_id=-1), 7),
        (FetchRequest(max_wait_ms=0, min_bytes=0), 13),
        (ListGroupsRequest(), 5),
        (LeaveGroupRequest(group_id="none"), 5),
        (OffsetCommitRequest(group_id="none", member_id="", topics=[]), 9),
        (ConsumerGroupDescribeRequest(group_ids=["none"]), 1),
        (DescribeTransactionsRequest(transactional_ids=["none"]), 0),
        (InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1), 5),
        (AlterUserScramCredentialsRequest(), 0),
    ]
    unanswered = []
    for request, version in requests:
        own = Client(client.listeners)
        sent = frame(request.api_key, version, request.encode(version) + b"rest")
        try:
            own.sock.sendall(sent)
            if not own.sock.recv(1):
                unanswered.append(type(request).__name__)
        finally:
            own.sock.close()
    return unanswered


def tags_and_counts(client: Client, topic: str) -> object:
    none = b"\2" + bytes(16) + b"\5none"
    bodies = [
        (12, none + b"\2\x63\1x\x62\0" + b"\0\0\0"),  # tags are not in order
        (12, none + b"\0" + b"\0\0" + b"\2\x63\1x\x63\0"),  # one of them is twice there
        (4, b"\xff\xff\xff\xfe\0"),  # -2 topics
    ]
    found = []
    for version, body in bodies:
        request = MetadataRequest()
        sent = frame(request.api_key, version, body)
        answer = client.ask_raw(request, version, MetadataResponse, sent)
        found.append(answer.topics[0].error_code if answer.topics else 0)
    return list(map(name_of, found))


def librdkafkas_scram_users(client: Client, topic: str) -> object:
    """librdkafka writes bytes behind this request, and behind that for metadata."""
    admin = AdminClient({"bootstrap.servers": client.bootstrap, "log_level": 0})
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    change = UserScramCredentialUpsertion(topic, info, b"password", b"salt")
    (future,) = admin.alter_user_scram_credentials([change]).values()
    return future.result(LONGEST_S), admin.list_topics(timeout=LONGEST_S) is not None


# -- 3 and 4: groups that speak KIP-848 ------------------------------------------------


def evicted_by_id(client: Client, topic: str) -> object:
    client.create(topic)
    Member(client, topic, "m", "i")
    Member(client, topic, "n")
    gone = ("n", None), ("", "i")
    codes = [client.leave(topic, *gone, ("", "other")), client.leave(topic, *gone)]
    return *codes, client.members(topic)


def evicted_twice(client: Client, topic: str) -> object:
    client.create(topic)
    Member(client, topic, "m")
    found = client.leave(topic, ("m", None), ("m", None)), client.members(topic)
    classic = f"{topic}-classic"
    member, _ = joined(client, classic)
    return *found, client.leave(classic, (member, None), (member, None))


def java_client(client: Client) -> LineClient:
    if not have_java_clients():
        pytest.skip(
            "no client of Kafka's own in .downloads/java: scripts/test builds it"
        )
    return LineClient(java_command("TransactionalClient"), os.environ)


def evicted_by_java(client: Client, topic: str) -> object:
    client.create(topic)
    java = java_client(client)
    try:
        Member(client, topic, "m", "i")
        where = {"bootstrap": client.bootstrap, "group": topic}
        said = java.ask("remove_member", instance="i", **where)
    finally:
        java.close()
    return said, client.members(topic)


def commits_in_a_rebalance(client: Client, topic: str) -> object:
    client.create(topic, partitions=2)
    member = Member(client, topic, "m")
    wait_until(lambda: member.beat() and member.has == [0, 1])
    first = member.epoch
    other = Member(client, topic, "o")

    def is_shared() -> bool:
        other.beat()
        member.beat()
        return len(other.has) == 1 == len(member.has) and member.epoch > first

    wait_until(is_shared)
    (kept,), (lost,) = member.has, other.has
    producer = client.init(topic)
    found = {}
    for which, epoch in (("now", member.epoch), ("before", first)):
        for what, number in (("kept", kept), ("lost", lost)):
            (code,) = client.commit(topic, topic, number, member="m", epoch=epoch)
            row = TxnOffsetCommitRequestPartition(
                partition_index=number, committed_offset=1, committed_metadata=None
            )
            request = TxnOffsetCommitRequest(
                transactional_id=topic,
                group_id=topic,
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                generation_id=epoch,
                member_id="m",
                topics=[TxnOffsetCommitRequestTopic(name=topic, partitions=[row])],
            )
            answer = client.ask(request, 5, TxnOffsetCommitResponse)
            in_transaction = name_of(answer.topics[0].partitions[0].error_code)
            found[f"{what}, epoch {which}"] = code, in_transaction
    client.end(topic, (producer.producer_id, producer.producer_epoch), False)
    return found


# -- 5: what else differed -------------------------------------------------------------


def sources_of_inherited_configs(client: Client, topic: str) -> object:
    settings = [
        ("1", "log.index.interval.bytes", "4097"),
        ("", "log.segment.delete.delay.ms", "60001"),
    ]
    for name, key, value in settings:
        assert alter(client, name, key, value) == "NONE"
    try:
        (made,) = client.create_all(a_topic(topic, retention_ms="77777777"))
    finally:
        for name, key, _ in settings:
            alter(client, name, key, None)
    wanted = (
        "retention.ms",
        "index.interval.bytes",
        "file.delete.delay.ms",
        "segment.ms",
    )
    found = {each.name: (each.value, each.config_source) for each in made.configs}
    return {name: found[name] for name in wanted}


def largest_time_and_an_open_transaction(client: Client, topic: str) -> object:
    client.create(topic)
    producer = client.begin(topic)
    asked = ListOffsetsPartition(partition_index=0, timestamp=-3)
    request = ListOffsetsRequest(
        replica_id=-1,
        isolation_level=1,
        topics=[ListOffsetsTopic(name=topic, partitions=[asked])],
    )
    answer = client.ask(request, 7, ListOffsetsResponse)
    (found,) = answer.topics[0].partitions
    client.end(topic, producer, False)
    return name_of(found.error_code), found.offset, found.timestamp


def deleted_by_name_and_id(client: Client, topic: str) -> object:
    topic_id = client.create(topic)
    states = [
        DeleteTopicState(name=topic, topic_id=bytes(16)),
        DeleteTopicState(name=None, topic_id=topic_id),
    ]
    request = DeleteTopicsRequest(topics=states, timeout_ms=10_000)
    answer = client.ask(request, 6, DeleteTopicsResponse)
    (found,) = client.describe(MetadataRequestTopic(name=topic))
    codes = {name_of(each.error_code) for each in answer.responses}
    return codes, name_of(found.error_code)


def type_of_a_group(client: Client, topic: str) -> object:
    client.create(topic)
    client.find(topic)
    wait_until(lambda: client.commit(topic, topic, 0) == ["NONE"])
    answer = client.ask(ListGroupsRequest(), 5, ListGroupsResponse)
    return [each.group_type for each in answer.groups if each.group_id == topic]


def acl_without_a_host(client: Client, topic: str) -> object:
    return client.deny(topic, "")


def blank_ids(client: Client, topic: str) -> object:
    asked = [(" ", "m", "i"), (topic, " ", "i"), (topic, "m", " ")]
    more = {"rebalance_timeout_ms": 1000, "subscribed_topic_names": [topic]}
    answers = [
        client.beat(group, member, 0, instance_id=instance, topic_partitions=[], **more)
        for group, member, instance in asked
    ]
    return [name_of(each.error_code) for each in answers]


def joined(client: Client, group: str) -> tuple[str, int]:
    """Join a group by the classic protocol; return the member and its generation."""
    request = JoinGroupRequest(
        group_id=group,
        session_timeout_ms=30_000,
        rebalance_timeout_ms=30_000,
        member_id="",
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=b"")],
    )
    found: list[JoinGroupResponse] = []

    def is_told() -> bool:
        found[:] = [client.ask(request, 3, JoinGroupResponse)]
        return found[0].error_code not in _NOT_YET

    client.find(group)
    wait_until(is_told)
    assert found[0].error_code == ErrorCode.NONE
    return found[0].member_id, found[0].generation_id


def sync_without_a_protocol(client: Client, topic: str) -> object:
    member, generation = joined(client, topic)
    request = SyncGroupRequest(
        group_id=topic, generation_id=generation, member_id=member, assignments=[]
    )
    answer = client.ask(request, 5, SyncGroupResponse)
    client.leave(topic, (member, None))
    return name_of(answer.error_code)


def commit_without_a_member_epoch(client: Client, topic: str) -> object:
    client.create(topic)
    member = Member(client, topic, "m")
    return client.commit(topic, topic, 0, member="m", epoch=member.epoch, version=8)


def refused_commit_of_an_unknown_partition(client: Client, topic: str) -> object:
    client.create(topic)
    member, generation = joined(client, topic)
    codes = client.commit(topic, topic, 0, 7, member=member, epoch=generation + 1)
    client.leave(topic, (member, None))
    return codes


def described_twice(client: Client, topic: str) -> object:
    client.create(topic)
    resource = DescribeConfigsResource(
        resource_type=TOPIC, resource_name=topic, configuration_keys=["retention.ms"]
    )
    request = DescribeConfigsRequest(resources=[resource, resource])
    answer = client.ask(request, 4, DescribeConfigsResponse)
    return [(name_of(each.error_code), len(each.configs)) for each in answer.results]


def name_and_id(client: Client, topic: str) -> object:
    topic_id = client.create(topic)
    (found,) = client.describe(MetadataRequestTopic(name="other", topic_id=topic_id))
    return found.name == topic, name_of(found.error_code)


# -- 6 to 12: produce, sessions, security ----------------------------------------------


def bad_records(client: Client, topic: str) -> object:
    topic_id = client.create(topic, cleanup_policy="compact")
    keys = [b"k", None, b"k", None]
    return told(client.produce(topic_id, batch(*((now_ms(), key) for key in keys))))


def session_with_an_unknown_partition(client: Client, topic: str) -> object:
    known = client.create(topic)
    topics = [
        FetchTopic(
            topic_id=topic_id,
            partitions=[FetchPartition(partition=number, partition_max_bytes=1000)],
        )
        for topic_id, number in ((known, 0), (known, 7), (b"?" * 16, 0))
    ]
    ask = {"max_wait_ms": 0, "min_bytes": 0}
    request = FetchRequest(session_epoch=0, topics=topics, **ask)
    full = client.ask(request, 13, FetchResponse)
    codes = [
        name_of(row.error_code) for each in full.responses for row in each.partitions
    ]
    request = FetchRequest(session_id=full.session_id, session_epoch=1, **ask)
    later = client.ask(request, 13, FetchResponse)
    return sorted(codes), full.session_id != 0, name_of(later.error_code)


def pem_on_one_line(client: Client, topic: str) -> object:
    """Of a key and a chain that are written so, the broker makes a listener."""
    over_tls = Client(client.listeners, "SSL")
    try:
        request = ApiVersionsRequest(
            client_software_name="t", client_software_version="1"
        )
        answer = over_tls.ask(request, 4, ApiVersionsResponse)
        assert isinstance(over_tls.sock, ssl.SSLSocket)
        shown = over_tls.sock.getpeercert(True)
        return name_of(answer.error_code), shown == ssl.PEM_cert_to_DER_cert(
            certificates.BROKER
        )
    finally:
        over_tls.sock.close()


def deny_of_a_network(client: Client, topic: str) -> object:
    client.create(topic)
    user = Client(client.listeners, "SASL_PLAINTEXT")
    try:
        user.log_in("PLAIN", f"\0{USER}\0{PASSWORD}".encode())

        def sees() -> str:
            (found,) = user.describe(MetadataRequestTopic(name=topic))
            return name_of(found.error_code)

        before = sees()
        said = client.deny(topic, "127.0.0.0/8")
        wait_until(lambda: sees() != before)
        return before, said, sees()
    finally:
        user.sock.close()


def malformed_networks(client: Client, topic: str) -> object:
    return [
        client.deny(topic, host)
        for host in ("127.0.0.0/33", "127.0.0.0/", "::/129", "127.0.0.0/x")
    ]


def tokens(client: Client, topic: str) -> object:
    now_s = now_ms() // 1000
    found = {}
    for what, said in {
        "good": token(),
        "expired a moment ago": token(exp=now_s - 5),
        "without iat": token(iat=None),
        "of another issuer": token(iss="https://other.test"),
    }.items():
        own = Client(client.listeners, "SASL_SSL")
        try:
            first = b"n,,\1auth=Bearer " + said + b"\1\1"
            answer = own.log_in("OAUTHBEARER", first)
        finally:
            own.sock.close()
        status = json.loads(bytes(answer.auth_bytes) or b"{}").get("status", "")
        found[what] = name_of(answer.error_code), status, answer.session_lifetime_ms > 0
    return found


# -- 13: transactions that take too long -----------------------------------------------


def timed_out(client: Client, topic: str) -> tuple[int, int]:
    """Return the producer whose transaction of version 2 was open for too long."""
    client.create(topic)
    producer = client.begin(topic, timeout_ms=500)
    wait_until(lambda: client.state_of(topic) == "CompleteAbort")
    return producer


def late_ends(client: Client, topic: str) -> object:
    number, epoch = producer = timed_out(client, topic)
    commit = client.end(topic, producer, True)
    abort = client.end(topic, producer, False)
    same = (abort.producer_id, abort.producer_epoch) == (number, epoch + 1)
    return name_of(commit.error_code), name_of(abort.error_code), same


def fenced_epoch(client: Client, topic: str) -> object:
    number, epoch = producer = timed_out(client, topic)
    answer = client.init(topic, producer)
    same = answer.producer_id == number and answer.producer_epoch > epoch
    return name_of(answer.error_code), same


def late_abort_by_java(client: Client, topic: str) -> object:
    client.create(topic)
    java = java_client(client)
    ask = {
        "bootstrap": client.bootstrap,
        "transactional_id": topic,
        "transaction_timeout_ms": 500,
        "records": [{"topic": topic, "partition": 0, "value": "eA=="}],
    }
    try:
        began = java.ask("open", **ask)
        wait_until(lambda: client.state_of(topic) == "CompleteAbort")
        ended = java.ask("abort", **ask)
        # The next transaction has as little time, and may have to be tried again.
        wait_until(lambda: java.ask("transact", kind="commit", **ask) == "committed")
    finally:
        java.close()
    return began, ended


# -- where we differ on purpose --------------------------------------------------------


def colliding_names(client: Client, topic: str) -> object:
    made = client.create_all(a_topic(f"{topic}.a"), a_topic(f"{topic}_a"))
    return [name_of(each.error_code) for each in made]


def colliding_name_made_by_metadata(client: Client, topic: str) -> object:
    client.create(f"{topic}.a")
    wanted = MetadataRequestTopic(name=f"{topic}_a")
    request = MetadataRequest(topics=[wanted], allow_auto_topic_creation=True)
    found: list[str] = []
    for _ in range(3):
        (answer,) = client.ask(request, 12, MetadataResponse).topics
        found.append(name_of(answer.error_code))
    return found[-1]


def no_time_to_create(client: Client, topic: str) -> object:
    (made,) = client.create_all(a_topic(topic), timeout_ms=0)
    return name_of(made.error_code)


def unknown_setting_of_the_broker(client: Client, topic: str) -> object:
    key = f"no.such.{topic}"
    said = alter(client, "", key, "1")
    alter(client, "", key, None)
    return said


def produced(bend: Callable[[bytes], bytes], **configs: str) -> Ask:
    """Return what asks for the name of the error that a bent batch meets."""

    def ask(client: Client, topic: str) -> object:
        topic_id = client.create(topic, **configs)
        answer = client.produce(topic_id, bend(batch((now_ms(), b"k"))))
        return name_of(answer.error_code)

    return ask


def forged(**changes: int) -> bytes:
    return batch_forgery.batch(batch_forgery.record(0), 1, **changes)


def old(_: bytes) -> bytes:
    return batch((-5, b"k"))


def static_member_joins_again(client: Client, topic: str) -> object:
    client.create(topic)
    Member(client, topic, "m", "i")
    answer = client.beat(
        topic,
        "m",
        0,
        instance_id="i",
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=[topic],
        topic_partitions=[],
    )
    return name_of(answer.error_code)


def scram_user_that_is_not_ascii(client: Client, topic: str) -> object:
    name = f"zo\xeb-{topic}"
    user = ScramCredentialUpsertion(
        name=name,
        mechanism=1,
        iterations=4096,
        salt=b"salt",
        salted_password=bytes(32),
    )
    request = AlterUserScramCredentialsRequest(upsertions=[user])
    answer = client.ask(request, 0, AlterUserScramCredentialsResponse)
    codes = [name_of(each.error_code) for each in answer.results]
    own = Client(client.listeners, "SASL_PLAINTEXT")
    try:
        begun = own.log_in("SCRAM-SHA-256", f"n,,n={name},r=nonce".encode())
    finally:
        own.sock.close()
    return *codes, name_of(begun.error_code)


# -- the table -------------------------------------------------------------------------

Ask = Callable[[Client, str], object]
_SAME: Final = object()


class Row(NamedTuple):
    """A kind that was met.

    Attributes:
        number: its number among what was met; 0: a difference on purpose.
        what: what is asked. Of a difference on purpose this is the first cell of its
            row in docs/differences.md.
        ask: asks a broker, with the name of a topic (a group, an id) of its own.
        answer: what Apache Kafka answers.
        ours: what we answer, where we differ on purpose.
    """

    number: int
    what: str
    ask: Ask
    answer: object
    ours: object = _SAME


OK: Final = "NONE"
INVALID: Final = "INVALID_REQUEST"

ROWS: Final = [
    Row(1, "a client.id in Latin-1, by librdkafka", librdkafka_in_latin_1, 0),
    Row(
        1,
        "a transactional id in Latin-1",
        transactional_id_in_latin_1,
        (OK, "Empty", True),
    ),
    Row(1, "the value of a config in Latin-1", config_in_latin_1, ["INVALID_CONFIG"]),
    Row(2, "bytes behind requests", rest_behind_requests, []),
    Row(
        2,
        "tags unsorted and twice, -2 topics",
        tags_and_counts,
        ["UNKNOWN_TOPIC_OR_PARTITION", "UNKNOWN_TOPIC_OR_PARTITION", OK],
    ),
    Row(2, "librdkafka's requests with a rest", librdkafkas_scram_users, (None, True)),
    Row(
        3,
        "a member that speaks KIP-848 is removed",
        evicted_by_id,
        ([OK, OK, "UNKNOWN_MEMBER_ID"], ["UNKNOWN_MEMBER_ID"] * 2, []),
    ),
    Row(
        3,
        "a member is removed twice by one request",
        evicted_twice,
        ([OK, OK], [], [OK, "UNKNOWN_MEMBER_ID"]),
    ),
    Row(3, "a member is removed, by Java", evicted_by_java, ("removed", [])),
    Row(
        4,
        "commits in a rebalance",
        commits_in_a_rebalance,
        {
            "kept, epoch now": (OK, OK),
            "lost, epoch now": (OK, OK),
            "kept, epoch before": (OK, OK),
            "lost, epoch before": ("STALE_MEMBER_EPOCH", "ILLEGAL_GENERATION"),
        },
    ),
    Row(
        5,
        "sources of inherited configs",
        sources_of_inherited_configs,
        {
            "retention.ms": ("77777777", 1),
            "index.interval.bytes": ("4097", 2),
            "file.delete.delay.ms": ("60001", 3),
            "segment.ms": ("604800000", 5),
        },
    ),
    Row(
        5,
        "the largest time below an open transaction",
        largest_time_and_an_open_transaction,
        (OK, -1, -1),
    ),
    Row(
        5,
        "a topic deleted by name and id",
        deleted_by_name_and_id,
        ({INVALID}, OK),
    ),
    Row(5, "the type of a group", type_of_a_group, ["classic"]),
    Row(5, "an ACL without a host", acl_without_a_host, INVALID),
    Row(5, "blank ids", blank_ids, [INVALID] * 3),
    Row(
        5,
        "SyncGroup without a protocol",
        sync_without_a_protocol,
        "INCONSISTENT_GROUP_PROTOCOL",
    ),
    Row(
        5,
        "OffsetCommit 8 in a group that speaks KIP-848",
        commit_without_a_member_epoch,
        ["UNSUPPORTED_VERSION"],
    ),
    Row(
        5,
        "a refused commit of an unknown partition",
        refused_commit_of_an_unknown_partition,
        ["ILLEGAL_GENERATION", "UNKNOWN_TOPIC_OR_PARTITION"],
    ),
    Row(5, "a resource described twice", described_twice, [(OK, 1), (OK, 1)]),
    Row(5, "a topic's id beside another name", name_and_id, (True, OK)),
    Row(
        6,
        "records without keys in a compacted topic",
        bad_records,
        {
            "error": "INVALID_RECORD",
            "base offset": -1,
            "log start": 0,
            "records": [1, 3],
        },
    ),
    Row(
        7,
        "a session with partitions that are unknown",
        session_with_an_unknown_partition,
        ([OK, "UNKNOWN_TOPIC_ID", "UNKNOWN_TOPIC_OR_PARTITION"], True, OK),
    ),
    Row(9, "PEM on one line", pem_on_one_line, (OK, True)),
    Row(
        11,
        "a network that is denied",
        deny_of_a_network,
        (OK, OK, "TOPIC_AUTHORIZATION_FAILED"),
    ),
    Row(11, "malformed networks", malformed_networks, [INVALID] * 4),
    Row(
        12,
        "tokens",
        tokens,
        {
            "good": (OK, "", True),
            "expired a moment ago": (OK, "invalid_token", False),
            "without iat": (OK, "invalid_token", False),
            "of another issuer": (OK, "invalid_token", False),
        },
    ),
    Row(
        13,
        "late ends of a transaction that timed out",
        late_ends,
        ("INVALID_TXN_STATE", OK, True),
    ),
    Row(13, "InitProducerId with the fenced epoch", fenced_epoch, (OK, True)),
    Row(
        13,
        "abortTransaction(), by Java",
        late_abort_by_java,
        ("open", "aborted"),
    ),
    Row(
        0,
        "two names in one CreateTopics that collide",
        colliding_names,
        [OK, OK],
    ),
    Row(
        0,
        "a topic that would be created by a request for metadata, and whose name",
        colliding_name_made_by_metadata,
        "UNKNOWN_TOPIC_OR_PARTITION",
        "INVALID_TOPIC_EXCEPTION",
    ),
    Row(
        0,
        "CreateTopics or DeleteTopics with a time-out of 0",
        no_time_to_create,
        "REQUEST_TIMED_OUT",
        OK,
    ),
    Row(
        0,
        "a broker setting that does not exist, in IncrementalAlterConfigs",
        unknown_setting_of_the_broker,
        OK,
        "INVALID_CONFIG",
    ),
    Row(
        0,
        "bytes behind a batch in Produce",
        produced(lambda good: good + b"xx"),
        OK,
        "INVALID_RECORD",
    ),
    Row(
        0,
        "a batch with the bit of LogAppendTime in a topic with CreateTime",
        produced(lambda _: forged(attributes=8)),
        OK,
        "INVALID_TIMESTAMP",
    ),
    Row(
        0,
        "a batch with a base offset other than 0",
        produced(lambda good: bytes(7) + b"\7" + good[8:]),
        "INVALID_RECORD",
        OK,
    ),
    Row(
        0,
        "a time below -1 in a topic that compresses anew",
        produced(old, compression_type="gzip"),
        "UNKNOWN_SERVER_ERROR",
        OK,
    ),
    Row(
        0,
        "codecs 5 to 7",
        produced(lambda _: forged(attributes=5)),
        "UNKNOWN_SERVER_ERROR",
        "UNSUPPORTED_COMPRESSION_TYPE",
    ),
    Row(
        0,
        "a static member of a KIP-848 group that joins again with epoch 0",
        static_member_joins_again,
        "UNRELEASED_INSTANCE_ID",
        OK,
    ),
    Row(
        0,
        "SCRAM users with names that are not ASCII",
        scram_user_that_is_not_ascii,
        (OK, "SASL_AUTHENTICATION_FAILED"),
        (OK, OK),
    ),
]


# The numbers of which no broker is asked here, and the tests that hold them.
ELSEWHERE: Final = {
    8: (
        "tests/compat/test_log_directories.py"
        "::test_partitions_of_a_lost_directory_have_no_leader",
        "tests/broker/test_log_directories.py"
        "::test_a_lost_disk_takes_its_own_partitions_only",
        "tests/server/core_cache/test_repeated_answers.py"
        "::test_a_partition_of_a_failed_directory_has_no_leader_until_it_is_back",
    ),
    10: (
        "tests/config/test_config.py"
        "::test_a_variable_of_no_listener_is_refused_with_the_nearest_spelling",
    ),
    14: (
        "tests/client/test_consumer_calls.py"
        "::test_a_member_commits_with_a_producers_transaction",
    ),
    15: (
        "tests/cli/test_with_a_broker.py"
        "::test_a_line_that_is_too_large_costs_no_other_line",
        "tests/cli/test_produce_consume.py"
        "::test_an_error_that_meets_all_lines_ends_the_command",
        "tests/faults/test_resources_run_out.py"
        "::test_the_produce_command_counts_what_a_full_disk_refuses",
    ),
    16: (
        "tests/client/test_consumer_ends.py"
        "::test_a_silent_broker_is_waited_for_no_longer_than_close_was_told",
        "tests/client/test_share_consumer_faults.py"
        "::test_a_silent_broker_is_waited_for_no_longer_than_close_was_told",
        "tests/client/test_admin_client.py"
        "::test_a_broker_that_is_away_for_a_while_is_waited_for",
    ),
    17: (
        "tests/cli/test_group.py::test_a_member_leaves_its_group_at_sigterm",
        "tests/cli/test_group.py"
        "::test_a_group_ends_at_the_ends_of_its_beginning_while_others_write",
        "tests/cli/test_produce_consume.py::test_sigterm_ends_the_lines_that_were_read",
        "tests/cli/test_produce_consume.py"
        "::test_the_last_records_are_counted_and_not_their_offsets",
    ),
    18: (
        "tests/cli/test_produce_consume.py::test_a_pipe_of_json_copies_all_of_a_record",
    ),
    19: (
        "tests/client/test_odd_answers.py::test_no_error_code_stands_without_words",
        "tests/client/test_consumer_calls.py"
        "::test_a_deserializer_of_the_bytes_alone_is_told_its_arguments",
        "tests/network/security/sasl/test_authenticator.py"
        "::test_the_log_names_the_user_of_a_refused_login_and_no_password",
    ),
    20: (
        "tests/faults/test_resources_run_out.py"
        "::test_an_idle_handler_gives_a_deleted_topics_space_back",
    ),
    21: (
        "tests/faults/test_resources_run_out.py"
        "::test_a_full_disk_loses_nothing_and_stops_nobody",
        "tests/storage/test_full_directories.py"
        "::test_appends_that_fail_are_told_once_and_the_room_after_them_once",
    ),
    22: (
        "tests/faults/test_groups_without_a_coordinator.py"
        "::test_a_group_forms_though_the_coordinator_is_killed_again_and_again",
        "tests/coordinator/groups/test_classic_protocol.py"
        "::test_a_join_whose_coordinator_dies_before_the_answer_is_of_its_generation",
    ),
}


@pytest.fixture
def client(listeners: Mapping[str, str]) -> Iterator[Client]:
    made = Client(listeners)
    yield made
    made.sock.close()


@pytest.mark.parametrize(
    "row", [pytest.param(r, id=f"{r.number}-{r.what}") for r in ROWS]
)
def test_what_was_met_is_answered_as_by_kafka_or_as_the_documents_say(
    client: Client, topic_name: str, row: Row
) -> None:
    answer = row.answer if IS_KAFKA or row.ours is _SAME else row.ours
    assert row.ask(client, topic_name) == answer


def test_each_number_has_a_row_or_tests_that_exist() -> None:
    asked = {row.number for row in ROWS if row.number}
    assert asked | ELSEWHERE.keys() == {*range(1, 23)}
    for where in (each for tests in ELSEWHERE.values() for each in tests):
        path, _, name = where.partition("::")
        assert re.search(rf"def {name}\b", (ROOT / path).read_text()), where


# -- the documents ---------------------------------------------------------------------

PAGE: Final = ROOT / "docs" / "differences.md"


def rows_of_the_page() -> list[list[str]]:
    """Return the cells of each row of its tables."""
    lines = [each for each in PAGE.read_text().splitlines() if each.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in cells if row[0] not in ("what", "---")]


def test_each_row_of_the_page_names_tests_that_exist() -> None:
    for what, *_, held_by in rows_of_the_page():
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", held_by)
        assert named, what
        for path, name in named:
            text = (ROOT / path).read_text()
            assert re.search(rf"def {name}\b", text), f"{what}: {path}::{name}"


def test_each_difference_that_is_asked_is_in_the_page() -> None:
    whats = [row[0] for row in rows_of_the_page()]
    asked = [row.what for row in ROWS if row.ours is not _SAME]
    assert [each for each in asked if not any(each in what for what in whats)] == []
