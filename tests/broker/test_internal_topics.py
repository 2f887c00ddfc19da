"""Topics of the coordinator that somebody else makes or deletes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpbroker.base.java_hash import java_hash
from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin.config_admin import (
    ConfigResource,
    ConfigResourceType,
    describe_configs,
)
from mpbroker.client.admin.group_admin import alter_offsets, committed_offsets
from mpbroker.client.admin.topic_admin import (
    LATEST,
    create_partitions,
    create_topic,
    delete_topic,
    list_offsets,
)
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from tests.support.children import wait_until

OFFSETS = "__consumer_offsets"
TRANSACTIONS = "__transaction_state"
SHARE_STATES = "__share_group_state"
GROUPS = [f"g{number}" for number in range(9)]


@pytest.fixture
def cluster(make_broker) -> Iterator[Cluster]:
    broker = make_broker(
        {
            "offsets.topic.num.partitions": 7,
            "transaction.state.log.num.partitions": 3,
        }
    )
    with Cluster(parse_addresses(broker.bootstrap), timeout_s=60) as cluster:
        create_topic(cluster, "t")
        yield cluster


def commit_for_all(cluster: Cluster, offset: int) -> None:
    wanted = {TopicPartition("t", 0): offset}
    for group in GROUPS:

        def is_committed(group: str = group) -> bool:
            try:
                alter_offsets(cluster, group, wanted)
                return committed_offsets(cluster, group) == wanted
            except ApiError as error:
                assert error.error_code.retriable, error
                return False
            except BrokerUnavailableError:  # an answer that has no place for errors
                return False

        wait_until(is_committed)


def test_a_client_that_asks_for_one_gets_it_as_the_coordinator_makes_it(cluster):
    for name, count in ((OFFSETS, 7), (TRANSACTIONS, 3)):
        assert len(cluster.topic(name, auto_create=True).partitions) == count
        resource = ConfigResource(ConfigResourceType.TOPIC, name)
        (policy,) = describe_configs(cluster, resource, ["cleanup.policy"])
        assert policy.value == "compact"
    commit_for_all(cluster, 1)


def test_groups_go_on_in_a_topic_that_was_made_with_fewer_partitions(cluster):
    assert committed_offsets(cluster, "g") == {}  # there is a coordinator
    create_topic(cluster, OFFSETS, partitions=2)
    commit_for_all(cluster, 1)
    assert len(cluster.topic(OFFSETS).partitions) == 2


def test_groups_are_kept_where_their_ids_say_in_a_topic_with_more_partitions(cluster):
    """Where a successor looks for them, and keeps what is committed later."""
    assert committed_offsets(cluster, "g") == {}  # there is a coordinator
    create_topic(cluster, OFFSETS, partitions=20)
    commit_for_all(cluster, 1)
    leaders = {
        TopicPartition(OFFSETS, each.partition_index): each.leader_id
        for each in cluster.topic(OFFSETS).partitions
    }
    ends = list_offsets(cluster, dict.fromkeys(leaders, LATEST), leaders)
    used = {partition.partition for partition, end in ends.items() if end.offset}
    assert used == {java_hash(group) % 20 for group in GROUPS}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (OFFSETS, "offsets.topic.num.partitions"),
        (TRANSACTIONS, "transaction.state.log.num.partitions"),
        (SHARE_STATES, "share.coordinator.state.topic.num.partitions"),
    ],
)
def test_the_coordinators_topics_do_not_grow(cluster, name, setting):
    before = len(cluster.topic(name, auto_create=True).partitions)
    with pytest.raises(ApiError, match=f"cannot be changed.*{setting}") as refused:
        create_partitions(cluster, name, before + 1)
    assert refused.value.error_code is ErrorCode.INVALID_PARTITIONS
    assert len(cluster.topic(name).partitions) == before


def test_groups_go_on_in_a_topic_that_was_made_again(cluster):
    for offset in range(1, 4):
        commit_for_all(cluster, offset)
        delete_topic(cluster, OFFSETS)
    commit_for_all(cluster, 4)
    assert len(cluster.topic(OFFSETS).partitions) == 7
