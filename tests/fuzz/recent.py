"""Well-formed requests of recent versions, and those that the coordinator answers.

A random message seldom names what is there. These name the topic, by name and by id,
and the same few groups, transactional ids and producers again and again, so that a
mutated one gets further than to "no such topic".
"""

from __future__ import annotations

from random import Random
from typing import Any, Final

from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    consumer_group_heartbeat,
    end_txn,
    fetch,
    find_coordinator,
    heartbeat,
    init_producer_id,
    join_group,
    leave_group,
    offset_commit,
    offset_fetch,
    produce,
    sync_group,
    txn_offset_commit,
)
from tests.bench import wire
from tests.fuzz.batches import TIMESTAMP_MS
from tests.support.message_cases import random_message

TOPIC: Final = "fuzzed"
# The campaign writes the topic's real one in its place, which only the broker knows.
TOPIC_ID: Final = bytes.fromhex("66757a7a2d746f7069632d69642d2121")
_NAMES: Final = ("one", "two", "three")
_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "name": (TOPIC,),
    "topic": (TOPIC,),
    "topic_id": (TOPIC_ID,),
    "index": (0,),
    "partition": (0,),
    "partition_index": (0,),
    "group_id": _NAMES,
    "key": _NAMES,
    "coordinator_keys": _NAMES,
    "member_id": ("", *_NAMES),
    "group_instance_id": (None, None, *_NAMES),
    "instance_id": (None, *_NAMES),
    "transactional_id": (None, *_NAMES),
    "v3_and_below_transactional_id": _NAMES,
    "producer_id": (-1, 0, 1, 2, 3),
    "v3_and_below_producer_id": (-1, 0, 1, 2, 3),
    "producer_epoch": (-1, 0, 1),
    "generation_id": (-1, 0, 1, 2),
    "generation_id_or_member_epoch": (-1, 0, 1),
    "member_epoch": (-1, 0, 1),
    "transaction_timeout_ms": (1000, 60_000),
    "timeout_ms": (0, 1000),
    "session_timeout_ms": (6000,),
    "rebalance_timeout_ms": (100, 1000),
    "protocol_type": ("consumer",),
    "protocol_name": ("range",),
    "subscribed_topic_names": (TOPIC,),
    "subscribed_topic_regex": (None, "f.*", "("),
    "server_assignor": (None, "uniform", "range"),
    "max_wait_ms": (0, 0, 5, 100),
    "fetch_offset": (0, 0, 1, 5, 2**40, -1),
    "current_leader_epoch": (-1, 0),
    "session_id": (0, 0, 1, 2),
    "session_epoch": (-1, -1, 0, 1),
    "replica_id": (-1,),
    "replica_state": (None,),
    "cluster_id": (None,),
    "max_bytes": (1000, 1 << 20),
    "partition_max_bytes": (1000, 1 << 20),
    "acks": (-1, 1),
    "committed_offset": (0, 1, 5),
}
_NEWEST_PRODUCE: Final = 11  # from here on the versions differ from what wire.py sends
_NEWEST_FETCH: Final = 13

CLASSES: Final[tuple[tuple[type[Message], int], ...]] = (
    (produce.ProduceRequest, _NEWEST_PRODUCE),
    (produce.ProduceRequest, _NEWEST_PRODUCE),
    (fetch.FetchRequest, _NEWEST_FETCH),
    (fetch.FetchRequest, _NEWEST_FETCH),
    (join_group.JoinGroupRequest, 0),
    (sync_group.SyncGroupRequest, 0),
    (heartbeat.HeartbeatRequest, 0),
    (leave_group.LeaveGroupRequest, 0),
    (consumer_group_heartbeat.ConsumerGroupHeartbeatRequest, 0),
    (offset_commit.OffsetCommitRequest, 0),
    (offset_fetch.OffsetFetchRequest, 0),
    (find_coordinator.FindCoordinatorRequest, 0),
    (init_producer_id.InitProducerIdRequest, 0),
    (add_partitions_to_txn.AddPartitionsToTxnRequest, 0),
    (add_offsets_to_txn.AddOffsetsToTxnRequest, 0),
    (txn_offset_commit.TxnOffsetCommitRequest, 0),
    (end_txn.EndTxnRequest, 0),
)


def plausible_request(rng: Random) -> tuple[bytes, int]:
    """Return a request's payload that names what there is, and its correlation id."""
    cls, oldest = rng.choice(CLASSES)
    version = rng.choice([v for v in cls.valid_versions if v >= oldest])
    message = random_message(rng, cls, version)
    _name_what_there_is(rng, message, version)
    correlation_id = rng.randint(0, 2**31 - 1)
    head = encode_request_header(cls.api_key, version, correlation_id, "fuzz")
    return head + message.encode(version), correlation_id


def _name_what_there_is(rng: Random, struct: Any, version: int) -> None:
    for row in struct.__fields__:
        value = getattr(struct, row.name)
        if not row.present_in(version) or (value is None and row.is_array):
            continue
        if row.struct is not None and value is not None:
            for each in value if row.is_array else [value]:
                _name_what_there_is(rng, each, version)
        elif row.name == "records":
            setattr(struct, row.name, _batch(rng))
        elif row.name in _VALUES:
            known = rng.choice(_VALUES[row.name])
            if known is None and not row.nullable_in(version):
                continue
            setattr(struct, row.name, [known] if row.is_array else known)


def _batch(rng: Random) -> bytes:
    producer_id = rng.choice([-1, -1, 0, 1])
    return wire.record_batch(
        [wire.RecordSpec(b"value")] * rng.choice([1, 2, 50]),
        timestamp_ms=TIMESTAMP_MS,
        producer_id=producer_id,
        producer_epoch=-1 if producer_id < 0 else 0,
        base_sequence=-1 if producer_id < 0 else rng.choice([0, 1, 2]),
    )
