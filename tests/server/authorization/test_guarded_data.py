"""Produce and Fetch where there is an authorizer, with and without the short cut."""

from __future__ import annotations

import pytest

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import ResponseKind as Kind
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
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from mpbroker.server.authorization.authorizer import StandardAuthorizer
from mpbroker.server.request_context import Sender
from tests.server.core_cache.handler_stage import Stage
from tests.support.memory import broker_memory

PRODUCE = int(ApiKey.PRODUCE)
DENIED = ErrorCode.TOPIC_AUTHORIZATION_FAILED
READ, WRITE = AclOperation.READ, AclOperation.WRITE


@pytest.fixture(
    params=[
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not IS_COMPILED, reason="the compiled core is not there"
            ),
        ),
    ]
)
def stage(request, tmp_path):
    with broker_memory() as memory:
        made = Stage(
            memory,
            tmp_path / "data",
            short=request.param,
            authorizer=lambda registry: StandardAuthorizer(MetadataAcls(registry)),
        )
        for name in ("one", "two"):
            made.registry.create_topic(name, 1)
        yield made
        made.logs.close_files()


def acl(operation, name, principal="User:alice", kind=ResourceType.TOPIC, **fields):
    return AclBinding(
        kind,
        name,
        PatternType.LITERAL,
        principal,
        fields.get("host", "*"),
        operation,
        fields.get("permission", AclPermissionType.ALLOW),
    )


def batch(**fields):
    builder = RecordBatchBuilder(**fields)
    builder.append(1_700_000_000_000, None, b"x", ())
    return bytes(builder.build())


def produce(stage, *topics, version=9, acks=1, transactional_id=None, **fields):
    """Return the error of each topic, in order; None: the connection was closed."""
    message = ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=1000,
        topic_data=[
            TopicProduceData(
                name=name if version < 13 else "",
                topic_id=getattr(stage.registry.topic(name), "topic_id", b"?" * 16),
                partition_data=[PartitionProduceData(index=0, records=batch(**fields))],
            )
            for name in topics
        ],
    )
    header = encode_request_header(ApiKey.PRODUCE, version, 77, "test")
    kind, answer = stage.ask(header + message.encode(version))
    if kind is Kind.CLOSE:
        return None
    if kind is Kind.NONE:
        return []
    response = ProduceResponse.decode(
        version, memoryview(answer), 9 if version >= 9 else 8
    )
    return [
        partition.error_code
        for topic in response.responses
        for partition in topic.partition_responses
    ]


def fetch(stage, *topics, version=12, session=(0, -1)):
    """Return the error of each topic, and the session's id."""
    message = FetchRequest(
        max_wait_ms=0,
        min_bytes=1,
        session_id=session[0],
        session_epoch=session[1],
        topics=[
            FetchTopic(
                topic=name if version < 13 else "",
                topic_id=getattr(stage.registry.topic(name), "topic_id", b"?" * 16),
                partitions=[
                    FetchPartition(
                        partition=0, fetch_offset=0, partition_max_bytes=1 << 20
                    )
                ],
            )
            for name in topics
        ],
    )
    header = encode_request_header(ApiKey.FETCH, version, 77, "test")
    stage.ask(header + message.encode(version))
    answer = FetchResponse.decode(version, memoryview(stage.sent(3)), 9)
    return (
        answer.error_code,
        [
            (partition.error_code, bool(partition.records))
            for topic in answer.responses
            for partition in topic.partitions
        ],
        answer.session_id,
    )


@pytest.mark.parametrize("version", [3, 9, 12, 13])
def test_only_topics_that_may_be_written_to_are(stage, version):
    assert produce(stage, "one", version=version) == [DENIED]
    create_acls(stage.registry, [acl(WRITE, "one")])
    for _ in range(4):
        assert produce(stage, "one", version=version) == [0]
    assert produce(stage, "one", "two", version=version) == [0, DENIED]
    assert stage.log("one").row.log_end_offset == 5
    assert stage.log("two").row.log_end_offset == 0


def test_a_topic_that_is_not_there_looks_like_one_that_is_denied(stage):
    assert produce(stage, "missing") == produce(stage, "one") == [DENIED]
    create_acls(stage.registry, [acl(WRITE, "*")])
    assert produce(stage, "missing") == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert produce(stage, "missing", version=13) == [ErrorCode.UNKNOWN_TOPIC_ID]


def test_without_an_answer_a_denial_closes_the_connection(stage):
    assert produce(stage, "one", acks=0) is None
    create_acls(stage.registry, [acl(WRITE, "one")])
    assert produce(stage, "one", acks=0) == []


def test_an_id_that_may_not_be_used_denies_all(stage):
    create_acls(stage.registry, [acl(WRITE, "one")])
    ids = {"transactional_id": "x"}
    denied = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert produce(stage, "one", "two", **ids) == [denied, denied]
    create_acls(stage.registry, [acl(WRITE, "x", kind=ResourceType.TRANSACTIONAL_ID)])
    assert produce(stage, "one", "two", **ids) == [0, DENIED]


def test_the_short_cut_is_for_topics_that_everybody_may_write_to(stage):
    create_acls(stage.registry, [acl(WRITE, "one"), acl(WRITE, "two", "User:*")])
    for _ in range(5):
        assert produce(stage, "one") == [0]
    assert stage.short_ways == []
    for _ in range(5):
        assert produce(stage, "two") == [0]
    if stage.is_short:
        assert stage.short_ways == [PRODUCE] * 3
    stage.contexts.known = Sender("User:bob", "10.0.0.9", "PLAINTEXT", "PLAINTEXT")
    assert produce(stage, "one") == [DENIED]
    assert produce(stage, "two") == [0]


def test_a_denial_ends_the_short_cut_with_the_next_request(stage):
    create_acls(stage.registry, [acl(WRITE, "two", "User:*")])
    for _ in range(5):
        assert produce(stage, "two") == [0]
    deny = acl(WRITE, "two", host="10.0.0.1", permission=AclPermissionType.DENY)
    create_acls(stage.registry, [deny])
    assert produce(stage, "two") == [DENIED]
    delete_acls(stage.registry, [AclFilter(permission_type=AclPermissionType.DENY)])
    assert produce(stage, "two") == [0]
    delete_acls(stage.registry, [AclFilter()])
    assert produce(stage, "two") == [DENIED]


@pytest.mark.parametrize("version", [9, 13])
def test_several_topics_take_the_short_cut_if_the_sender_may_write_to_all(
    stage, version
):
    def ask(*topics):
        return produce(stage, *topics, version=version)

    create_acls(stage.registry, [acl(WRITE, name, "User:*") for name in ("one", "two")])
    for _ in range(4):
        assert ask("one", "two") == [0, 0]
    if stage.is_short:
        assert stage.short_ways == [PRODUCE] * 2
    deny = acl(WRITE, "two", permission=AclPermissionType.DENY)
    create_acls(stage.registry, [deny])
    before = list(stage.short_ways)
    for _ in range(4):
        assert ask("one", "two") == [0, DENIED]
        assert ask("two", "one") == [DENIED, 0]
    assert stage.short_ways == before
    assert ask("one") == [0]
    ends = [stage.log(name).row.log_end_offset for name in ("one", "two")]
    assert ends == [13, 4]
    if stage.is_short:
        assert stage.short_ways == [*before, PRODUCE]


def test_a_produce_of_a_connection_that_has_gone_is_not_executed(stage):
    create_acls(stage.registry, [acl(WRITE, "one")])
    stage.contexts.known = None
    assert produce(stage, "one") is None
    assert stage.log("one").row.log_end_offset == 0


@pytest.mark.parametrize("version", [12, 13])
def test_only_topics_that_may_be_read_are(stage, version):
    create_acls(stage.registry, [acl(WRITE, "*"), acl(READ, "one")])
    assert produce(stage, "one") == produce(stage, "two") == [0]
    code, rows, _ = fetch(stage, "one", "two", version=version)
    assert code == 0
    assert rows == [(0, True), (DENIED, False)]


def test_each_error_of_a_fetch_is_counted(stage):
    create_acls(stage.registry, [acl(WRITE, "*"), acl(READ, "one")])
    assert produce(stage, "one") == [0]
    fetch(stage, "one")
    assert stage.errors == []
    fetch(stage, "one", "two", "missing")
    key = int(ApiKey.FETCH)
    assert stage.errors == [(key, DENIED), (key, DENIED)]
    stage.errors.clear()
    fetch(stage, session=(4711, 3))
    assert stage.errors == [(key, ErrorCode.FETCH_SESSION_ID_NOT_FOUND)]


def test_a_topic_that_is_not_there_is_denied_likewise(stage):
    assert fetch(stage, "missing")[1] == fetch(stage, "one")[1] == [(DENIED, False)]
    unknown = ErrorCode.UNKNOWN_TOPIC_ID
    assert fetch(stage, "missing", version=13)[1] == [(unknown, False)]


def test_a_session_reads_no_more_than_its_user_still_may(stage):
    create_acls(stage.registry, [acl(WRITE, "one"), acl(READ, "one")])
    assert produce(stage, "one") == [0]
    _, rows, session = fetch(stage, "one", session=(0, 0))
    assert rows == [(0, True)] and session
    assert fetch(stage, session=(session, 1))[1] == [(0, True)]
    delete_acls(stage.registry, [AclFilter(operation=READ)])
    assert fetch(stage, session=(session, 2))[1] == [(DENIED, False)]
    create_acls(stage.registry, [acl(READ, "one")])
    assert fetch(stage, session=(session, 3))[1] == [(0, True)]


def test_a_fetch_session_keeps_denied_topics_and_refuses_them_each_time(stage):
    create_acls(stage.registry, [acl(READ, "one")])
    _, _, session = fetch(stage, "one", session=(0, 0))
    code, rows, _ = fetch(stage, "two", session=(session, 1))
    assert (code, rows) == (ErrorCode.NONE, [(DENIED, False)])
    assert fetch(stage, session=(session, 2))[:2] == (ErrorCode.NONE, [(DENIED, False)])
    create_acls(stage.registry, [acl(READ, "two"), acl(WRITE, "*")])
    assert produce(stage, "two") == [0]
    assert fetch(stage, session=(session, 3))[:2] == (ErrorCode.NONE, [(0, True)])
    _, rows, session = fetch(stage, "one", "missing", session=(0, 0))
    assert rows == [(0, False), (DENIED, False)] and session
