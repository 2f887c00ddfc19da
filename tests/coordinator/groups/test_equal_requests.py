"""Which requests may be executed again without being decoded: see rig.py, `repeated`.

The rig executes each of these in both ways, and compares.
"""

from __future__ import annotations

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
)
from tests.coordinator.rig import Rig


def test_heartbeats_of_a_stable_group_are(rig: Rig) -> None:
    (member,) = rig.stable(1)
    generation = rig.group().generation_id
    for repeated in range(3):
        assert rig.heartbeat(member, generation) == 0
        assert rig.repeated == repeated
        rig.advance(9_000)  # the session goes on
    rig.join(rig.new_id())  # a rebalance begins
    assert rig.heartbeat(member, generation) == ErrorCode.REBALANCE_IN_PROGRESS
    rig.leave(member)
    assert rig.heartbeat(member, generation) == ErrorCode.UNKNOWN_MEMBER_ID
    assert rig.repeated == 2


def beat(rig: Rig, member: str, epoch: int, client: str = "c") -> int:
    """Send a heartbeat, in full if the member joins; return the member epoch."""
    request = ConsumerGroupHeartbeatRequest(
        group_id="g",
        member_id=member,
        member_epoch=epoch,
        rebalance_timeout_ms=-1 if epoch else 20_000,
        subscribed_topic_names=None if epoch else ["t"],
        topic_partitions=None if epoch else [],
    )
    answer = rig.ask("consumer_group_heartbeat", request, 1, client)
    assert answer.error_code == 0
    new_epoch: int = answer.member_epoch
    return new_epoch


def test_heartbeats_without_news_are_while_nothing_changes(rig: Rig) -> None:
    epoch = beat(rig, "a", 0)
    for repeated in range(3):
        assert beat(rig, "a", epoch) == epoch
        assert rig.repeated == repeated
        rig.advance(40_000)  # the session goes on
    rig.topics.counts["t"] = 5
    assert beat(rig, "a", epoch) == epoch + 1
    assert rig.repeated == 2


def test_a_heartbeat_that_brings_a_member_on_is_not(rig: Rig) -> None:
    epoch = beat(rig, "a", 0)
    beat(rig, "a", epoch)
    beat(rig, "b", 0)
    assert beat(rig, "a", epoch) == epoch  # it has to give partitions up
    assert rig.repeated == 0


@pytest.mark.parametrize("version", [2, 5, 6, 8, 9, 10])
def test_commits_of_other_offsets_are(rig: Rig, version: int) -> None:
    for number in range(3):
        offsets = {("t", 0): number, ("t", 3): 7, ("u", 1): 2**62 - number}
        assert set(rig.commit(offsets, version=version).values()) == {0}
        assert rig.fetch() == offsets
        assert rig.repeated == number
    rig.topics.counts["new"] = 1
    rig.commit(offsets, version=version)
    assert rig.repeated == 2


def test_commits_with_an_error_are_not(rig: Rig) -> None:
    for _ in range(2):
        rig.commit({("t", 0): 1, ("t", 99): 1})
    assert rig.repeated == 0


def test_a_fetch_of_offsets_is_until_they_change(rig: Rig) -> None:
    rig.commit({("t", 0): 1})
    for repeated in range(3):
        assert rig.fetch_of("t", 0).committed_offset == 1
        assert rig.repeated == repeated
    rig.commit({("u", 1): 1})
    rig.fetch_of("t", 0)
    assert rig.repeated == 2
