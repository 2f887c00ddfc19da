"""The requests by which brokers of Kafka read and write the states of share groups."""

from __future__ import annotations

from typing import Any

import pytest

from mpbroker.coordinator.share.share_state_apis import ShareStateApis
from mpbroker.protocol.error_code import ErrorCode as E
from mpbroker.protocol.messages import delete_share_group_state as deleting
from mpbroker.protocol.messages import initialize_share_group_state as initializing
from mpbroker.protocol.messages import read_share_group_state as reading
from mpbroker.protocol.messages import read_share_group_state_summary as summing_up
from mpbroker.protocol.messages import write_share_group_state as writing
from tests.coordinator.share.share_rig import ShareRig, T, acquired

AVAILABLE, ACQUIRED, DONE, ARCHIVED = 0, 1, 2, 4


class StateRig(ShareRig):
    """Sends the five requests for partition 0 of the topic."""

    def __init__(self) -> None:
        super().__init__()
        self.append(0, 9)

    def _ask(self, name: str, request: Any) -> Any:
        apis = ShareStateApis(self.out, self.states, self.reader)
        call = self.call()
        getattr(apis, name)(call, request, self.now_ms)
        self.collect()
        ((row,),) = [each.partitions for each in self.answer_to(call).results]
        return row

    def initialize(self, state_epoch: int, start_offset: int, partition: int = 0):
        row = initializing.PartitionData(
            partition=partition, state_epoch=state_epoch, start_offset=start_offset
        )
        topics = [initializing.InitializeStateData(topic_id=T, partitions=[row])]
        request = initializing.InitializeShareGroupStateRequest(
            group_id="g", topics=topics
        )
        return self._ask("initialize_share_group_state", request)

    def read(self):
        row = reading.PartitionData(partition=0, leader_epoch=0)
        topics = [reading.ReadStateData(topic_id=T, partitions=[row])]
        request = reading.ReadShareGroupStateRequest(group_id="g", topics=topics)
        found = self._ask("read_share_group_state", request)
        if found.error_code:
            return E(found.error_code)
        batches = [
            (b.first_offset, b.last_offset, b.delivery_state, b.delivery_count)
            for b in found.state_batches
        ]
        return found.state_epoch, found.start_offset, batches

    def sum_up(self):
        row = summing_up.PartitionData(partition=0, leader_epoch=0)
        topics = [summing_up.ReadStateSummaryData(topic_id=T, partitions=[row])]
        request = summing_up.ReadShareGroupStateSummaryRequest(
            group_id="g", topics=topics
        )
        found = self._ask("read_share_group_state_summary", request)
        assert not found.error_code
        return found.state_epoch, found.start_offset, found.delivery_complete_count

    def write(self, state_epoch: int, start_offset: int, *batches):
        row = writing.PartitionData(
            partition=0,
            state_epoch=state_epoch,
            leader_epoch=0,
            start_offset=start_offset,
            state_batches=[
                writing.StateBatch(
                    first_offset=first,
                    last_offset=last,
                    delivery_state=state,
                    delivery_count=count,
                )
                for first, last, state, count in batches
            ],
        )
        topics = [writing.WriteStateData(topic_id=T, partitions=[row])]
        request = writing.WriteShareGroupStateRequest(group_id="g", topics=topics)
        return self._ask("write_share_group_state", request)

    def delete(self):
        row = deleting.PartitionData(partition=0)
        topics = [deleting.DeleteStateData(topic_id=T, partitions=[row])]
        request = deleting.DeleteShareGroupStateRequest(group_id="g", topics=topics)
        return self._ask("delete_share_group_state", request)


@pytest.fixture
def rig() -> StateRig:
    return StateRig()


def test_what_is_written_is_read_and_outlives_the_coordinator(rig: StateRig) -> None:
    assert rig.read() == E.INVALID_REQUEST
    assert rig.sum_up() == (0, -1, -1)
    assert not rig.initialize(3, 2).error_code
    assert rig.read() == (3, 2, [])
    said = rig.write(4, 3, (4, 5, DONE, 1), (6, 6, AVAILABLE, 2), (7, 7, ARCHIVED, 5))
    assert not said.error_code
    wanted = [(3, 3, AVAILABLE, 0), (4, 5, DONE, 1), (6, 6, AVAILABLE, 2)]
    for _ in range(2):
        # What is finished at the end keeps its place: 8 is the next to be read.
        assert rig.read() == (4, 3, [*wanted, (7, 7, ARCHIVED, 5)])
        assert rig.sum_up() == (4, 3, 3)
        rig.restart()
    assert not rig.delete().error_code
    assert rig.read() == E.INVALID_REQUEST
    assert rig.write(9, 0).error_code == E.INVALID_REQUEST
    assert not rig.delete().error_code


def test_members_get_what_a_written_state_leaves(rig: StateRig) -> None:
    rig.initialize(0, 0)
    rig.write(0, 0, (0, 3, DONE, 1), (4, 4, AVAILABLE, 2))
    found = acquired(rig.answer_to(rig.fetch("a", 0)))
    assert found[0][0] == (4, 4, 3)
    # What they hold counts as available.
    assert rig.read()[2][0] == (4, 4, AVAILABLE, 3)


def test_a_request_with_an_older_state_epoch_is_fenced(rig: StateRig) -> None:
    rig.initialize(5, 0)
    assert rig.write(4, 0).error_code == E.FENCED_STATE_EPOCH
    assert rig.initialize(4, 0).error_code == E.FENCED_STATE_EPOCH
    assert not rig.initialize(5, 1).error_code


def test_there_is_no_state_of_a_partition_that_does_not_exist(rig: StateRig) -> None:
    assert rig.initialize(0, 0, 7).error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert rig.initialize(0, 0, -1).error_code == E.INVALID_REQUEST


@pytest.mark.parametrize(
    "batch",
    [
        (-1, 2, DONE, 1),
        (2, 1, DONE, 1),
        (0, 1, 3, 1),
        (0, 1, ACQUIRED, 1),
        (0, 1, DONE, -1),
    ],
)
def test_batches_that_make_no_sense_change_nothing(rig: StateRig, batch) -> None:
    rig.initialize(0, 0)
    assert rig.write(1, 0, (0, 1, DONE, 1), batch).error_code == E.INVALID_REQUEST
    assert rig.read() == (0, 0, [])
