"""A keeper that is replaced on purpose leaves its sockets to its successor."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mpbroker.ipc.fdpass import recv_fds, send_fds
from mpbroker.ipc.layout import (
    CONNECTION_COOKIE,
    CONNECTION_STATE,
    HEADER,
    HEADER_COUNTERS,
    HEADER_KEEPER,
    PROCESSOR_ROWS_USED,
    ConnectionState,
    connection_row,
    processor_row,
)
from mpbroker.network.moves.hand_over import HAS_ROW, KEEP, MAX_SOCKETS
from mpbroker.network.moves.keeper import Keeper
from mpbroker.supervisor.child import Child, ChildRecord, Role
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.supervisor import Supervisor
from mpbroker.supervisor.upgrade.keeper_sockets import sockets_of_keeper
from tests.network.rig import connected_pair
from tests.support.children import Child as Process
from tests.support.children import die, wait_until
from tests.support.memory import broker_memory
from tests.support.patience import LONGEST_S

ROWS = 298


@pytest.fixture
def memory() -> Iterator[BrokerMemory]:
    with broker_memory() as made:
        made.control.words[HEADER + HEADER_COUNTERS] = 1  # they have been tried
        yield made


def keeper_over(memory: BrokerMemory) -> Keeper:
    return Keeper(
        memory.control,
        memory.keeper_pair[1],
        {number: ends[0] for number, ends in enumerate(memory.handovers)},
        memory.keeper_bell,
        memory.processor_bells,
    )


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    pairs = [connected_pair() for _ in range(ROWS + 2)]  # more than a message has
    yield [server for _, server in pairs]
    for pair in pairs:
        for each in pair:
            each.close()


def run_keeper(memory: BrokerMemory, sockets: list[socket.socket]) -> Process:
    """One that has them all: the last two in no row as yet."""
    process = Process(lambda: keeper_over(memory).run())
    wait_until(lambda: memory.control.words[HEADER + HEADER_KEEPER])
    for first in range(0, ROWS, MAX_SOCKETS):
        assert memory.keeper_link.keep(
            sockets[first : first + MAX_SOCKETS][: ROWS - first]
        )
    for number, each in enumerate(sockets[ROWS:]):
        assert memory.keeper_link.keep_new(each, number, 0, number)
    return process


def test_one_that_is_renewed_leaves_all_it_has(memory, sockets):
    process = run_keeper(memory, sockets)
    child = Child(Role.KEEPER, 0, lambda: None)
    child.adopt(ChildRecord("keeper", 0, -1, process.pid, "READY", 0, ""))
    before = len(os.listdir("/proc/self/fd"))
    Supervisor.renew(SimpleNamespace(_memory=memory), child)
    assert len(os.listdir("/proc/self/fd")) == before
    assert process.wait() == -signal.SIGKILL
    successor = keeper_over(memory)
    successor.turn(0)
    assert successor.count == len(sockets)
    successor.close()


def taken(memory: BrokerMemory, pidfd: int) -> list[int]:
    given = []
    for _, kept in sockets_of_keeper(memory, pidfd, LONGEST_S):
        given.append(kept.fd)
        os.close(kept.fd)
    return given


def test_a_dead_one_is_not_waited_for(memory, sockets):
    process = run_keeper(memory, sockets)
    pidfd = os.pidfd_open(process.pid)
    process.kill()
    with pytest.raises(OSError, match="it has died"):
        taken(memory, pidfd)
    os.close(pidfd)


def give_one_and_die(memory: BrokerMemory) -> None:
    _, (fd,) = recv_fds(memory.keeper_pair[1], KEEP.size, 1)
    with socket.socket(fileno=fd) as link, socket.socket() as given:
        send_fds(link, KEEP.pack(HAS_ROW, -1, 0), [given.fileno()])
        die()


def test_one_that_dies_before_it_has_given_all_is_not_taken_for_one_that_has(memory):
    memory.keeper_pair[1].setblocking(True)
    memory.control.words[processor_row(0) + PROCESSOR_ROWS_USED] = 4
    row = connection_row(3)
    memory.control.words[row + CONNECTION_STATE] = ConnectionState.READING
    memory.control.words[row + CONNECTION_COOKIE] = 1
    process = Process(lambda: give_one_and_die(memory))
    pidfd = os.pidfd_open(process.pid)
    with pytest.raises(OSError, match="it has died"):
        taken(memory, pidfd)
    os.close(pidfd)
    process.wait()
