"""Pools change their size under load, and no client notices."""

from __future__ import annotations

import contextlib
import os
import random
import signal

import pytest

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.inspect.attach import attach
from mpbroker.ipc.layout import (
    HANDLER_ACTIVE,
    HEADER,
    HEADER_ACTIVE_HANDLERS,
    MAX_HANDLERS,
    MAX_PROCESSORS,
    REQUEST_RING,
    RING_HEAD,
    RING_TAIL,
    SLOT_STATE,
    STATE_MASK,
    handler_row,
    slot_row,
    slots_in_use,
)
from mpbroker.network.connection_rows import live_rows
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
)
from tests.broker.load import (
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
from tests.broker.resizing import (
    HANDLERS,
    OF_ALL,
    PROCESSORS,
    alter,
    resize,
    sizes,
    wait_for_sizes,
)
from tests.supervisor.test_kills import fetch_body, high_watermark
from tests.support.children import wait_until


@pytest.fixture
def broker(make_broker):
    made = make_broker({"num.network.threads": 1, "num.io.threads": 2})
    create_topic(made)
    return made


@pytest.mark.parametrize("acks", [1, -1])
def test_handlers_come_and_go_under_load_and_nobody_notices(broker, acks):
    chosen = random.Random(acks)
    with Load(broker, 8, acks) as load:
        for _ in range(6):
            number = chosen.randint(1, 8)
            resize(broker, handlers=number)
            load.run(60)
            wait_for_sizes(broker, number, 1)
        load.run(20)
    assert sum(load.losses) == 0
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_processors_come_and_go_under_load_and_nobody_is_disconnected(broker):
    chosen = random.Random(7)
    with Load(broker, 12) as load:
        for _ in range(6):
            number = chosen.randint(1, 8)
            resize(broker, processors=number)
            load.run(60)
            wait_for_sizes(broker, 2, number)
        load.run(20)
    assert sum(load.losses) == 0
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_both_pools_may_be_resized_at_once(broker):
    chosen = random.Random(3)
    with Load(broker, 12, acks=-1) as load:
        for _ in range(4):
            handlers, processors = chosen.randint(1, 8), chosen.randint(1, 8)
            resize(broker, handlers, processors)
            load.run(40)
            wait_for_sizes(broker, handlers, processors)
    assert sum(load.losses) == 0
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_a_machine_of_64_cores_is_served(broker):
    resize(broker, handlers=64, processors=16)
    wait_for_sizes(broker, 64, 16)
    parked = [dial(broker) for _ in range(64)]
    for number, sock in enumerate(parked):
        sock.sendall(frame(ApiKey.FETCH, 11, fetch_body(300_000), number))
    with Load(broker, 32, acks=-1) as load:
        load.run(40)
    assert sum(load.losses) == 0
    for number, sock in enumerate(parked):
        assert int.from_bytes(receive_frame(sock)[:4], "big") == number
        sock.close()
    resize(broker, handlers=2, processors=1)
    wait_for_sizes(broker, 2, 1)
    broker.stop()
    load.verify(read_log(broker.data_dir))


def connections(broker):
    """How many connections each processor has, by number."""
    with ControlClient(os.fspath(broker.data_dir / "control.sock"), 30.0) as client:
        status = client.request("status")
    return {each["id"]: each["connections"] for each in status["processors"]}


def test_old_connections_too_are_shared_with_processors_that_come(broker):
    socks = [dial(broker) for _ in range(12)]
    for sock in socks:
        assert api_versions(sock)
    resize(broker, processors=3)
    wait_until(lambda: sorted(connections(broker).values()) == [4, 4, 4])
    for sock in socks:
        assert api_versions(sock)
        sock.close()


def test_idle_connections_and_half_sent_requests_move_too(broker):
    resize(broker, processors=4)
    wait_for_sizes(broker, 2, 4)
    socks = [dial(broker) for _ in range(16)]
    large = frame(ApiKey.PRODUCE, 9, produce_body(bytes(100_000)))
    small = frame(ApiKey.PRODUCE, 9, produce_body(b"small"))
    for number, sock in enumerate(socks):
        whole = small if number % 2 else large
        assert api_versions(sock)
        sock.sendall(whole[: len(whole) // 2])
    resize(broker, processors=1)
    wait_for_sizes(broker, 2, 1)
    for number, sock in enumerate(socks):
        whole = small if number % 2 else large
        sock.sendall(whole[len(whole) // 2 :])
        assert receive_frame(sock)[:4] == b"\0\0\0\x01"
        sock.close()


def test_a_processor_that_dies_over_its_retirement_loses_nobody(broker):
    with Load(broker, 12) as load:
        for _ in range(3):
            resize(broker, processors=4)
            load.run(40)
            wait_for_sizes(broker, 2, 4)
            before = children(broker, "processor")
            resize(broker, processors=1)
            for (_, victim), pid in before.items():
                if victim != 1:
                    kill_if_alive(pid)
            load.run(40)
            wait_for_sizes(broker, 2, 1)
    assert sum(load.losses) == 0
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_a_processor_that_is_dead_when_it_shall_go_leaves_nobody_behind(broker):
    """Its successor, which is not there yet, has to give its connections away."""
    resize(broker, processors=4)
    wait_for_sizes(broker, 2, 4)
    whole = frame(ApiKey.PRODUCE, 9, produce_body(bytes(5_000)))
    socks = [dial(broker) for _ in range(16)]
    for sock in socks:
        assert api_versions(sock)
        sock.sendall(whole[: len(whole) // 2])
    for _ in range(6):  # each time its successor comes a little later
        dead = kill(broker, "processor", 3)
        wait_until(
            lambda dead=dead: (
                state_of(broker, 3) == "BACKOFF"
                or (children(broker)["processor", 3] != dead)
            )
        )
        wait_until(lambda: state_of(broker, 3) != "BACKOFF")
    kill(broker, "processor", 3)
    wait_until(lambda: state_of(broker, 3) == "BACKOFF")
    with ControlClient(os.fspath(broker.data_dir / "control.sock"), 30.0) as client:
        client.request("resize", processors=1)
    wait_for_sizes(broker, 2, 1)
    for sock in socks:
        sock.sendall(whole[len(whole) // 2 :])
        assert receive_frame(sock)[:4] == b"\0\0\0\x01"
        sock.close()


def state_of(broker, processor):
    (found,) = (
        each["state"]
        for each in states(broker)
        if (each["role"], each["id"]) == ("processor", processor)
    )
    return found


def holdings(broker):
    """What a broker holds that has no clients."""
    view = attach(broker.pid)
    words = view.control
    slots = [
        slot
        for processor in range(MAX_PROCESSORS)
        for slot in slots_in_use(words, processor)
        if words[slot_row(slot) + SLOT_STATE] & STATE_MASK
    ]
    return {
        "descriptors": sorted(kinds_of_descriptors(broker.pid)),
        "rows": list(live_rows(words)),
        "slots": slots,
        "queued": words[REQUEST_RING + RING_TAIL] - words[REQUEST_RING + RING_HEAD],
        "handlers": [
            words[handler_row(n) + HANDLER_ACTIVE] for n in range(MAX_HANDLERS)
        ],
        "sharing": words[HEADER + HEADER_ACTIVE_HANDLERS],
    }


def kinds_of_descriptors(pid):
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"{folder}/{fd}").partition("[")[0]


def test_nothing_is_left_of_many_resizes(broker):
    wait_until(lambda: not holdings(broker)["rows"])
    before = holdings(broker)
    chosen = random.Random(11)
    with Load(broker, 12) as load:
        for _ in range(4):
            handlers, processors = chosen.randint(1, 8), chosen.randint(1, 8)
            resize(broker, handlers, processors)
            load.run(20)
            wait_for_sizes(broker, handlers, processors)
        resize(broker, 2, 1)
        wait_for_sizes(broker, 2, 1)
    wait_until(lambda: holdings(broker) == before)


def test_the_last_of_several_resizes_wins(broker):
    with Load(broker, 4) as load:
        for number in (8, 1, 5, 3):
            resize(broker, handlers=number)
        load.run(50)
        wait_for_sizes(broker, 3, 1)
        load.run(50)
    assert sum(load.losses) == 0


def test_a_retired_handlers_id_is_given_to_the_next(broker):
    resize(broker, handlers=4)
    wait_for_sizes(broker, 4, 1)
    resize(broker, handlers=2)
    wait_for_sizes(broker, 2, 1)
    assert set(children(broker, "handler")) == {("handler", 0), ("handler", 1)}
    resize(broker, handlers=3)
    wait_for_sizes(broker, 3, 1)
    assert ("handler", 2) in children(broker)
    with dial(broker) as sock:
        assert api_versions(sock)


def test_a_fetch_that_waits_is_handed_to_the_handlers_that_stay(broker):
    with dial(broker) as consumer, dial(broker) as producer:
        resize(broker, handlers=6)
        wait_for_sizes(broker, 6, 1)
        consumers = [dial(broker) for _ in range(12)]
        for sock in consumers:
            sock.sendall(frame(ApiKey.FETCH, 11, fetch_body(20_000), 7))
        api_versions(producer)
        resize(broker, handlers=1)
        wait_for_sizes(broker, 1, 1)
        ask(producer, ApiKey.PRODUCE, 9, produce_body(b"at last"))
        for sock in consumers:
            answer = receive_frame(sock)
            assert answer[:4] == b"\0\0\0\x07"
            assert high_watermark(memoryview(answer)[4:])[0] == 1
            sock.close()
        api_versions(consumer)


def kill_if_alive(pid):
    with contextlib.suppress(ProcessLookupError):  # it may have retired already
        os.kill(pid, signal.SIGKILL)


def test_a_death_in_the_middle_of_a_resize_only_makes_it_longer(broker):
    with Load(broker, 8) as load:
        for number in (6, 2, 7, 1):
            before = children(broker, "handler")
            resize(broker, handlers=number)
            for (_, victim), pid in before.items():
                if victim % 2:
                    kill_if_alive(pid)
            load.run(30)
            wait_for_sizes(broker, number, 1)
    assert sum(load.losses) == 0
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_a_handler_that_is_killed_while_it_should_retire_has_retired(broker):
    pid = children(broker)["handler", 1]
    os.kill(pid, signal.SIGSTOP)
    resize(broker, handlers=1)
    wait_until(
        lambda: [c["state"] for c in states(broker) if c["pid"] == pid] == ["DRAINING"]
    )
    os.kill(pid, signal.SIGKILL)
    wait_for_sizes(broker, 1, 1)


# -- where sizes come from --------------------------------------------------------


def test_of_this_broker_wins_over_of_all_and_that_over_what_it_was_started_with(broker):
    assert alter(broker, {HANDLERS: 5}, OF_ALL).error_code == 0
    wait_for_sizes(broker, 5, 1)
    resize(broker, handlers=3)
    wait_for_sizes(broker, 3, 1)
    alter(broker, {HANDLERS: None})
    wait_for_sizes(broker, 5, 1)
    alter(broker, {HANDLERS: None}, OF_ALL)
    wait_for_sizes(broker, 2, 1)


def test_a_resize_holds_after_the_next_start(broker):
    resize(broker, handlers=3, processors=2)
    wait_for_sizes(broker, 3, 2)
    broker.stop()
    broker.start()
    wait_for_sizes(broker, 3, 2)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        (HANDLERS, 120, "between 1 and 119"),
        (HANDLERS, 0, "between 1 and 119"),
        (PROCESSORS, 65, "between 1 and 64"),
        (PROCESSORS, -1, "between 1 and 64"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_its_limit(broker, name, value, limit):
    answer = alter(broker, {name: value})
    assert answer.error_code == 42  # INVALID_REQUEST
    assert answer.error_message.startswith(f"{name}={value}: not accepted")
    assert limit in answer.error_message
    assert sizes(broker) == (2, 1)


def described(broker, name):
    resource = DescribeConfigsResource(
        resource_type=4, resource_name="1", configuration_keys=[name]
    )
    request = DescribeConfigsRequest(resources=[resource])
    with dial(broker) as sock:
        body = ask(sock, ApiKey.DESCRIBE_CONFIGS, 1, request.encode(1))
    (config,) = DescribeConfigsResponse.decode(1, body).results[0].configs
    return config.value, config.config_source, config.read_only


def test_describe_configs_tells_the_live_size_and_who_set_it(broker):
    assert described(broker, HANDLERS) == ("2", 4, False)
    resize(broker, handlers=3)
    assert described(broker, HANDLERS) == ("3", 2, False)
