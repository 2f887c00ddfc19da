"""Creating, growing, emptying and deleting topics, as clients see it."""

import operator

import pytest

from mpbroker.protocol.config_source import ConfigSource
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import create_partitions as grow
from mpbroker.protocol.messages import create_topics as create
from mpbroker.protocol.messages import delete_records as records
from mpbroker.protocol.messages import delete_topics as delete
from mpbroker.protocol.messages import describe_configs as describe
from mpbroker.server.handlers.create_partitions import handle_create_partitions
from mpbroker.server.handlers.create_topics import handle_create_topics
from mpbroker.server.handlers.delete_records import handle_delete_records
from mpbroker.server.handlers.delete_topics import handle_delete_topics
from mpbroker.server.handlers.describe_configs import handle_describe_configs
from tests.server.contexts import context, fake_logs
from tests.support.metadata import start


@pytest.fixture
def registry(tmp_path):
    registry = start(tmp_path)
    registry.create_topic("there", 2)
    return registry


def new_topic(
    name="new", partitions=1, factor=1, assignments=(), configs=()
) -> create.CreatableTopic:
    return create.CreatableTopic(
        name=name,
        num_partitions=partitions,
        replication_factor=factor,
        assignments=[
            create.CreatableReplicaAssignment(partition_index=index, broker_ids=ids)
            for index, ids in assignments
        ],
        configs=[
            create.CreatableTopicConfig(name=key, value=value) for key, value in configs
        ],
    )


def create_all(registry, *topics, version=7, **options):
    response = handle_create_topics(
        create.CreateTopicsRequest(topics=list(topics), **options),
        context(registry, version=version),
    )
    body = response.encode(version)
    return create.CreateTopicsResponse.decode(version, body).topics


def create_one(registry, version=7, validate_only=False, **topic):
    (result,) = create_all(
        registry, new_topic(**topic), version=version, validate_only=validate_only
    )
    return result


# -- CreateTopics ---------------------------------------------------------------------


def test_a_created_topic_is_answered_with_its_id_and_configs(registry):
    result = create_one(registry, partitions=3, configs=[("segment.bytes", "1000")])
    topic = registry.topic("new")
    assert result.error_code == ErrorCode.NONE
    assert result.topic_id == topic.topic_id
    assert (result.num_partitions, result.replication_factor) == (3, 1)
    configs = {config.name: config for config in result.configs}
    assert (configs["segment.bytes"].value, configs["segment.bytes"].config_source) == (
        "1000",
        1,
    )
    assert configs["retention.ms"].config_source == 5


def test_topics_of_a_request_share_the_entries_of_configs_that_they_do_not_set(
    registry,
):
    """10,000 topics have 400,000 entries."""
    configs = [("retention.ms", "1"), ("segment.ms", "2")]
    request = create.CreateTopicsRequest(
        topics=[
            new_topic("plain"),
            new_topic("own", configs=configs),
            new_topic("other"),
        ]
    )
    answer = handle_create_topics(request, context(registry, version=7))
    plain, own, other = (each.configs for each in answer.topics)
    assert all(map(operator.is_, plain, other))
    differing = [
        (mine.name, mine.value)
        for mine, others in zip(own, plain, strict=True)
        if mine is not others
    ]
    assert sorted(differing) == configs


def test_a_created_topic_names_the_sources_that_describe_configs_names(registry):
    static = {"log.retention.hours": "3", "num.partitions": "2"}
    response = handle_create_topics(
        create.CreateTopicsRequest(
            topics=[new_topic(configs=[("segment.bytes", "2000000")])]
        ),
        context(registry, version=7, static_configs=static),
    )
    created = {row.name: row for row in response.topics[0].configs}
    described = handle_describe_configs(
        describe.DescribeConfigsRequest(
            resources=[
                describe.DescribeConfigsResource(resource_type=2, resource_name="new")
            ]
        ),
        context(registry, version=4, static_configs=static),
    )
    for row in described.results[0].configs:
        told = created.pop(row.name)
        assert (told.value, told.config_source) == (row.value, row.config_source)
    assert not created
    sources = {row.name: row.config_source for row in described.results[0].configs}
    assert sources["segment.bytes"] == ConfigSource.TOPIC_CONFIG
    assert sources["retention.ms"] == ConfigSource.STATIC_BROKER_CONFIG
    assert sources["min.insync.replicas"] == ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG
    assert sources["flush.ms"] == ConfigSource.DEFAULT_CONFIG


@pytest.mark.parametrize("version", range(2, 8))
def test_every_version_can_create(registry, version):
    assert create_one(registry, version=version).error_code == ErrorCode.NONE
    assert registry.topic("new") is not None


def test_minus_one_takes_the_brokers_defaults(registry):
    assert create_one(registry, partitions=-1, factor=-1).num_partitions == 5


@pytest.mark.parametrize("version", [2, 3])
def test_minus_one_takes_them_in_old_versions_too(registry, version):
    # kafkajs knows no newer one, and has -1 where nothing is said.
    result = create_one(registry, version=version, partitions=-1, factor=-1)
    assert result.error_code == ErrorCode.NONE
    assert len(registry.topic("new").partitions) == 5


@pytest.mark.parametrize("partitions", [9_999, 10_000, 2**31 - 1])
def test_one_request_creates_10_000_partitions_and_no_more(tmp_path, partitions):
    """After Kafka's testExcessiveNumberOfTopicsCannotBeCreated."""
    registry = start(tmp_path, capacity=30_000)
    version = registry.version
    first, second = create_all(
        registry,
        new_topic(name="first", partitions=partitions, factor=1),
        new_topic(name="second", partitions=1, factor=1),
    )
    if partitions == 9_999:
        assert (first.error_code, second.error_code) == (0, 0)
        return
    for refused in (first, second):
        assert refused.error_code == ErrorCode.POLICY_VIOLATION
        assert refused.error_message.startswith(
            "Excessively large number of partitions per request"
        )
    assert registry.version == version


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        ({"name": "there"}, ErrorCode.TOPIC_ALREADY_EXISTS),
        ({"name": "sp ace"}, ErrorCode.INVALID_TOPIC_EXCEPTION),
        ({"name": ""}, ErrorCode.INVALID_TOPIC_EXCEPTION),
        ({"name": "__cluster_metadata"}, ErrorCode.INVALID_REQUEST),
        ({"partitions": 0}, ErrorCode.INVALID_PARTITIONS),
        ({"partitions": -2}, ErrorCode.INVALID_PARTITIONS),
        ({"partitions": 2**31 - 1}, ErrorCode.POLICY_VIOLATION),
        ({"factor": 0}, ErrorCode.INVALID_REPLICATION_FACTOR),
        ({"factor": 3}, ErrorCode.INVALID_REPLICATION_FACTOR),
        ({"configs": [("no.such", "1")]}, ErrorCode.INVALID_CONFIG),
        ({"configs": [("segment.ms", "x")]}, ErrorCode.INVALID_CONFIG),
        ({"configs": [("segment.ms", None)]}, ErrorCode.INVALID_CONFIG),
        (
            {"partitions": -1, "factor": -1, "assignments": [(0, [2])]},
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ),
        (
            {"partitions": -1, "factor": -1, "assignments": [(1, [1])]},
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ),
        (
            {"partitions": -1, "factor": -1, "assignments": [(0, [1, 1])]},
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ),
        ({"partitions": 1, "assignments": [(0, [1])]}, ErrorCode.INVALID_REQUEST),
    ],
)
@pytest.mark.parametrize("validate_only", [False, True])
def test_a_topic_that_cannot_be_created_has_a_reason(
    registry, topic, code, validate_only
):
    version = registry.version
    result = create_one(registry, validate_only=validate_only, **topic)
    assert result.error_code == code
    assert result.error_message
    assert registry.version == version


def test_too_many_replicas_are_refused_in_kafkas_words(registry):
    assert create_one(registry, factor=3).error_message == (
        "Unable to replicate the partition 3 time(s): The target replication factor of"
        " 3 cannot be reached because only 1 broker(s) are registered."
    )


def test_a_manual_assignment_to_this_broker_is_accepted(registry):
    assignments = [(1, [1]), (0, [1]), (2, [1])]
    result = create_one(registry, partitions=-1, factor=-1, assignments=assignments)
    assert (result.error_code, result.num_partitions) == (ErrorCode.NONE, 3)


def test_validation_alone_creates_nothing(registry):
    assert create_one(registry, validate_only=True).error_code == ErrorCode.NONE
    assert registry.topic("new") is None


def test_a_topic_named_twice_is_refused_and_the_others_are_created(registry):
    results = create_all(registry, new_topic("a"), new_topic("b"), new_topic("a"))
    assert {result.name: result.error_code for result in results} == {
        "a": ErrorCode.INVALID_REQUEST,
        "b": ErrorCode.NONE,
    }
    assert registry.topic("a") is None
    assert registry.topic("b") is not None


# -- DeleteTopics ---------------------------------------------------------------------


def delete_all(registry, *states, version=6, enabled=True):
    gone = []
    request = delete.DeleteTopicsRequest(
        topics=[
            delete.DeleteTopicState(name=name, topic_id=topic_id)
            for name, topic_id in states
        ]
        if version >= 6
        else [],
        topic_names=[name for name, _ in states] if version < 6 else [],
    )
    response = handle_delete_topics(
        request,
        context(
            registry, version=version, delete_topics=enabled, delete_logs=gone.append
        ),
    )
    body = response.encode(version)
    results = delete.DeleteTopicsResponse.decode(version, body).responses
    return {result.name: ErrorCode(result.error_code) for result in results}, gone


NO_ID = bytes(16)


@pytest.mark.parametrize("version", range(1, 7))
def test_every_version_deletes_by_name(registry, version):
    topic = registry.topic("there")
    results, gone = delete_all(registry, ("there", NO_ID), version=version)
    assert (results, gone) == ({"there": ErrorCode.NONE}, [topic])
    assert registry.topic("there") is None


def test_a_topic_is_deleted_by_id_and_told_by_name(registry):
    topic_id = registry.topic("there").topic_id
    results, gone = delete_all(registry, (None, topic_id))
    assert results == {"there": ErrorCode.NONE}
    assert len(gone) == 1


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (("none", NO_ID), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ((None, b"x" * 16), ErrorCode.UNKNOWN_TOPIC_ID),
        (("there", b"x" * 16), ErrorCode.INVALID_REQUEST),
        ((None, NO_ID), ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_topic_that_cannot_be_deleted_has_a_reason(registry, state, code):
    results, gone = delete_all(registry, state)
    assert (list(results.values()), gone) == ([code], [])
    assert registry.topic("there") is not None


def test_a_topic_named_twice_is_not_deleted(registry):
    results, gone = delete_all(registry, ("there", NO_ID), ("there", NO_ID))
    assert (results, gone) == ({"there": ErrorCode.INVALID_REQUEST}, [])


@pytest.mark.parametrize("id_first", [False, True])
def test_a_topic_named_by_name_and_by_id_is_not_deleted(registry, id_first):
    by_name, by_id = ("there", NO_ID), (None, registry.topic("there").topic_id)
    registry.create_topic("other", 1)
    named = [by_id, by_name] if id_first else [by_name, by_id]
    results, gone = delete_all(registry, *named, ("other", NO_ID))
    invalid = ErrorCode.INVALID_REQUEST
    assert results == {"there": invalid, None: invalid, "other": ErrorCode.NONE}
    assert [topic.name for topic in gone] == ["other"]
    assert registry.topic("there") is not None


@pytest.mark.parametrize(
    ("version", "code"),
    [(2, ErrorCode.INVALID_REQUEST), (3, ErrorCode.TOPIC_DELETION_DISABLED)],
)
def test_nothing_is_deleted_where_that_is_disabled(registry, version, code):
    state = ("there", NO_ID)
    results, gone = delete_all(registry, state, version=version, enabled=False)
    assert (results, gone) == ({"there": code}, [])


# -- CreatePartitions -----------------------------------------------------------------


def grow_all(registry, *topics, **options):
    request = grow.CreatePartitionsRequest(
        topics=[
            grow.CreatePartitionsTopic(
                name=name,
                count=count,
                assignments=None
                if ids is None
                else [grow.CreatePartitionsAssignment(broker_ids=each) for each in ids],
            )
            for name, count, ids in topics
        ],
        **options,
    )
    response = handle_create_partitions(request, context(registry))
    results = grow.CreatePartitionsResponse.decode(3, response.encode(3)).results
    return [ErrorCode(result.error_code) for result in results]


def test_one_request_adds_10_000_partitions_and_no_more(tmp_path):
    registry = start(tmp_path, capacity=30_000)
    registry.create_topic("there", 2)
    there = len(registry.topic("there").partitions)
    registry.create_topic("other", 1)
    assert grow_all(registry, ("there", there + 9_999, None), ("other", 3, None)) == [
        ErrorCode.NONE,
        ErrorCode.POLICY_VIOLATION,
    ]
    assert grow_all(registry, ("other", 2, None)) == [ErrorCode.NONE]
    assert grow_all(registry, ("other", 20_000, None)) == [ErrorCode.POLICY_VIOLATION]


def test_partitions_are_added_with_and_without_an_assignment(registry):
    assert grow_all(registry, ("there", 3, None)) == [ErrorCode.NONE]
    assert grow_all(registry, ("there", 5, [[1], [1]])) == [ErrorCode.NONE]
    assert len(registry.topic("there").partitions) == 5


@pytest.mark.parametrize(
    ("topics", "code"),
    [
        ([("there", 2, None)], ErrorCode.INVALID_PARTITIONS),
        ([("there", 1, None)], ErrorCode.INVALID_PARTITIONS),
        ([("there", 2**31 - 1, None)], ErrorCode.POLICY_VIOLATION),
        ([("none", 2, None)], ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ([("there", 3, [])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([("there", 3, [[2]])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([("there", 3, [[1, 2]])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([("there", 3, None), ("there", 4, None)], ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_topic_that_cannot_grow_has_a_reason(registry, topics, code):
    assert grow_all(registry, *topics) == [code]
    assert len(registry.topic("there").partitions) == 2


def test_growth_can_be_validated_alone(registry):
    codes = grow_all(registry, ("there", 3, None), validate_only=True)
    assert codes == [ErrorCode.NONE]
    assert len(registry.topic("there").partitions) == 2


# -- DeleteRecords --------------------------------------------------------------------


class FakeLog:
    """A log of 10 records."""

    def delete_records(self, before_offset):
        if before_offset > 10:
            raise ApiError(ErrorCode.OFFSET_OUT_OF_RANGE, "above the high watermark")
        return 10 if before_offset == -1 else before_offset


def test_each_partition_answers_with_its_new_start_or_its_error(registry):
    registry.create_topic("__consumer_offsets", 1)
    request = records.DeleteRecordsRequest(
        topics=[
            records.DeleteRecordsTopic(
                name=name,
                partitions=[
                    records.DeleteRecordsPartition(partition_index=index, offset=offset)
                    for index, offset in partitions
                ],
            )
            for name, partitions in [
                ("there", [(0, 4), (1, -1), (2, 0), (-1, 0), (0, 11)]),
                ("none", [(0, 0)]),
                ("__consumer_offsets", [(0, 0)]),
            ]
        ]
    )
    response = handle_delete_records(
        request, context(registry, logs=fake_logs(log=lambda topic, index: FakeLog()))
    )
    decoded = records.DeleteRecordsResponse.decode(2, response.encode(2))
    answers = {
        (topic.name, each.partition_index, each.low_watermark, each.error_code)
        for topic in decoded.topics
        for each in topic.partitions
    }
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert answers == {
        ("there", 0, 4, ErrorCode.NONE),
        ("there", 1, 10, ErrorCode.NONE),
        ("there", 2, -1, unknown),
        ("there", -1, -1, unknown),
        ("there", 0, -1, ErrorCode.OFFSET_OUT_OF_RANGE),
        ("none", 0, -1, unknown),
        ("__consumer_offsets", 0, -1, ErrorCode.INVALID_TOPIC_EXCEPTION),
    }


# -- executed again -------------------------------------------------------------------


class Notes:
    """The notes in a request's slot, which outlive the handler that wrote them."""

    def __init__(self) -> None:
        self.words: list[int] = []

    def earlier(self):
        return list(self.words)

    def note(self, words) -> None:
        self.words = list(words)


class Killed(BaseException):
    """Right after the note: nothing is changed yet."""


class LastNotes(Notes):
    """Notes whose handler dies right after it wrote them."""

    def note(self, words) -> None:
        super().note(words)
        raise Killed


def lives(change):
    """What ``change`` answers when it is done at once, again, and after a death."""
    notes = Notes()
    first = change("at once", notes)
    second = change("at once", notes)  # its answer was lost
    dying = LastNotes()
    with pytest.raises(Killed):
        change("after a death", dying)
    notes.words = dying.words
    third = change("after a death", notes)
    return first, second, third


def test_topics_are_created_once_after_any_death(registry):
    def change(name, notes):
        request = create.CreateTopicsRequest(
            topics=[new_topic(name=name.replace(" ", "-")), new_topic(name="there")]
        )
        answer = handle_create_topics(
            request, context(registry, version=7, intent=notes)
        )
        return [(topic.error_code, topic.topic_id) for topic in answer.topics]

    first, second, third = lives(change)
    assert first == second
    assert first[0] == (ErrorCode.NONE, registry.topic("at-once").topic_id)
    assert first[1][0] == ErrorCode.TOPIC_ALREADY_EXISTS
    assert third[0] == (ErrorCode.NONE, registry.topic("after-a-death").topic_id)
    again = change("at once", Notes())  # another request
    assert again[0][0] == ErrorCode.TOPIC_ALREADY_EXISTS


@pytest.mark.parametrize("by_id", [False, True])
def test_topics_are_deleted_once_after_any_death(registry, by_id):
    names = {"at once": "one", "after a death": "two"}
    ids = {name: registry.create_topic(name, 1).topic_id for name in names.values()}

    def change(name, notes):
        state = delete.DeleteTopicState(name=names[name])
        if by_id:
            state = delete.DeleteTopicState(name=None, topic_id=ids[names[name]])
        unknown = delete.DeleteTopicState(name="unknown")
        answer = handle_delete_topics(
            delete.DeleteTopicsRequest(topics=[unknown, state]),
            context(registry, version=6, intent=notes),
        )
        return [(each.error_code, each.topic_id) for each in answer.responses]

    first, second, third = lives(change)
    unknown = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, bytes(16))
    assert first == second == [unknown, (ErrorCode.NONE, ids["one"])]
    assert third == [unknown, (ErrorCode.NONE, ids["two"])]
    assert change("at once", Notes())[1][0] != ErrorCode.NONE  # another request


@pytest.mark.parametrize("name", ["__consumer_offsets", "__transaction_state"])
@pytest.mark.parametrize("validate_only", [True, False])
def test_the_coordinators_topics_do_not_grow(registry, name, validate_only):
    """Groups and transactions are found in them by the number of partitions."""
    registry.create_topic(name, 2)
    for count in (1, 2, 3):
        (code,) = grow_all(registry, (name, count, None), validate_only=validate_only)
        assert code is ErrorCode.INVALID_PARTITIONS
    assert len(registry.topic(name).partitions) == 2


def test_topics_grow_once_after_any_death(registry):
    names = {"at once": "one", "after a death": "two"}
    for name in names.values():
        registry.create_topic(name, 1)

    def change(name, notes):
        wanted = [
            grow.CreatePartitionsTopic(name="there", count=2, assignments=None),
            grow.CreatePartitionsTopic(name=names[name], count=4, assignments=None),
        ]
        answer = handle_create_partitions(
            grow.CreatePartitionsRequest(topics=wanted),
            context(registry, intent=notes),
        )
        return [each.error_code for each in answer.results]

    answers = lives(change)
    assert answers == ([ErrorCode.INVALID_PARTITIONS, ErrorCode.NONE],) * 3
    assert [len(registry.topic(name).partitions) for name in names.values()] == [4, 4]
    assert change("at once", Notes())[1] == ErrorCode.INVALID_PARTITIONS


def test_a_request_with_validate_only_notes_nothing(registry):
    notes = Notes()
    handle_create_topics(
        create.CreateTopicsRequest(topics=[new_topic()], validate_only=True),
        context(registry, version=7, intent=notes),
    )
    assert notes.words == []
