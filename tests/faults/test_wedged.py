"""Who lives and moves no more is replaced; who waits for a slow disk is not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpbroker.inspect.process_state import process_state
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.list_groups import ListGroupsRequest
from tests.bench import wire
from tests.broker.load import children, dial, receive_frame
from tests.faults.producers import Ledger
from tests.faults.test_kill_one_process import has_progressed, wait_until
from tests.faults.test_kill_the_whole_tree import address_of, producers_for
from tests.support.broker import Broker
from tests.support.own_disk import freezable_disk, frozen

TOPIC = "wedged"


@pytest.fixture
def short_leases(tmp_path: Path) -> Iterator[Callable[[Path], Broker]]:
    """Make brokers whose leases are short."""
    made: list[Broker] = []

    def make(data: Path) -> Broker:
        module = [sys.executable, "-m", "tests.faults.wedged", str(tmp_path / "looped")]
        made.append(Broker(data, {"num.io.threads": 2}, command=module))
        made[-1].log_path = tmp_path / "broker.log"  # not on a disk that is frozen
        made[-1].start()
        return made[-1]

    yield make
    for broker in made:
        broker.close()


ROLES = ("handler", "processor", "acceptor", "housekeeper", "keeper", "coordinator")


@pytest.mark.parametrize("role", ROLES)
def test_a_stopped_process_is_replaced_and_nothing_is_lost(
    make_broker: Callable[..., Broker], role: str
) -> None:
    broker = make_broker({"num.io.threads": 2, "num.network.threads": 2})
    producers = producers_for(broker, TOPIC, 1)
    for producer in producers:
        producer.start()
    wait_until("load", has_progressed(producers))
    victim = children(broker, role)[role, 0]
    os.kill(victim, signal.SIGSTOP)
    wait_until(f"{role} replaced", lambda: children(broker)[role, 0] != victim)
    wait_until("load goes on", has_progressed(producers))
    for producer in producers:
        producer.stop()
    assert Ledger(TOPIC, producers).check(address_of(broker)) > 0
    assert [producer.losses for producer in producers] == [0] * len(producers)
    assert f"{role} 0 (pid {victim}) is stopped" in broker.log_tail()


def test_a_death_beside_a_stopped_process_is_repaired(
    make_broker: Callable[..., Broker],
) -> None:
    """It may hold the very lock that the repair needs."""
    broker = make_broker({"num.io.threads": 3})
    before = children(broker, "handler")
    os.kill(before["handler", 0], signal.SIGSTOP)
    wait_until("stop", lambda: process_state(before["handler", 0]) == "T")
    os.kill(before["handler", 1], signal.SIGKILL)

    def replaced() -> bool:
        now = children(broker, "handler")
        return all(now["handler", n] != before["handler", n] for n in (0, 1))

    wait_until("both replaced", replaced)
    with wire.Connection(address_of(broker)) as connection:
        connection.ask(wire.api_versions())


def test_an_acceptor_and_its_guard_that_are_both_stopped_leave_nobody_behind(
    make_broker: Callable[..., Broker],
) -> None:
    broker = make_broker({})
    acceptor = children(broker, "acceptor")["acceptor", 0]
    place = Path(f"/proc/{acceptor}/task/{acceptor}/children")
    wait_until("guard", lambda: bool(place.read_text()))
    guard = int(place.read_text())
    for pid in (guard, acceptor):
        os.kill(pid, signal.SIGSTOP)
    wait_until("end", lambda: process_state(guard) in ("", "Z"))
    with wire.Connection(address_of(broker)) as connection:
        connection.ask(wire.api_versions())


def test_a_handler_that_loops_for_ever_is_replaced_and_its_request_not_tried_again(
    short_leases: Callable[[Path], Broker], tmp_path: Path
) -> None:
    broker = short_leases(tmp_path / "data")
    payload = encode_request_header(ApiKey.API_VERSIONS, 0, 7, "loop")
    with dial(broker) as sock, dial(broker) as other:
        sock.sendall(len(payload).to_bytes(4, "big") + payload)
        answer = receive_frame(sock)
        assert answer[:4] == b"\0\0\0\x07"
        assert answer[4:6] == ErrorCode.UNKNOWN_SERVER_ERROR.to_bytes(2, signed=True)
        payload = encode_request_header(ApiKey.API_VERSIONS, 0, 8, "innocent")
        other.sendall(len(payload).to_bytes(4, "big") + payload)
        assert receive_frame(other)[:4] == b"\0\0\0\x08"
    log = broker.log_tail()
    assert log.count("has not moved") == 1
    assert "has kept a process busy for a whole lease and is not tried again" in log


def test_a_handler_that_waits_for_ever_is_replaced_and_its_request_tried_again(
    short_leases: Callable[[Path], Broker], tmp_path: Path
) -> None:
    """Whatever it has waited for may not be there any more."""
    broker = short_leases(tmp_path / "data")
    payload = encode_request_header(ApiKey.API_VERSIONS, 0, 7, "wait")
    with dial(broker) as sock:
        sock.sendall(len(payload).to_bytes(4, "big") + payload)
        assert receive_frame(sock)[:6] == b"\0\0\0\x07\0\0"
    assert broker.log_tail().count("has not moved") == 1


def test_a_coordinator_that_loops_for_ever_is_replaced_and_its_request_answered(
    short_leases: Callable[[Path], Broker], tmp_path: Path
) -> None:
    broker = short_leases(tmp_path / "data")
    client = "loop in the coordinator"
    body = ListGroupsRequest().encode(0)
    payload = encode_request_header(ApiKey.LIST_GROUPS, 0, 7, client) + body
    with dial(broker) as sock:
        sock.sendall(len(payload).to_bytes(4, "big") + payload)
        assert receive_frame(sock)[:4] == b"\0\0\0\x07"
    assert "coordinator 0" in broker.log_tail()
    assert "has not moved" in broker.log_tail()


@pytest.fixture
def freezable(tmp_path: Path) -> Iterator[Path]:
    with freezable_disk(tmp_path) as path:
        yield path


def test_a_slow_disk_is_waited_for_and_its_handler_left_alone(
    short_leases: Callable[[Path], Broker], freezable: Path
) -> None:
    broker = short_leases(freezable / "data")
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic("slow")
        batch = wire.record_batch([wire.RecordSpec(b"at last")])
        handlers = children(broker, "handler")
        with frozen(freezable):
            connection.send(wire.produce("slow", 0, batch, acks=-1))

            def in_the_disks_hands() -> bool:
                states = map(process_state, children(broker, "handler").values())
                return "D" in states

            wait_until("a handler waits", in_the_disks_hands)
            said = "has waited for the disk"
            wait_until("it is noticed", lambda: said in broker.log_tail())
            assert children(broker, "handler") == handlers
        assert wire.parse_produce(connection.receive()) == (wire.ERROR_NONE, 0)
        assert len(connection.read_all("slow", 0)) == 1
    assert children(broker, "handler") == handlers


def test_who_waits_for_the_lock_of_one_that_waits_for_the_disk_is_left_alone_too(
    short_leases: Callable[[Path], Broker], freezable: Path
) -> None:
    """Their requests are as good as any, and were taken for such as end handlers."""
    broker = short_leases(freezable / "data")
    address = address_of(broker)
    with wire.Connection(address) as first, wire.Connection(address) as second:
        first.create_topic("slow")
        batch = wire.record_batch([wire.RecordSpec(b"at last")])
        before = children(broker)
        with frozen(freezable):
            # Two handlers, one log: the second request only when the first one has
            # been taken.
            first.send(wire.produce("slow", 0, batch, acks=-1))
            said = "has waited for the disk"
            wait_until("the first waits", lambda: said in broker.log_tail())
            second.send(wire.produce("slow", 0, batch, acks=-1))
            also = "has waited for a lock of process"
            wait_until("the second, too", lambda: also in broker.log_tail())
            assert children(broker) == before
        answers = [wire.parse_produce(each.receive()) for each in (first, second)]
        assert sorted(answers) == [(wire.ERROR_NONE, 0), (wire.ERROR_NONE, 1)]
        assert len(first.read_all("slow", 0)) == 2
    assert children(broker) == before
    assert "died" not in broker.log_tail()
