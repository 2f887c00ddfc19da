"""Settings of the coordinator's topics."""

from __future__ import annotations

import pytest

from mpbroker.base.config_def import ConfigError
from mpbroker.config import BrokerConfig
from mpbroker.coordinator.groups.assignors import ASSIGNORS
from mpbroker.ipc.layout import MAX_PARTITIONS

OFFSETS = "offsets.topic.num.partitions"
TRANSACTIONS = "transaction.state.log.num.partitions"
SHARE_STATES = "share.coordinator.state.topic.num.partitions"


@pytest.mark.parametrize("key", [OFFSETS, TRANSACTIONS, "num.partitions"])
def test_no_topic_may_have_more_partitions_than_a_broker(key):
    with pytest.raises(ConfigError, match=f"between 1 and {MAX_PARTITIONS}") as caught:
        BrokerConfig.load({key: "99999999"}, None, {})
    assert f"{key}=99999999" in str(caught.value)


def test_nor_may_all_of_the_coordinators_together():
    half = MAX_PARTITIONS // 2
    most = {OFFSETS: str(half), TRANSACTIONS: str(half - 7), SHARE_STATES: "7"}
    BrokerConfig.load(most, None, {})
    with pytest.raises(ConfigError, match="together above") as caught:
        BrokerConfig.load({**most, SHARE_STATES: "8"}, None, {})
    assert all(name in str(caught.value) for name in most)


@pytest.mark.parametrize("assignors", ["", "cooperative", "uniform,sticky"])
def test_assignors_that_the_coordinator_does_not_have_are_refused(assignors):
    with pytest.raises(ConfigError) as caught:
        BrokerConfig.load({"group.consumer.assignors": assignors}, None, {})
    assert "a comma-separated list of uniform, range, one at least" in str(caught.value)
    assert {"uniform", "range"} == ASSIGNORS.keys()
