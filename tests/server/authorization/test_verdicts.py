"""The short cut allows what the authorizer allows, after any changes of its rules."""

from __future__ import annotations

import itertools
import socket
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import (
    CONNECTION_LISTENER,
    CONNECTION_PEER_ADDRESS,
    CONNECTION_PRINCIPAL,
    CONNECTION_SLOT,
    SLOT_CONNECTION,
    connection_row,
    slot_row,
)
from mpbroker.metadata.acl_records import MetadataAcls, create_acls, delete_acls
from mpbroker.protocol.acl import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from mpbroker.protocol.messages.produce import ProduceResponse
from mpbroker.server.authorization import verdicts
from mpbroker.server.authorization.authorizer import (
    Authorizer,
    Resource,
    StandardAuthorizer,
)
from mpbroker.server.request_context import RequestContexts
from tests.server.authorization.test_guarded_data import batch
from tests.server.core_cache.handler_stage import Stage, produce_request
from tests.support.memory import broker_memory

PRODUCE, FETCH = int(ApiKey.PRODUCE), int(ApiKey.FETCH)
DENIED = ErrorCode.TOPIC_AUTHORIZATION_FAILED
READ, WRITE, ALL = AclOperation.READ, AclOperation.WRITE, AclOperation.ALL
ALLOW, DENY = AclPermissionType.ALLOW, AclPermissionType.DENY
SLOT, CONNECTION = 3, 5
TOPICS = ("a", "ab", "b")
PRINCIPALS = ("User:ANONYMOUS", "User:alice", "User:bob", "User:root")
HOSTS = ("10.0.0.1", "10.0.0.2")
SUPER_USER = "User:root"

WAYS = [
    False,
    pytest.param(
        True,
        marks=pytest.mark.skipif(
            not IS_COMPILED, reason="the compiled core is not there"
        ),
    ),
]


class Guarded(Stage):
    """One connection, with its principal in its row."""

    def __init__(self, memory, data, *, short, authorizer):
        super().__init__(memory, data, short=short, authorizer=authorizer)
        self.words = memory.control.words
        listeners = [("ONE", "SASL_SSL"), ("TWO", "PLAINTEXT")]
        contexts = RequestContexts(self.words, PRINCIPALS.__getitem__, listeners)
        self.authorization._contexts = contexts
        for name in TOPICS:
            self.registry.create_topic(name, 1)
        self.is_from("User:alice")

    def is_from(self, principal, host=HOSTS[0], listener=0):
        words, row = self.words, connection_row(CONNECTION)
        words[slot_row(SLOT) + SLOT_CONNECTION] = CONNECTION
        words[row + CONNECTION_SLOT] = SLOT + 1
        words[row + CONNECTION_PRINCIPAL] = PRINCIPALS.index(principal)
        words[row + CONNECTION_LISTENER] = listener
        # An IPv4 address within an IPv6 one, as connection_rows.py keeps them.
        packed = socket.inet_pton(socket.AF_INET6, f"::ffff:{host}")
        for word, value in enumerate(struct.unpack("=2q", packed)):
            words[row + CONNECTION_PEER_ADDRESS + word] = value

    def produce(self, topic, *, version=9):
        kind, answer = self.ask(produce_request(topic, 0, batch(), version=version))
        if not answer:
            return kind
        response = ProduceResponse.decode(version, memoryview(answer)[9:])
        (partition,) = response.responses[0].partition_responses
        return partition.error_code

    def fetch(self, *topics, version=12):
        partition = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=100)
        message = FetchRequest(
            max_wait_ms=0,
            topics=[
                FetchTopic(
                    topic=name if version < 13 else "",
                    topic_id=self.registry.topic(name).topic_id,
                    partitions=[partition],
                )
                for name in topics
            ],
        )
        header = encode_request_header(ApiKey.FETCH, version, 77, "test")
        kind, _ = self.ask(header + message.encode(version))
        if not self.sent(SLOT):
            return [kind]
        answer = FetchResponse.decode(version, memoryview(self.sent(SLOT))[9:])
        codes = {
            topic.topic or topic.topic_id: topic.partitions[0].error_code
            for topic in answer.responses
        }
        return [
            codes[name if version < 13 else self.registry.topic(name).topic_id]
            for name in topics
        ]


def standard(registry):
    return StandardAuthorizer(MetadataAcls(registry), [SUPER_USER])


@pytest.fixture(scope="module", params=WAYS)
def stage(request, tmp_path_factory):
    with broker_memory() as memory:
        made = Guarded(
            memory,
            tmp_path_factory.mktemp("verdicts") / "data",
            short=request.param,
            authorizer=standard,
        )
        yield made
        made.logs.close_files()


@pytest.fixture(autouse=True)
def nothing_is_allowed(request):
    if "stage" in request.fixturenames:
        stage = request.getfixturevalue("stage")
        delete_acls(stage.registry, [AclFilter()])
        stage.short_ways.clear()
        stage.is_from("User:alice")


def acl(operation, name, principal="User:alice", permission=ALLOW, **fields):
    return AclBinding(
        ResourceType.TOPIC,
        name,
        fields.get("pattern", PatternType.LITERAL),
        principal,
        fields.get("host", "*"),
        operation,
        permission,
    )


def test_an_allowed_sender_takes_the_short_cut_from_the_second_request_on(stage):
    create_acls(stage.registry, [acl(WRITE, "a"), acl(READ, "a")])
    for _ in range(4):
        assert stage.produce("a") == 0
    for version in (12, 12, 12, 13, 13):
        assert stage.fetch("a", version=version) == [0]
    if stage.is_short:
        # News of the metadata log cost one more produce, which the next one learns.
        assert stage.short_ways.count(PRODUCE) >= 2
        assert stage.short_ways.count(FETCH) >= 3


@pytest.mark.parametrize(
    "other",
    [("User:bob",), ("User:alice", HOSTS[1]), ("User:ANONYMOUS",)],
)
def test_a_permission_of_one_sender_is_not_used_for_others(stage, other):
    entries = [acl(WRITE, "a", host=HOSTS[0]), acl(READ, "a", host=HOSTS[0])]
    create_acls(stage.registry, entries)
    for _ in range(3):
        assert stage.produce("a") == 0
        assert stage.fetch("a") == [0]
    stage.is_from(*other)
    assert stage.produce("a") == DENIED
    assert stage.fetch("a") == [DENIED]
    stage.is_from("User:alice")
    assert stage.produce("a") == 0


def test_a_permission_to_write_is_none_to_read_and_the_reverse(stage):
    create_acls(stage.registry, [acl(WRITE, "a"), acl(READ, "b")])
    for _ in range(3):
        assert stage.produce("a") == 0
        assert stage.fetch("b") == [0]
    assert stage.produce("b") == DENIED
    for version in (12, 13):
        assert stage.fetch("a", version=version) == [DENIED]
        assert stage.fetch("b", "a", version=version) == [0, DENIED]


def test_a_connection_that_has_gone_takes_no_way_at_all(stage):
    create_acls(stage.registry, [acl(ALL, "a")])
    for _ in range(3):
        assert stage.produce("a") == 0
        assert stage.fetch("a") == [0]
    before = stage.log("a").row.log_end_offset
    stage.words[connection_row(CONNECTION) + CONNECTION_SLOT] = 0
    assert stage.produce("a").name == "CLOSE"
    assert stage.fetch("a")[0].name == "CLOSE"
    assert stage.log("a").row.log_end_offset == before


names = st.sampled_from((*TOPICS, "*"))
changes = st.builds(
    acl,
    st.sampled_from((READ, WRITE, ALL, AclOperation.DESCRIBE)),
    names,
    st.sampled_from((*PRINCIPALS[:3], "User:*")),
    st.sampled_from((ALLOW, ALLOW, DENY)),
    host=st.sampled_from(("*", *HOSTS)),
    pattern=st.sampled_from((PatternType.LITERAL, PatternType.PREFIXED)),
)
asked = st.tuples(
    st.sampled_from(PRINCIPALS),
    st.sampled_from(HOSTS),
    st.sampled_from(("produce", "fetch", "fetch by id")),
    st.sampled_from(TOPICS),
)
steps = st.lists(
    st.one_of(
        changes.map(lambda entry: ("create", entry)),
        names.map(lambda name: ("delete", name)),
        asked.map(lambda question: ("ask", question)),
        asked.map(lambda question: ("ask", question)),
    ),
    max_size=25,
)


@settings(max_examples=40)
@given(steps)
def test_no_history_of_changes_allows_a_sender_that_the_authorizer_denies(stage, steps):
    delete_acls(stage.registry, [AclFilter()])
    oracle = standard(stage.registry)
    everything = [
        ("ask", question)
        for question in itertools.product(
            PRINCIPALS[1:3], HOSTS[:1], ("produce", "fetch"), TOPICS[:2]
        )
    ]
    for kind, what in [*steps, *everything]:
        if kind == "create":
            create_acls(stage.registry, [what])
        elif kind == "delete":
            delete_acls(stage.registry, [AclFilter(resource_name=what)])
        else:
            principal, host, how, topic = what
            stage.is_from(principal, host)
            sender = SimpleNamespace(principal=principal, host=host)
            operation = WRITE if how == "produce" else READ
            stage.registry.catch_up()
            allowed = oracle.authorize(
                sender, operation, Resource(ResourceType.TOPIC, topic)
            )
            for _ in range(3):  # the second and third may take the short way
                if how == "produce":
                    found = stage.produce(topic)
                else:
                    version = 12 if how == "fetch" else 13
                    (found,) = stage.fetch(topic, version=version)
                assert found == (0 if allowed else DENIED), (what, oracle)


# -- an authorizer of one's own --------------------------------------------------------


class Moody(Authorizer):
    """Changes its decisions without a record in the metadata log."""

    def __init__(self, *, version=1):
        self.answer = True
        self.current = version
        self.asked = 0

    @property
    def version(self):
        if isinstance(self.current, Exception):
            raise self.current
        return self.current

    def authorize(self, context, operation, resource):
        self.asked += 1
        return self.answer


@pytest.fixture(params=WAYS)
def moody(request, tmp_path):
    authorizer = Moody()
    with broker_memory() as memory:
        made = Guarded(
            memory,
            tmp_path / "data",
            short=request.param,
            authorizer=lambda registry: authorizer,
        )
        yield made, authorizer
        made.logs.close_files()


def test_a_new_version_of_its_rules_counts_for_the_next_request(moody):
    stage, authorizer = moody
    for _ in range(4):
        assert stage.produce("a") == 0
        assert stage.fetch("a") == [0]
    authorizer.answer, authorizer.current = False, 2
    assert stage.produce("a") == DENIED
    assert stage.fetch("a") == [DENIED]
    authorizer.answer, authorizer.current = True, 3
    assert stage.produce("a") == 0
    assert stage.fetch("a") == [0]


def test_without_a_version_every_request_is_asked_about(moody):
    stage, authorizer = moody
    authorizer.current = None
    for number in range(1, 5):
        assert stage.produce("a") == 0
        assert authorizer.asked == number
    assert stage.short_ways == []


def test_after_the_authorizer_fails_its_earlier_decisions_allow_no_request(moody):
    stage, authorizer = moody
    for _ in range(3):
        assert stage.produce("a") == 0
    end = stage.log("a").row.log_end_offset
    authorizer.current = LookupError("the directory is down")
    stage.ask(produce_request("a", 0, batch()))
    assert stage.log("a").row.log_end_offset == end
    authorizer.current = 2
    assert stage.produce("a") == 0


def test_the_number_of_verdicts_is_bounded(moody, monkeypatch):
    stage, _ = moody
    if not stage.is_short:
        return
    monkeypatch.setattr(verdicts, "_MAX_VERDICTS", 4)
    compiled = stage.channel.compiled
    for number in range(20):
        stage.is_from("User:alice", f"10.0.0.{number}")
        assert stage.produce("a") == stage.produce("b") == 0
        kept = sum(map(len, compiled.writers.values()))
        assert 0 < kept <= 2 * 4  # each topic by its name and by its id
