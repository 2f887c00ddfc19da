"""Partitions come and go, more than there are rows, and no process mixes them up.

A row of shared memory is a partition's until it is deleted, and then another's. A
process that still held it for the old partition would write its records to the new one,
or read the new one's: each record says whose it is, and is looked for in its place.
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from tests.bench import wire
from tests.broker.load import Load, children, create_topic, kill, read_log
from tests.broker.resizing import resize, wait_for_sizes
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker
from tests.support.children import wait_until

CAPACITY = 40
EACH = 8
ROUNDS = 16
SETTINGS = {
    "max.partitions": CAPACITY,
    "num.io.threads": 3,
    "num.network.threads": 1,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.num.partitions": 1,
    "auto.create.topics.enable": "false",
}


@pytest.fixture
def broker(make_broker) -> Broker:
    made = make_broker(SETTINGS)
    create_topic(made)
    return made


def create(connection: wire.Connection, name: str, partitions: int) -> None:
    """Create a topic as soon as there is room for it."""

    def is_created() -> bool:
        try:
            return connection.create_topic(name, partitions)
        except wire.AnswerError as error:
            assert "max.partitions" in str(error)
            return False

    wait_until(is_created)


def fill(connection: wire.Connection, name: str, acks: int) -> None:
    for partition in range(EACH):
        text = f"{name}-{partition}"
        for _ in range(2):  # the second one may be executed by the core
            batch = wire.record_batch([wire.RecordSpec(text.encode())])
            answer = connection.ask(wire.produce(name, partition, batch, acks))
            assert wire.parse_produce(answer).error_code == 0


def check(connection: wire.Connection, name: str) -> None:
    for partition in range(EACH):
        values = [each.value for each in connection.read_all(name, partition)]
        assert values == [f"{name}-{partition}".encode()] * 2


def test_partitions_come_and_go_more_than_there_are_rows(broker):
    with (
        Load(broker, 4, acks=-1) as load,
        wire.Connection(address_of(broker)) as connection,
    ):
        for number in range(ROUNDS):
            name = f"round-{number}"
            create(connection, name, EACH)
            fill(connection, name, acks=-1 if number % 2 else 1)
            check(connection, name)
            with wire.Connection(address_of(broker)) as waiting:
                # Parked at one handler while another one deletes the topic.
                end = connection.end_offset(name, 0)
                waiting.send(
                    wire.fetch(name, 0, end, max_bytes=1 << 20, max_wait_ms=60_000)
                )
                connection.delete_topic(name)
                assert wire.parse_fetch(waiting.receive()).error_code
            load.run(20)
    assert sum(load.losses) == 0
    broker.stop()
    load.verify(read_log(broker.data_dir))


@pytest.mark.parametrize("role", ["handler", "coordinator", "housekeeper"])
def test_deaths_between_deletions_and_creations_mix_no_partitions_up(broker, role):
    kept = [f"kept-{number}" for number in range(2)]
    with wire.Connection(address_of(broker)) as connection:
        for name in kept:
            create(connection, name, EACH)
            fill(connection, name, acks=-1)
        for number in range(ROUNDS):
            name = f"round-{number}"
            create(connection, name, EACH)
            fill(connection, name, acks=-1)
            if number % 2:
                kill(broker, role, number % 3 if role == "handler" else 0)
            connection.delete_topic(name)
            if not number % 2:
                kill(broker, role, number % 3 if role == "handler" else 0)
            for each in kept:
                check(connection, each)
    broker.stop()
    broker.start()
    with wire.Connection(address_of(broker)) as connection:
        for each in kept:
            check(connection, each)


def test_a_stopped_handler_keeps_rows_from_being_used_again(broker):
    pid = children(broker)["handler", 2]
    with wire.Connection(address_of(broker)) as connection:
        for number in range(3):
            create(connection, f"round-{number}", 10)
        os.kill(pid, signal.SIGSTOP)
        try:
            for number in range(3):
                connection.delete_topic(f"round-{number}")
            connection.create_topic("round-3", 9)  # there are new rows for this one
            with pytest.raises(wire.AnswerError, match="still being removed"):
                connection.create_topic("round-4", 10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        create(connection, "round-9", 10)


def test_handlers_that_retire_keep_no_rows(broker):
    resize(broker, handlers=6)
    wait_for_sizes(broker, 6, 1)
    resize(broker, handlers=1)
    wait_for_sizes(broker, 1, 1)
    with wire.Connection(address_of(broker)) as connection:
        for number in range(6):
            create(connection, f"round-{number}", 20)
            connection.delete_topic(f"round-{number}")


def test_a_full_table_is_refused_with_its_setting_and_hurts_nobody(broker):
    with (
        Load(broker, 2) as load,
        wire.Connection(address_of(broker)) as connection,
    ):
        with pytest.raises(wire.AnswerError, match=r"limit is 40 .*max\.partitions"):
            connection.create_topic("large", CAPACITY)
        load.run(20)
    assert sum(load.losses) == 0
