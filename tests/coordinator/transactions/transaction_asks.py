"""Send producers' requests to a coordinator, and read its answers."""

from __future__ import annotations

from typing import Any

from mpbroker.coordinator.transactions.transaction_metadata import TransactionState
from mpbroker.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
)
from mpbroker.protocol.messages.end_txn import EndTxnRequest
from mpbroker.protocol.messages.init_producer_id import InitProducerIdRequest
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from mpbroker.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.coordinator.transactions.transaction_rig import TransactionRig

OFFSETS = "__consumer_offsets"
T0, T1 = ("t", 0), ("t", 1)


def init(
    rig: TransactionRig,
    name: str | None = "x",
    *,
    producer: tuple[int, int] = (-1, -1),
    timeout_ms: int = 60_000,
    version: int = 5,
) -> Any:
    request = InitProducerIdRequest(
        transactional_id=name,
        transaction_timeout_ms=timeout_ms,
        producer_id=producer[0],
        producer_epoch=producer[1],
    )
    return rig.ask("init_producer_id", request, version)


def started(rig: TransactionRig, name: str = "x") -> tuple[int, int]:
    answer = init(rig, name)
    assert answer.error_code == 0
    return answer.producer_id, answer.producer_epoch


def adding(producer: tuple[int, int], *partitions: int, name: str = "x") -> Any:
    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=name,
        v3_and_below_producer_id=producer[0],
        v3_and_below_producer_epoch=producer[1],
        v3_and_below_topics=[
            AddPartitionsToTxnTopic(name="t", partitions=list(partitions))
        ],
    )


def add(
    rig: TransactionRig,
    producer: tuple[int, int],
    *partitions: int,
    name: str = "x",
    version: int = 3,
) -> list[int]:
    request = adding(producer, *partitions, name=name)
    answer = rig.ask("add_partitions_to_txn", request, version)
    (topic,) = answer.results_by_topic_v3_and_below
    return [row.partition_error_code for row in topic.results_by_partition]


def ending(producer: tuple[int, int], commit: bool, name: str = "x") -> Any:
    return EndTxnRequest(
        transactional_id=name,
        producer_id=producer[0],
        producer_epoch=producer[1],
        committed=commit,
    )


def end(
    rig: TransactionRig,
    producer: tuple[int, int],
    *,
    commit: bool = True,
    version: int = 3,
    name: str = "x",
) -> Any:
    return rig.ask("end_txn", ending(producer, commit, name), version)


def produce(producer: tuple[int, int], *partitions: int, name: str = "x") -> Any:
    builder = RecordBatchBuilder(
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=0,
        transactional=True,
    )
    builder.append(1, b"k", b"v")
    records = builder.build()
    return ProduceRequest(
        transactional_id=name,
        acks=-1,
        timeout_ms=1000,
        topic_data=[
            TopicProduceData(
                name="t",
                partition_data=[
                    PartitionProduceData(index=index, records=records)
                    for index in partitions
                ],
            )
        ],
    )


def state(rig: TransactionRig, name: str = "x") -> TransactionState:
    transaction = rig.coordinator.get(name)
    assert transaction is not None
    return transaction.state


def offsets_request(producer: tuple[int, int], **member: Any) -> TxnOffsetCommitRequest:
    return TxnOffsetCommitRequest(
        transactional_id="x",
        group_id="g",
        producer_id=producer[0],
        producer_epoch=producer[1],
        topics=[
            TxnOffsetCommitRequestTopic(
                name="t",
                partitions=[
                    TxnOffsetCommitRequestPartition(
                        partition_index=0, committed_offset=7, committed_metadata="m"
                    )
                ],
            )
        ],
        **member,
    )


def commit_offsets(
    rig: TransactionRig, producer: tuple[int, int], version: int, **member: Any
) -> int:
    request = offsets_request(producer, **member)
    answer = rig.ask("txn_offset_commit", request, version)
    code: int = answer.topics[0].partitions[0].error_code
    return code


def position(rig: TransactionRig) -> tuple[int, int]:
    (row,) = rig.groups.offsets.fetch("g", "t", [0], stable=True)
    return row.error_code, row.committed_offset
