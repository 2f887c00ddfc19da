"""Stages with a table of transactions, and what their producers and coordinator do."""

from __future__ import annotations

import contextlib
import time
from unittest.mock import patch

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.server.core_cache.handler_stage import Stage
from tests.storage.batches import read_all, validated
from tests.support.children import fork
from tests.support.memory import broker_memory

NOW = time.time_ns() // 1_000_000
PRODUCE = int(ApiKey.PRODUCE)
PARTITIONS = {"one": 1, "two": 2}
IDS = {name: name.encode().ljust(16, b"-") for name in (*PARTITIONS, "none")}
THREE = (("two", 1), ("one", 0), ("two", 0))


def batch(sequence, *, producer=7, epoch=0, values=(b"x",), transactional=True):
    builder = RecordBatchBuilder(
        Codec.NONE,
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )
    for number, value in enumerate(values):
        builder.append(NOW + number, None, value)
    return bytes(builder.build())


def request(*partitions, acks=1, version=9, name="t-1"):
    """A whole Produce of (topic, index, records), in this order, without its size."""
    topics = []
    for topic, index, records in partitions:
        if not topics or topics[-1].name != topic:
            topics.append(TopicProduceData(name=topic, topic_id=IDS[topic]))
        topics[-1].partition_data.append(
            PartitionProduceData(index=index, records=records)
        )
    message = ProduceRequest(
        transactional_id=name, acks=acks, timeout_ms=1000, topic_data=topics
    )
    header = encode_request_header(ApiKey.PRODUCE, version, 77, "test")
    return header + message.encode(version)


def to_three(sequence, *, acks=1, version=9, name="t-1", **fields):
    records = batch(sequence, **fields)
    parts = ((*each, records) for each in THREE)
    return request(*parts, acks=acks, version=version, name=name)


def codes(answer, version=9):
    """(index, error code, base offset) of each partition."""
    response = ProduceResponse.decode(version, answer[1][9 if version >= 9 else 8 :])
    return [
        (partition.index, partition.error_code, partition.base_offset)
        for topic in response.responses
        for partition in topic.partition_responses
    ]


def begin(*these, producer=7, epoch=0, where=THREE):
    """Open a transaction, as the coordinator does."""
    for stage in these:
        for each in where:
            row = stage.log(*each).row.index
            assert stage.transactions.open(producer, epoch, row)


def mark(stage, *, commit=True, producer=7, epoch=0, where=THREE):
    """Append the markers of a transaction's end; the table does not know of it."""
    data = build_end_transaction_marker(
        producer, epoch, EndTransactionMarker(commit, 0), NOW
    )
    for each in where:
        stage.log(*each).append(validated(data), now_ms=NOW)


def end(*these, commit=True, producer=7, epoch=0, where=THREE):
    """End a transaction, as the coordinator does: in a process of its own."""
    for stage in these:
        for each in where:
            stage.transactions.close(producer, stage.log(*each).row.index)
        fields = {"commit": commit, "producer": producer, "epoch": epoch}
        assert fork(lambda: mark(stage, where=where, **fields)) == 0  # noqa: B023


@contextlib.contextmanager
def stages(directory, *, syncs=False):
    """One with the short cut, one without; topics of the same ids."""
    with broker_memory() as first, broker_memory() as second:
        pair = tuple(
            Stage(
                memory,
                directory / name,
                short=name == "short",
                syncs=syncs,
                transactions=True,
            )
            for memory, name in ((first, "short"), (second, "usual"))
        )
        for stage in pair:
            for name, count in PARTITIONS.items():
                with patch(
                    "mpbroker.metadata.topics.random_uuid", lambda n=name: IDS[n]
                ):
                    stage.registry.create_topic(name, count)
        yield pair
        for stage in pair:
            stage.logs.close_files()


def acquaint(stage):
    """Transactions of the producers 7 and 8: what they do next can be plain."""
    for producer in (7, 8):
        begin(stage, producer=producer)
        stage.ask(to_three(0, producer=producer))
        end(stage, producer=producer)
    stage.short_ways.clear()


def contents(stage):
    """Records and state of the three, without when a segment was made."""
    logs = [stage.log(*each) for each in THREE]
    return [
        (read_all(log), log.row.snapshot()._replace(segment_created_ms=0))
        for log in logs
    ]


def known(stage):
    """What the process knows of its producers, as of the logs' ends."""
    found = []
    for each in THREE:
        log = stage.log(*each)
        producers = log.producers.at(log.view.state())
        entries = {
            number: (
                entry.epoch,
                entry.coordinator_epoch,
                entry.last_timestamp,
                entry.txn_first_offset,
                entry.batches,
            )
            for number, entry in producers.entries.items()
        }
        found.append((producers.end_offset, producers.ongoing, entries))
    return found


def told(stage, frame):
    """Its answer; None: the coordinator has it, and nothing has been done."""
    stage.forwarded.clear()
    stage.publish(frame)
    stage.handler.turn()
    if stage.forwarded:
        assert stage.forwarded == [3]
        assert not stage.memory.responses[0].waiting()
        return None
    return stage.answer(3)


def same(pair, *frames):
    """Ask both, and see that they cannot be told apart; the last answer."""
    for frame in frames:
        answers = [told(stage, frame) for stage in pair]
        assert answers[0] == answers[1]
        assert pair[0].progress() == pair[1].progress()
    assert contents(pair[0]) == contents(pair[1])
    return answers[0]
