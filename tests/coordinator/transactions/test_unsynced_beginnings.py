"""Transactions that may be written to before their record is on disk.

This is allowed only in partitions in which a load would look for the transaction;
test_power_cuts.py shows that no record is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpbroker.coordinator.transactions.transaction_metadata import MAX_EPOCH
from mpbroker.coordinator.transactions.transaction_records import (
    read_markers,
    read_transaction,
)
from mpbroker.protocol.error_code import ErrorCode
from tests.coordinator.transactions.transaction_asks import (
    OFFSETS,
    T0,
    commit_offsets,
    end,
    init,
    produce,
    started,
)
from tests.coordinator.transactions.transaction_rig import TransactionRig

Producer = tuple[int, int]


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig()


def begins_at_once(rig: TransactionRig, producer: Producer, *partitions: int) -> bool:
    """Whether a Produce goes back to the handlers while nothing reaches the disk."""
    before = len(rig.given_back)
    rig.holds = True
    rig.send("produce", produce(producer, *partitions), 12)
    at_once = len(rig.given_back) > before
    rig.holds = False
    rig.collect()
    assert len(rig.given_back) == before + 1
    return at_once


def ended(rig: TransactionRig, producer: Producer, *, commit: bool = True) -> Producer:
    answer = end(rig, producer, commit=commit, version=5)
    assert answer.error_code == 0
    return answer.producer_id, answer.producer_epoch


def transacted(rig: TransactionRig, producer: Producer, *partitions: int) -> Producer:
    rig.send("produce", produce(producer, *partitions), 12)
    return ended(rig, producer)


def test_it_begins_at_once_where_the_last_one_was(rig: TransactionRig) -> None:
    producer = started(rig)
    for partitions, at_once in (
        ((0, 1), False),
        ((0, 1), True),
        ((1,), True),
        ((1,), True),
        ((0, 1), False),
        ((0, 1), True),
    ):
        assert begins_at_once(rig, producer, *partitions) is at_once
        producer = ended(rig, producer)
    assert begins_at_once(rig, producer, 0)
    producer = ended(rig, producer, commit=False)
    assert begins_at_once(rig, producer, 0)


def test_partitions_that_are_added_later_wait_for_the_disk(rig: TransactionRig) -> None:
    """What is there may be all that a load finds: it is taken for the whole of it."""
    producer = transacted(rig, started(rig), 0, 1)
    assert begins_at_once(rig, producer, 0)
    assert not begins_at_once(rig, producer, 1)


def other_partition(rig: TransactionRig, producer: Producer) -> Producer:
    return transacted(rig, producer, 2)


def death(rig: TransactionRig, producer: Producer) -> Producer:
    """What the log says may have been shortened since."""
    rig.die()
    return producer


def idleness(rig: TransactionRig, producer: Producer) -> Producer:
    """The record that named the places has been replaced."""
    rig.advance(5000)
    return producer


def new_producer(rig: TransactionRig, producer: Producer) -> Producer:
    answer = init(rig)
    return answer.producer_id, answer.producer_epoch


def abort_of_nothing(rig: TransactionRig, producer: Producer) -> Producer:
    return ended(rig, producer, commit=False)


def topic_of_the_same_name(rig: TransactionRig, producer: Producer) -> Producer:
    rig.topic_ids["t"] = b"2" * 16
    return producer


def exhaustion(rig: TransactionRig, producer: Producer) -> Producer:
    """The next one is another producer."""
    transaction = rig.coordinator.get("x")
    assert transaction is not None
    transaction.producer_epoch = MAX_EPOCH - 1
    producer = transacted(rig, (producer[0], MAX_EPOCH - 1), 0)
    assert producer[1] == 0
    return producer


@pytest.mark.parametrize(
    "event",
    [
        other_partition,
        death,
        idleness,
        new_producer,
        abort_of_nothing,
        topic_of_the_same_name,
        exhaustion,
    ],
)
def test_it_waits_for_the_disk_after(
    rig: TransactionRig, event: Callable[[TransactionRig, Producer], Producer]
) -> None:
    producer = transacted(rig, started(rig), 0)
    producer = event(rig, producer)
    assert not begins_at_once(rig, producer, 0)
    rig.topic_ids.clear()
    producer = ended(rig, producer)
    assert begins_at_once(rig, producer, 0)


def test_it_waits_where_markers_are_waited_for() -> None:
    rig = TransactionRig(transaction_partition_verification_enable=False)
    producer = transacted(rig, started(rig), 0)
    assert not begins_at_once(rig, producer, 0)


def test_it_waits_where_there_was_nothing_to_end(
    rig: TransactionRig,
) -> None:
    """A partition that is gone has no marker, and nothing to be found in."""
    producer = started(rig)
    rig.refused = {T0: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    producer = transacted(rig, producer, 0, 1)
    assert not begins_at_once(rig, producer, 0)


def test_offsets_go_with_it(rig: TransactionRig) -> None:
    producer = started(rig)
    for _ in range(2):
        assert commit_offsets(rig, producer, 5) == 0
        producer = ended(rig, producer)
    assert [each[0] for each in rig.markers] == [OFFSETS, OFFSETS]


def expected(rig: TransactionRig) -> list[list[tuple[int, int]]]:
    """Partition and offset of what each record says of its own markers."""
    found = []
    for key, value in rig.log:
        read = read_transaction(key, value)
        assert read is not None
        assert read[1] is not None
        markers = read_markers(read[1].expected_markers)
        found.append([(each.partition, each.offset) for each in markers])
    return found


def test_only_decisions_say_where_markers_will_be(rig: TransactionRig) -> None:
    producer = transacted(rig, started(rig), 0, 1)
    rig.send("produce", produce(producer, 1), 12)
    assert expected(rig) == [[], [], [(0, 1), (1, 1)], [], []]
    rig.refused = {("t", 1): ErrorCode.KAFKA_STORAGE_ERROR}
    ended(rig, producer)
    assert expected(rig)[5:] == [[(1, 3)]]
    # A successor does not know where logs ended then: others may write meanwhile.
    rig.die()
    assert expected(rig)[5:] == [[(1, 3)], []]
