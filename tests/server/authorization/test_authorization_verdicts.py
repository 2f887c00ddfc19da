"""The parts that are refused and shown to a sender with some permissions, by API."""

from __future__ import annotations

from typing import Any

import pytest

from mpbroker.protocol.acl import AclOperation as Op
from mpbroker.protocol.acl import ResourceType
from mpbroker.server.api_messages import request_class, response_class
from mpbroker.server.apis import APIS
from mpbroker.server.message_apis import rule_of
from tests.server.authorization.authorization_stage import (
    OTHER_ID,
    TOPIC_ID,
    Granting,
    authorization,
    request_of,
)
from tests.server.authorization.guarded_asks import (
    CLUSTER,
    GROUP,
    ID,
    TOPIC,
    E,
    Handler,
    K,
    ask,
    codes_of,
    guarded,
    make,
    part,
    sample,
)

# -- metadata ------------------------------------------------------------------------


def metadata(*names: str, **fields: Any) -> Any:
    return make(
        K.METADATA,
        topics=[part(K.METADATA, "MetadataRequestTopic", name=name) for name in names],
        **fields,
    )


def described(*names: str) -> Any:
    return response_class(K.METADATA)(
        topics=[part(K.METADATA, "MetadataResponseTopic", name=name) for name in names],
    )


def topics_of(answer: Any) -> dict[str, int]:
    return {topic.name: topic.error_code for topic in answer.topics}


@pytest.mark.parametrize("version", range(14))
def test_all_topics_are_those_that_may_be_described(version):
    message = make(K.METADATA, topics=[] if version == 0 else None)
    response = described("t", "other")
    answer, _ = ask(message, version, (Op.DESCRIBE, "t"), response=response)
    assert topics_of(answer) == {"t": 0}


@pytest.mark.parametrize("version", range(14))
def test_topics_that_may_not_be_described_look_the_same_there_or_not(version):
    message = metadata("t", "other", "missing")
    answer, seen = ask(message, version, (Op.DESCRIBE, "t"), response=described("t"))
    assert [topic.name for topic in seen.topics] == ["t"]
    assert topics_of(answer) == {"t": 0, "other": TOPIC, "missing": TOPIC}
    assert {topic.topic_id for topic in answer.topics} == {bytes(16)}


def test_version_0_does_not_get_all_topics_for_one_that_is_denied():
    answer, _ = ask(metadata("other"), 0, response=described("t", "other"))
    assert topics_of(answer) == {"other": TOPIC}


def test_a_missing_topic_is_created_only_with_create_permission():
    describe = (Op.DESCRIBE, "new")
    answer, seen = ask(metadata("new"), 9, describe)
    assert topics_of(answer) == {"new": TOPIC} and not seen.topics
    for may_create in ((Op.CREATE, "new"), (Op.CREATE, "kafka-cluster")):
        _, seen = ask(metadata("new"), 9, describe, may_create)
        assert [topic.name for topic in seen.topics] == ["new"]
    _, seen = ask(metadata("new"), 9, describe, auto_create=False)
    assert seen.topics, "nothing is created: the handler says that it is not there"
    message = metadata("new", allow_auto_topic_creation=False)
    _, seen = ask(message, 9, describe)
    assert seen.topics


@pytest.mark.parametrize("name", [None, "", "t"])
def test_an_id_that_may_not_be_described_is_refused_without_its_name(name):
    message = make(
        K.METADATA,
        topics=[
            part(K.METADATA, "MetadataRequestTopic", name=name, topic_id=topic_id)
            for topic_id in (TOPIC_ID, OTHER_ID, b"?" * 16)
        ],
    )
    answer, seen = ask(message, 12, (Op.DESCRIBE, "t"))
    assert [topic.topic_id for topic in seen.topics] == [TOPIC_ID, b"?" * 16]
    (refused,) = answer.topics
    assert (refused.name, refused.topic_id, refused.error_code) == (
        None,
        OTHER_ID,
        TOPIC,
    )


def test_operations_are_shown_only_if_the_request_wants_them():
    message = metadata(
        "t",
        include_topic_authorized_operations=True,
        include_cluster_authorized_operations=True,
    )
    rights = [(Op.DESCRIBE, "t"), (Op.WRITE, "t")]
    answer, _ = ask(message, 10, *rights, response=described("t"))
    assert answer.topics[0].topic_authorized_operations == 1 << 8 | 1 << 4
    assert answer.cluster_authorized_operations == 0
    rights += [(Op.DESCRIBE, "kafka-cluster"), (Op.CREATE, "kafka-cluster")]
    answer, _ = ask(message, 10, *rights, response=described("t"))
    assert answer.cluster_authorized_operations == 1 << 8 | 1 << 5


def test_a_cursor_does_not_name_a_topic_without_describe_permission():
    message = make(K.DESCRIBE_TOPIC_PARTITIONS)
    answer, seen = ask(message, 0, (Op.DESCRIBE, "t"))
    assert [topic.name for topic in seen.topics] == ["t"]
    answer, seen = ask(message, 0)
    assert seen is None and answer.topics == [] and answer.next_cursor is None


# -- topics ----------------------------------------------------------------------------


def creatable(*names: str) -> Any:
    return make(
        K.CREATE_TOPICS,
        topics=[
            part(
                K.CREATE_TOPICS,
                "CreatableTopic",
                name=name,
                num_partitions=1,
                replication_factor=1,
            )
            for name in names
        ],
    )


def created(*names: str) -> Any:
    return response_class(K.CREATE_TOPICS)(
        topics=[
            part(
                K.CREATE_TOPICS,
                "CreatableTopicResult",
                name=name,
                error_message=None,
                num_partitions=3,
                replication_factor=1,
                configs=[
                    part(
                        K.CREATE_TOPICS,
                        "CreatableTopicConfigs",
                        name="retention.ms",
                        value="1",
                    )
                ],
            )
            for name in names
        ]
    )


def test_creating_topics_needs_create_and_showing_configs_describe_configs():
    answer, seen = ask(creatable("t", "u"), 7, (Op.CREATE, "t"), response=created("t"))
    assert [topic.name for topic in seen.topics] == ["t"]
    made, refused = answer.topics
    assert (made.name, made.error_code, made.topic_config_error_code) == ("t", 0, TOPIC)
    assert (made.num_partitions, made.configs) == (-1, [])
    assert (refused.name, refused.error_code) == ("u", TOPIC)
    rights = [(Op.CREATE, "kafka-cluster"), (Op.DESCRIBE_CONFIGS, "u")]
    answer, seen = ask(creatable("t", "u"), 7, *rights, response=created("t", "u"))
    assert [topic.name for topic in seen.topics] == ["t", "u"]
    assert [topic.num_partitions for topic in answer.topics] == [-1, 3]


def test_a_topic_is_deleted_by_its_id_without_telling_its_name():
    message = make(
        K.DELETE_TOPICS,
        topics=[
            part(K.DELETE_TOPICS, "DeleteTopicState", topic_id=topic_id)
            for topic_id in (TOPIC_ID, OTHER_ID, b"?" * 16)
        ],
    )
    answer, seen = ask(message, 6, (Op.DESCRIBE, "other"))
    assert [topic.topic_id for topic in seen.topics] == [b"?" * 16]
    assert [(row.name, row.topic_id, row.error_code) for row in answer.responses] == [
        (None, TOPIC_ID, TOPIC),
        ("other", OTHER_ID, TOPIC),
    ]


def test_leader_epochs_need_cluster_action_or_describe():
    message = sample(
        request_class(K.OFFSET_FOR_LEADER_EPOCH), 4, K.OFFSET_FOR_LEADER_EPOCH
    )
    for right in ((Op.CLUSTER_ACTION, "kafka-cluster"), (Op.DESCRIBE, "t")):
        answer, seen = ask(message, 4, right)
        assert len(seen.topics) == 1 and codes_of(answer) == set()


# -- groups ----------------------------------------------------------------------------


def offsets_of(*names: str) -> Any:
    return response_class(K.OFFSET_FETCH)(
        groups=[
            part(
                K.OFFSET_FETCH,
                "OffsetFetchResponseGroup",
                group_id="g",
                topics=[
                    part(
                        K.OFFSET_FETCH,
                        "OffsetFetchResponseTopics",
                        name=name,
                        topic_id=TOPIC_ID if name == "t" else OTHER_ID,
                    )
                    for name in names
                ],
            )
        ]
    )


@pytest.mark.parametrize("version", [8, 9, 10])
def test_offsets_of_all_topics_are_those_of_topics_that_may_be_described(version):
    message = make(
        K.OFFSET_FETCH,
        groups=[
            part(K.OFFSET_FETCH, "OffsetFetchRequestGroup", group_id=group, topics=None)
            for group in ("g", "h")
        ],
    )
    answer, seen = ask(
        message,
        version,
        (Op.DESCRIBE, "g"),
        (Op.DESCRIBE, "t"),
        response=offsets_of("t", "other"),
    )
    assert [group.group_id for group in seen.groups] == ["g"]
    mine, refused = answer.groups
    assert [row.topic_id if version == 10 else row.name for row in mine.topics] == [
        TOPIC_ID if version == 10 else "t"
    ]
    assert (refused.group_id, refused.error_code) == ("h", GROUP)


@pytest.mark.parametrize("version", [2, 9, 10])
def test_offsets_are_committed_for_topics_that_may_be_read(version):
    message = sample(request_class(K.OFFSET_COMMIT), version, K.OFFSET_COMMIT)
    other = part(
        K.OFFSET_COMMIT,
        "OffsetCommitRequestTopic",
        name="other",
        topic_id=OTHER_ID,
        partitions=[
            part(K.OFFSET_COMMIT, "OffsetCommitRequestPartition", partition_index=4)
        ],
    )
    message.topics.append(other)
    answer, seen = ask(message, version, (Op.READ, "g"), (Op.READ, "t"))
    assert len(seen.topics) == 1
    (refused,) = answer.topics
    assert refused.name == ("other" if version < 10 else "")
    assert refused.topic_id == (bytes(16) if version < 10 else OTHER_ID)
    (partition,) = refused.partitions
    assert (partition.partition_index, partition.error_code) == (4, TOPIC)


def test_listing_groups_needs_describe_of_them_or_of_the_cluster():
    response = response_class(K.LIST_GROUPS)(
        groups=[
            part(K.LIST_GROUPS, "ListedGroup", group_id=group) for group in ("g", "h")
        ]
    )
    for right, shown in (
        ((Op.DESCRIBE, "h"), ["h"]),
        ((Op.READ, "h"), []),
        ((Op.DESCRIBE, "kafka-cluster"), ["g", "h"]),
    ):
        answer, _ = ask(make(K.LIST_GROUPS), 4, right, response=response)
        assert [group.group_id for group in answer.groups] == shown


def test_a_member_must_be_allowed_to_describe_all_topics_it_subscribes_to():
    message = make(
        K.CONSUMER_GROUP_HEARTBEAT, group_id="g", subscribed_topic_names=["t", "other"]
    )
    rights = [(Op.READ, "g"), (Op.DESCRIBE, "t")]
    answer, seen = ask(message, 1, *rights)
    assert answer.error_code == TOPIC and seen is None
    answer, seen = ask(message, 1, *rights, (Op.DESCRIBE, "other"))
    assert answer.error_code == 0 and seen is not None


def test_a_group_is_described_only_with_describe_of_its_topics():
    module = "consumer_group_describe"
    key = K.CONSUMER_GROUP_DESCRIBE
    assert key.name.lower() == module
    assignment = part(
        key,
        "Assignment",
        topic_partitions=[part(key, "TopicPartitions", topic_name="other")],
    )
    response = response_class(key)(
        groups=[
            part(
                key,
                "DescribedGroup",
                group_id="g",
                members=[part(key, "Member", assignment=assignment)],
            )
        ]
    )
    message = make(key, group_ids=["g"], include_authorized_operations=True)
    rights = [(Op.DESCRIBE, "g")]
    answer, _ = ask(message, 1, *rights, response=response)
    (group,) = answer.groups
    assert (group.error_code, group.members) == (TOPIC, [])
    answer, _ = ask(message, 1, *rights, (Op.DESCRIBE, "other"), response=response)
    (group,) = answer.groups
    assert (group.error_code, len(group.members)) == (0, 1)
    assert group.authorized_operations == 1 << 8


@pytest.mark.parametrize(
    ("key_type", "code", "kind"),
    [(0, GROUP, ResourceType.GROUP), (1, ID, ResourceType.TRANSACTIONAL_ID)],
)
def test_finding_a_coordinator_needs_describe(key_type, code, kind):
    authorizer = Granting((Op.DESCRIBE, "a"))
    message = make(K.FIND_COORDINATOR, key_type=key_type, coordinator_keys=["a", "b"])
    handler = Handler(K.FIND_COORDINATOR)
    handle = guarded(K.FIND_COORDINATOR, handler, authorization(authorizer))
    body = handle(request_of(message, 4))
    assert handler.seen.coordinator_keys == ["a"]
    answer = response_class(K.FIND_COORDINATOR).decode(4, memoryview(body))
    (refused,) = answer.coordinators
    assert (refused.key, refused.error_code, refused.node_id) == ("b", code, -1)
    assert {kind} == {asked for _, asked, _ in authorizer.asked}


# -- transactions ----------------------------------------------------------------------


def add_partitions(*names: str) -> Any:
    return make(
        K.ADD_PARTITIONS_TO_TXN,
        v3_and_below_transactional_id="x",
        v3_and_below_topics=[
            part(
                K.ADD_PARTITIONS_TO_TXN,
                "AddPartitionsToTxnTopic",
                name=name,
                partitions=[0],
            )
            for name in names
        ],
    )


def test_if_one_topic_is_denied_no_partition_is_added():
    message = add_partitions("t", "other", "missing", "__consumer_offsets")
    everything = ("t", "missing", "__consumer_offsets", "x")
    answer, seen = ask(message, 3, *((Op.WRITE, name) for name in everything))
    assert seen is None
    assert {
        row.name: row.results_by_partition[0].partition_error_code
        for row in answer.results_by_topic_v3_and_below
    } == {
        "t": E.OPERATION_NOT_ATTEMPTED,
        "other": TOPIC,
        "missing": E.UNKNOWN_TOPIC_OR_PARTITION,
        "__consumer_offsets": TOPIC,
    }


def test_a_missing_topic_is_left_to_the_coordinator():
    message = add_partitions("t", "missing")
    rights = [(Op.WRITE, name) for name in ("t", "missing", "x")]
    _, seen = ask(message, 3, *rights)
    assert len(seen.v3_and_below_topics) == 2


def test_a_producer_id_needs_write_of_any_topic():
    message = make(K.INIT_PRODUCER_ID, transactional_id=None)
    answer, seen = ask(message, 4)
    assert answer.error_code == CLUSTER and seen is None
    answer, seen = ask(message, 4, (Op.IDEMPOTENT_WRITE, "kafka-cluster"))
    assert answer.error_code == 0 and seen is not None


@pytest.mark.parametrize(
    ("rights", "code"),
    [
        ([], ID),
        ([(Op.WRITE, "x")], GROUP),
        ([(Op.WRITE, "x"), (Op.READ, "g")], TOPIC),
    ],
)
def test_offsets_of_a_transaction_need_three_rights(rights, code):
    message = sample(request_class(K.TXN_OFFSET_COMMIT), 4, K.TXN_OFFSET_COMMIT)
    answer, seen = ask(message, 4, *rights)
    assert seen is None
    assert codes_of(answer) == {code}


def test_only_transactions_and_topics_with_describe_are_shown():
    key = K.DESCRIBE_TRANSACTIONS
    response = response_class(key)(
        transaction_states=[
            part(
                key,
                "TransactionState",
                transactional_id="x",
                topics=[part(key, "TopicData", topic=name) for name in ("t", "other")],
            )
        ]
    )
    message = make(key, transactional_ids=["x", "y"])
    answer, _ = ask(
        message, 0, (Op.DESCRIBE, "x"), (Op.DESCRIBE, "t"), response=response
    )
    mine, refused = answer.transaction_states
    assert [row.topic for row in mine.topics] == ["t"]
    assert (refused.transactional_id, refused.error_code) == ("y", ID)


# -- configs and the cluster -----------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "operation"),
    [
        (K.DESCRIBE_CONFIGS, Op.DESCRIBE_CONFIGS),
        (K.ALTER_CONFIGS, Op.ALTER_CONFIGS),
        (K.INCREMENTAL_ALTER_CONFIGS, Op.ALTER_CONFIGS),
    ],
)
def test_configs_are_those_of_a_topic_a_group_or_the_cluster(key, operation):
    name = {K.DESCRIBE_CONFIGS: "DescribeConfigsResource"}.get(
        key, "AlterConfigsResource"
    )
    resources = [(2, "t"), (4, "1"), (4, ""), (8, "1"), (32, "g"), (77, "?")]

    def message():
        return make(
            key,
            resources=[
                part(key, name, resource_type=kind, resource_name=resource)
                for kind, resource in resources
            ],
        )

    def refused(*rights):
        answer, seen = ask(message(), 1, *rights)
        rows = getattr(answer, "results", None) or getattr(answer, "responses", [])
        got = {(row.resource_type, row.resource_name): row.error_code for row in rows}
        left = {(row.resource_type, row.resource_name) for row in seen.resources}
        assert left | set(got) == set(resources) and not left & set(got)
        return got

    brokers = {(4, "1"): CLUSTER, (4, ""): CLUSTER, (8, "1"): CLUSTER, (77, "?"): 31}
    assert refused() == {(2, "t"): TOPIC, (32, "g"): GROUP, **brokers}
    assert refused((operation, "t"), (operation, "g")) == brokers
    assert refused((operation, "kafka-cluster")) == {(2, "t"): TOPIC, (32, "g"): GROUP}


def test_hanging_transactions_are_aborted_by_administrators_and_brokers():
    message = sample(request_class(K.WRITE_TXN_MARKERS), 1, K.WRITE_TXN_MARKERS)
    for operation in (Op.ALTER, Op.CLUSTER_ACTION):
        _, seen = ask(message, 1, (operation, "kafka-cluster"))
        assert seen is not None


def test_a_forwarded_produce_adds_no_denied_topic_to_a_transaction():
    for version in (9, 13):
        message = sample(request_class(K.PRODUCE), version, K.PRODUCE)
        access = authorization(Granting((Op.WRITE, "other"))).access(
            request_of(message, version)
        )
        rule = rule_of(APIS[K.PRODUCE])
        amend = rule(access, message, version)
        assert message.topic_data == []
        answer = response_class(K.PRODUCE)()
        amend(answer)
        assert codes_of(answer) == {TOPIC}
        access = authorization(Granting((Op.WRITE, "t"))).access(
            request_of(message, version)
        )
        again = sample(request_class(K.PRODUCE), version, K.PRODUCE)
        assert rule(access, again, version) is None
