"""Bytes in and out of each partition: counted in whatever way a request is executed."""

from __future__ import annotations

import os

import pytest

from mpbroker.exporter.topic_traffic import (
    FETCHED,
    PRODUCED,
    TOPIC_FETCHED,
    TOPIC_PRODUCED,
    topic_families,
)
from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.counters.fetched_bytes import first_word, read_fetched_bytes
from mpbroker.ipc.layout import COORDINATOR, HANDLER_IDS, MAX_PARTITIONS, ROW_WORDS
from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.protocol.messages.fetch import FetchResponse
from tests.server.core_cache.handler_stage import Stage
from tests.server.core_cache.test_core_fetches import FOREVER, Consumer, batch
from tests.support.children import fork
from tests.support.memory import broker_memory

WAYS = [True, False] if IS_COMPILED else [False]


@pytest.fixture(params=WAYS, ids=lambda short: "short" if short else "usual")
def consumer(request, tmp_path):
    with broker_memory() as memory:
        stage = Stage(memory, tmp_path / "data", short=request.param)
        stage.registry.create_topic("one", 1)
        stage.registry.create_topic("two", 2)
        yield Consumer(stage)
        stage.logs.close_files()


def shown(consumer):
    """Bytes in and out, of each topic and of all."""
    stage = consumer.stage
    families = topic_families(stage.memory.table, stage.registry, [0, 7, COORDINATOR])
    found = {family.name: {} for family in families}
    for family in families:
        for _, labels, value in family.samples:
            found[family.name][dict(labels).get("topic", "")] = value
    assert found[PRODUCED][""] >= sum(found[TOPIC_PRODUCED].values())
    assert found[FETCHED][""] >= sum(found[TOPIC_FETCHED].values())
    return found


def records_in(answer, version=11):
    response = FetchResponse.decode(version, memoryview(answer)[8:])
    return sum(
        len(partition.records or b"")
        for topic in response.responses
        for partition in topic.partitions
    )


def test_what_is_produced_is_counted_by_topic(consumer):
    total = 0
    for size in (1, 100, 3000):
        consumer.produce(batch(size))
        total += len(batch(size))
    for partition in (0, 1):
        consumer.produce(batch(10), topic="two", partition=partition)
    now = shown(consumer)
    assert now[TOPIC_PRODUCED] == {"one": total, "two": 2 * len(batch(10))}
    assert now[PRODUCED] == {"": total + 2 * len(batch(10))}
    assert now[TOPIC_FETCHED] == {"one": 0, "two": 0}


def test_what_is_fetched_is_counted_in_each_way_that_it_is_given(consumer):
    consumer.warm()
    before = shown(consumer)[TOPIC_FETCHED]["one"]
    assert before == 2 * len(batch())
    given = []
    for size in (10, 40_000):  # in the answer; by sendfile
        offset = consumer.stage.log("one").row.log_end_offset
        consumer.produce(batch(size))
        given.append(records_in(consumer.ask(consumer.frame({0: offset}))))
        assert given[-1] == len(batch(size))
    # One that has waited, and one that waits in vain.
    offset = consumer.stage.log("one").row.log_end_offset
    assert consumer.ask(consumer.frame({0: offset})) is None
    assert consumer.produce(batch(20)) == [5]
    given.append(records_in(consumer.read()))
    assert consumer.ask(consumer.frame({0: offset + 1})) is None
    consumer.stage.purgatory.expire(FOREVER)
    consumer.stage.channel.flush()
    assert consumer.answer() is not None
    now = shown(consumer)
    assert now[TOPIC_FETCHED] == {"one": before + sum(given), "two": 0}
    assert now[FETCHED] == {"": before + sum(given)}
    assert (consumer.short_ways > 0) == (consumer.stage.is_short)


def test_sessions_count_what_they_give_and_not_what_they_leave_out(consumer):
    for partition in (0, 1):
        consumer.produce(batch(30), topic="two", partition=partition)
    answer = consumer.ask(consumer.frame({0: 0, 1: 0}, topic="two", epoch=0))
    session = FetchResponse.decode(11, memoryview(answer)[8:]).session_id
    assert session and records_in(answer) == 2 * len(batch(30))
    given = records_in(answer)
    consumer.produce(batch(50), topic="two", partition=1)
    again = consumer.ask(
        consumer.frame({0: 1, 1: 1}, topic="two", session=session, epoch=1)
    )
    given += records_in(again)
    assert shown(consumer)[TOPIC_FETCHED] == {"one": 0, "two": given}


def test_a_successor_of_a_dead_handler_counts_on(consumer):
    consumer.warm()
    before = shown(consumer)[TOPIC_FETCHED]["one"]

    def read_and_die():
        offset = consumer.stage.log("one").row.log_end_offset - 1
        assert consumer.ask(consumer.frame({0: offset}))

    assert fork(read_and_die) == 0
    consumer.stage.memory.responses[0].pop()
    assert shown(consumer)[TOPIC_FETCHED]["one"] == before + len(batch())


def test_a_topics_counts_go_with_it_and_the_sums_stay(consumer):
    consumer.warm()
    consumer.produce(batch(10), topic="two")
    before = shown(consumer)
    consumer.stage.registry.delete_topic("one")
    now = shown(consumer)
    assert set(now[TOPIC_PRODUCED]) == set(now[TOPIC_FETCHED]) == {"two"}
    assert (now[PRODUCED], now[FETCHED]) == (before[PRODUCED], before[FETCHED])


def test_every_handlers_words_are_its_own_and_inside_the_segment():
    segment = PartitionTable.create_segment()
    words = segment.words
    firsts = [first_word(handler) for handler in range(HANDLER_IDS)]
    assert firsts == sorted(set(firsts)) and firsts[0] == MAX_PARTITIONS * ROW_WORDS
    words[firsts[-1] + MAX_PARTITIONS - 1] = 5
    words[firsts[0] + 2] = 7
    words[firsts[3] + 2] = 4
    assert read_fetched_bytes(words, 4, [0, 3, 5]) == [0, 0, 11, 0]
    os.close(segment.fd)
