"""Answers that say too little or too much end in an error of ours, or in nothing."""

from __future__ import annotations

import pytest

from mpbroker.client.addresses import Address
from mpbroker.client.admin import config_admin, topic_admin
from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer.group_member import GroupMember, GroupSettings
from mpbroker.client.error_words import MEANINGS
from mpbroker.client.errors import describe_error
from mpbroker.client.settings import ClientSettings
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.messages.create_partitions import CreatePartitionsResponse
from mpbroker.protocol.messages.create_topics import CreateTopicsResponse
from mpbroker.protocol.messages.delete_topics import DeleteTopicsResponse
from mpbroker.protocol.messages.describe_configs import DescribeConfigsResponse
from mpbroker.protocol.messages.incremental_alter_configs import (
    IncrementalAlterConfigsResponse,
)
from mpbroker.protocol.messages.join_group import JoinGroupResponse
from mpbroker.protocol.messages.list_offsets import ListOffsetsResponse
from mpbroker.protocol.messages.metadata import MetadataResponse
from tests.client.test_fetcher import (
    T0,
    answer_for,
    batch_of,
    fetched_values,
    make_fetcher,
)

CONFIG = ConfigResource(ConfigResourceType.CLIENT_METRICS, "all")


def test_a_partition_that_nobody_asked_for_is_passed_over(fake_broker, cluster):
    other = TopicPartition("t", 1)
    fake_broker.append("t", 1, batch_of(b"1"))
    fake_broker.answer_with(ApiKey.FETCH, answer_for(records=batch_of(b"0")))
    reader = make_fetcher(cluster, {other: 0})
    assert reader.fetch() == []  # an answer about partition 0
    assert fetched_values(reader.fetch()) == [b"1"]
    assert T0 not in reader.positions


@pytest.mark.parametrize(
    ("api", "nothing", "ask"),
    [
        (
            ApiKey.METADATA,
            lambda request: MetadataResponse(),
            lambda cluster: cluster.topic("t"),
        ),
        (
            ApiKey.LIST_OFFSETS,
            lambda request: ListOffsetsResponse(),
            lambda cluster: topic_admin.list_offsets(
                cluster, {T0: topic_admin.LATEST}, {T0: 7}
            ),
        ),
        (
            ApiKey.CREATE_TOPICS,
            lambda request: CreateTopicsResponse(),
            lambda cluster: topic_admin.create_topic(cluster, "u"),
        ),
        (
            ApiKey.DELETE_TOPICS,
            lambda request: DeleteTopicsResponse(),
            lambda cluster: topic_admin.delete_topic(cluster, "t"),
        ),
        (
            ApiKey.CREATE_PARTITIONS,
            lambda request: CreatePartitionsResponse(),
            lambda cluster: topic_admin.create_partitions(cluster, "t", 9),
        ),
        (
            ApiKey.DESCRIBE_CONFIGS,
            lambda request: DescribeConfigsResponse(),
            lambda cluster: config_admin.describe_configs(cluster, CONFIG),
        ),
        (
            ApiKey.INCREMENTAL_ALTER_CONFIGS,
            lambda request: IncrementalAlterConfigsResponse(),
            lambda cluster: config_admin.alter_configs(cluster, CONFIG, {}, ()),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, ApiKey) else "",
)
def test_an_answer_without_what_was_asked_for_is_none(
    fake_broker, cluster, api, nothing, ask
):
    cluster.metadata([])  # so that the next question for it is the test's
    fake_broker.answer_with(api, nothing)
    with pytest.raises(ProtocolError, match=r"^the answer of .* lacks"):
        ask(cluster)


def test_an_assignor_that_nobody_offered_is_told():
    settings = ClientSettings((Address("127.0.0.1", 9),), "")
    member = GroupMember(settings, GroupSettings("g"))
    joined = JoinGroupResponse(
        generation_id=1,
        protocol_name="made-up",
        leader="a",
        member_id="a",
        members=[],
    )
    with pytest.raises(ProtocolError, match="'made-up', which this client"):
        member._sync(joined)
    member.close()


@pytest.mark.parametrize("code", ErrorCode)
def test_no_error_code_stands_without_words(code):
    assert describe_error(code, None) == f"{code.name}: {MEANINGS[code]}"
    assert describe_error(code, "the broker's own") == f"{code.name}: the broker's own"
    assert "does not know" in describe_error(9999, None)
