"""Every kind of child is killed under load: what was acknowledged stays, once."""

from __future__ import annotations

import os
from typing import Final

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from tests.broker.load import (
    TOPIC,
    Load,
    api_versions,
    ask,
    children,
    create_topic,
    dial,
    frame,
    kill,
    produce_body,
    read_log,
    receive_frame,
    states,
)
from tests.support.children import wait_until

# How often each is killed; more with MPBROKER_TEST_KILLS=500.
KILLS: Final = int(os.environ.get("MPBROKER_TEST_KILLS", "4"))


@pytest.fixture
def killed_under_load(make_broker):
    """Run a load, let ``kill_some`` kill between its parts, verify the log."""

    def run(kill_some, *, connections=8, acks=1, between=60, **config):
        settings = {
            "num.network.threads": 2,
            "num.io.threads": 3,
            **{key.replace("_", "."): value for key, value in config.items()},
        }
        broker = make_broker(settings)
        create_topic(broker)
        with Load(broker, connections, acks) as load:
            load.run(between)
            for number in range(KILLS):
                kill_some(broker, number)
                load.run(between)
        broker.stop()
        load.verify(read_log(broker.data_dir))
        return load

    return run


def test_no_client_notices_the_death_of_a_handler(killed_under_load):
    load = killed_under_load(lambda broker, n: kill(broker, "handler", n % 3))
    assert sum(load.losses) == 0


def test_no_client_notices_the_death_of_all_handlers_at_once(killed_under_load):
    def kill_all(broker, n):
        for number in range(3):
            kill(broker, "handler", number)

    assert sum(killed_under_load(kill_all).losses) == 0


def test_a_request_that_waits_for_the_disk_survives_its_handler(killed_under_load):
    load = killed_under_load(
        lambda broker, n: kill(broker, "handler", n % 3), acks=-1, between=40
    )
    assert sum(load.losses) == 0


def test_no_client_notices_the_death_of_a_processor(killed_under_load):
    def kill_and_wait(broker, n):
        pid = kill(broker, "processor", n % 2)
        wait_until(lambda: children(broker)["processor", n % 2] != pid)

    assert sum(killed_under_load(kill_and_wait).losses) == 0


def test_no_client_notices_the_death_of_all_processors_at_once(killed_under_load):
    def kill_all(broker, n):
        for number in range(2):
            kill(broker, "processor", number)

    assert sum(killed_under_load(kill_all, acks=-1).losses) == 0


def test_nobody_connected_notices_the_death_of_the_acceptor(killed_under_load):
    def kill_and_dial(broker, n):
        kill(broker, "acceptor", 0)
        with dial(broker) as sock:  # the backlog outlives it
            assert api_versions(sock)

    assert sum(killed_under_load(kill_and_dial).losses) == 0


def test_nobody_notices_the_death_of_the_housekeeper(killed_under_load):
    load = killed_under_load(lambda broker, n: kill(broker, "housekeeper", 0))
    assert sum(load.losses) == 0


def test_handlers_and_processors_may_die_together(killed_under_load):
    def kill_two(broker, n):
        kill(broker, "handler", n % 3)
        kill(broker, "processor", n % 2)

    assert sum(killed_under_load(kill_two).losses) == 0


def test_the_dead_are_replaced_and_their_deaths_told(make_broker):
    broker = make_broker({"num.network.threads": 2, "num.io.threads": 2})
    for role, number in children(broker):
        pid = kill(broker, role, number)

        def replaced(child=(role, number), pid=pid):
            return children(broker)[child] != pid

        wait_until(replaced)
    wait_until(lambda: {child["state"] for child in states(broker)} == {"READY"})
    assert {child["last_exit"] for child in states(broker)} == {"signal 9"}
    with dial(broker) as sock:
        assert api_versions(sock)
    assert "died: signal 9" in broker.log_tail()


# -- requests that wait -------------------------------------------------------------


def fetch_body(max_wait_ms, offset=0):
    partition = FetchPartition(
        partition=0, fetch_offset=offset, partition_max_bytes=1 << 20
    )
    request = FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=1 << 20,
        topics=[FetchTopic(topic=TOPIC, partitions=[partition])],
    )
    return request.encode(11)


def high_watermark(body):
    (topic,) = FetchResponse.decode(11, body).responses
    return topic.partitions[0].high_watermark, len(topic.partitions[0].records or b"")


def test_a_fetch_that_waits_survives_its_handler_and_is_answered_once(make_broker):
    broker = make_broker({"num.io.threads": 2})
    create_topic(broker)
    with dial(broker) as consumer, dial(broker) as producer:
        consumer.sendall(frame(ApiKey.FETCH, 11, fetch_body(20_000), 7))
        consumer.settimeout(0.2)
        with pytest.raises(TimeoutError):
            consumer.recv(1)
        for number in (0, 1):
            kill(broker, "handler", number)
        consumer.settimeout(90)
        ask(producer, ApiKey.PRODUCE, 9, produce_body(b"at last"))
        answer = receive_frame(consumer)
        assert answer[:4] == b"\0\0\0\x07"
        end, length = high_watermark(memoryview(answer)[4:])
        assert end == 1 and length > 0
        # The very next answer is that of the next request.
        consumer.sendall(frame(ApiKey.FETCH, 11, fetch_body(0, 1), 8))
        assert receive_frame(consumer)[:4] == b"\0\0\0\x08"


def test_a_fetch_whose_handler_died_still_keeps_its_deadline(make_broker):
    broker = make_broker({"num.io.threads": 1})
    create_topic(broker)
    with dial(broker) as consumer:
        consumer.sendall(frame(ApiKey.FETCH, 11, fetch_body(600), 7))
        kill(broker, "handler", 0)
        assert high_watermark(memoryview(receive_frame(consumer))[4:]) == (0, 0)


# -- what a broker leaves -----------------------------------------------------------


def test_nothing_outlives_a_killed_supervisor_but_its_name(make_broker):
    broker = make_broker()
    with dial(broker) as sock:
        api_versions(sock)
        broker_pids = [pid for pid in broker.processes() if pid != broker.pid]
        os.kill(broker.pid, 9)
        wait_until(lambda: not any(map(alive, broker_pids)))
        assert receive_or_reset(sock) == b""
    broker.kill()
    broker.start()  # it cleans up behind its predecessor, and serves
    with dial(broker) as sock:
        assert api_versions(sock)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def receive_or_reset(sock):
    try:
        return sock.recv(1)
    except ConnectionResetError:
        return b""
