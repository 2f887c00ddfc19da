"""Connections go round the processors that have credit, and survive want of files."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import sys

import pytest

from mpbroker.ipc.fdpass import recv_fds
from mpbroker.ipc.layout import (
    PROCESSOR_HANDED,
    PROCESSOR_LISTENER,
    PROCESSOR_REGISTERED,
    Phase,
    processor_row,
)
from mpbroker.ipc.limits_page import (
    AddressLimits,
    BrokerLimits,
    Limits,
    LimitsPage,
    ListenerLimits,
)
from mpbroker.network.acceptor import Acceptor
from mpbroker.network.connection_quotas import AcceptorCounter, ConnectionQuotas
from mpbroker.network.connection_rows import address_words
from mpbroker.network.moves.hand_over import HAND_OVER
from mpbroker.network.processor import NEW_CONNECTIONS
from tests.support.children import fork, running, wait_until
from tests.support.memory import broker_memory


class Hall:
    """A listener, its acceptor, and the far ends of the hand-over sockets."""

    def __init__(self, memory) -> None:
        self.memory = memory
        self.words = memory.control.words
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.listener.setblocking(False)
        self.address = self.listener.getsockname()
        self.acceptor = Acceptor(
            0,
            self.listener,
            memory.control,
            {number: ends[0] for number, ends in enumerate(memory.handovers)},
            memory.keeper_link,
            memory.acceptor_bell,
            ConnectionQuotas(0, memory.limits, memory.control),
        )
        self.clients: list[socket.socket] = []

    def serve(self, *processors: int, listener: int = 0) -> None:
        for processor in processors:
            self.words[processor_row(processor) + PROCESSOR_LISTENER] = listener + 1

    def dial(self, count: int = 1) -> None:
        """Connect, until all are there to be accepted: the kernel may take a while."""
        waiting = self._waiting()
        for _ in range(count):
            self.clients.append(socket.create_connection(self.address))
        wait_until(lambda: self._waiting() == waiting + count)

    def _waiting(self) -> int:
        # struct tcp_info: of a listening socket tcpi_unacked is who waits in its queue.
        told = self.listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        return int.from_bytes(told[24:28], sys.byteorder)

    def limit(self, own: ListenerLimits | None = None, **broker: object) -> None:
        limits = Limits(
            BrokerLimits(rate_samples=2, **broker), [own or ListenerLimits()]
        )
        LimitsPage(self.memory.limits).publish(limits)

    def count(self, counter: AcceptorCounter) -> int:
        return self.words[self.acceptor._counters + counter]

    def handed(self, processor: int) -> int:
        return self.words[processor_row(processor) + PROCESSOR_HANDED]

    def receive(self, processor: int) -> list[tuple[int, ...]]:
        """Take what is on its way to a processor, and register it."""
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                end = self.memory.handovers[processor][1]
                message, fds = recv_fds(end, HAND_OVER.size, 1)
                messages.append(HAND_OVER.unpack(message)[1:])
                for fd in fds:
                    os.close(fd)
                self.words[processor_row(processor) + PROCESSOR_REGISTERED] += 1
        return messages


@pytest.fixture
def hall():
    with broker_memory() as memory:
        made = Hall(memory)
        yield made
        for client in made.clients:
            client.close()
        made.listener.close()
        os.close(made.acceptor._spare_fd)


def test_connections_that_come_together_go_round_the_processors(hall):
    hall.serve(0, 1, 2)
    hall.dial(9)
    hall.acceptor.accept_all()
    assert [hall.handed(processor) for processor in range(4)] == [3, 3, 3, 0]


@pytest.mark.parametrize("processors", [1, 2, 3, 4])
def test_connections_that_come_one_by_one_go_round_the_processors(hall, processors):
    hall.serve(*range(processors))
    for _ in range(4 * processors):
        hall.dial()
        hall.acceptor.accept_all()
    assert {hall.handed(processor) for processor in range(processors)} == {4}


def test_only_the_listeners_own_processors_are_given_connections(hall):
    hall.serve(1, 3)
    hall.serve(0, 2, listener=1)
    hall.dial(6)
    hall.acceptor.accept_all()
    assert [hall.handed(processor) for processor in range(4)] == [0, 3, 0, 3]


def test_a_connection_arrives_with_its_listener_and_a_running_number(hall):
    hall.serve(0)
    hall.dial(3)
    hall.acceptor.accept_all()
    messages = hall.receive(0)
    assert [message[:2] for message in messages] == [(0, 1), (0, 2), (0, 3)]
    assert all(message[2] > 0 for message in messages)


def test_a_client_never_waits_for_small_answers(hall):
    """TCP_NODELAY: an answer is written whole."""
    hall.serve(0)
    hall.dial()
    hall.acceptor.accept_all()
    _, (fd,) = recv_fds(hall.memory.handovers[0][1], HAND_OVER.size, 1)
    with socket.socket(fileno=fd) as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize("wanted", [20_000, -1])
def test_a_connection_has_the_send_buffer_that_was_set_for_its_listener(hall, wanted):
    hall.serve(0)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        untouched = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    hall.limit(ListenerLimits(send_buffer_bytes=wanted))
    hall.dial()
    hall.acceptor.accept_all()
    _, (fd,) = recv_fds(hall.memory.handovers[0][1], HAND_OVER.size, 1)
    with socket.socket(fileno=fd) as accepted:
        size = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        # The kernel doubles what it is told, for what it needs itself.
        assert size == 2 * wanted if wanted > 0 else size >= untouched


def test_a_processor_without_credit_is_passed_over(hall):
    hall.serve(0, 1)
    hall.words[processor_row(0) + PROCESSOR_HANDED] = NEW_CONNECTIONS
    hall.dial(5)
    hall.acceptor.accept_all()
    assert hall.handed(0) == NEW_CONNECTIONS
    assert hall.handed(1) == 5


def test_without_any_credit_the_acceptor_waits_and_goes_on(hall):
    hall.serve(0)
    count = NEW_CONNECTIONS + 10
    hall.dial(count)

    with running(hall.acceptor.run) as (child,):
        wait_until(lambda: hall.handed(0) == NEW_CONNECTIONS)
        assert child.is_alive
        wait_until(lambda: hall.receive(0) and hall.handed(0) == count)
        hall.memory.phase = Phase.DRAINING
        hall.memory.wake_everybody()
        assert child.wait() == 0


def test_an_acceptor_without_credit_ends_when_the_broker_drains(hall):
    hall.serve(0)
    hall.words[processor_row(0) + PROCESSOR_HANDED] = NEW_CONNECTIONS
    hall.dial()
    with running(hall.acceptor.run) as (child,):
        hall.memory.phase = Phase.DRAINING
        assert child.wait() == 0


def test_credit_that_a_death_took_along_comes_back(hall):
    """A successor takes all as registered, and then what was on its way arrives."""
    hall.serve(0)
    hall.words[processor_row(0) + PROCESSOR_REGISTERED] = 7
    hall.dial(NEW_CONNECTIONS - 1)  # one more, and it would wait
    hall.acceptor.accept_all()
    assert hall.handed(0) - 7 == NEW_CONNECTIONS - 1


def test_clients_that_have_gone_again_are_no_error(hall):
    hall.serve(0)
    hall.dial(3)
    for client in hall.clients:
        client.close()
    hall.acceptor.accept_all()
    hall.dial()
    hall.acceptor.accept_all()
    assert len(hall.receive(0)) == 4


def fill_descriptors() -> list[int]:
    """Lower this process's limit to what it uses, and use every number below.

    Returns:
        The numbers that were free. Other tests of this process may have left many in
        use: a limit below those would not count what is closed as free.
    """
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    filled = []
    with contextlib.suppress(OSError):
        while True:
            filled.append(os.dup(0))
    return filled


class Lacking:
    """A listening socket of a kernel that lacks something at first."""

    def __init__(self, sock: socket.socket, error: int) -> None:
        self._sock = sock
        self._errors = [error]

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def accept(self) -> tuple[socket.socket, object]:
        if self._errors:
            error = self._errors.pop()
            raise OSError(error, os.strerror(error))
        return self._sock.accept()


@pytest.mark.parametrize(
    "error", [errno.ENOMEM, errno.ENOBUFS, errno.EOPNOTSUPP, errno.ENONET]
)
def test_whatever_the_kernel_lacks_the_acceptor_lives_and_goes_on(hall, error):
    hall.serve(0)
    hall.acceptor._sock = Lacking(hall.listener, error)
    hall.dial()
    for _ in range(2):
        hall.acceptor.accept_all()
    assert hall.handed(0) == 1


def test_without_descriptors_a_connection_is_refused_and_none_is_a_spin(hall, capfd):
    hall.serve(0)
    hall.dial(3)

    def accept():
        fill_descriptors()
        hall.acceptor.accept_all()  # returns: a spin would not
        hall.acceptor.accept_all()

    assert fork(accept) == 0
    for client in hall.clients:
        client.settimeout(90)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""  # closed, not left hanging
    assert hall.handed(0) == 0


def test_when_descriptors_are_free_again_connections_are_accepted_again(hall):
    hall.serve(0)
    hall.dial(1)

    def accept():
        filled = fill_descriptors()
        hall.acceptor.accept_all()
        for fd in filled[-10:]:
            os.close(fd)
        hall.dial(2)
        hall.acceptor.accept_all()

    assert fork(accept) == 0
    assert hall.handed(0) == 2
    assert len(hall.receive(0)) == 2


# -- quotas ----------------------------------------------------------------------------


def is_closed(client: socket.socket) -> bool:
    """Whether the broker has closed it; it has not been served either way."""
    client.settimeout(0.01)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_one_too_many_of_an_address_is_closed_at_once_and_counted(hall):
    hall.serve(0)
    hall.limit(max_per_address=5)
    hall.dial(6)
    hall.acceptor.accept_all()
    assert hall.handed(0) == 5
    wait_until(lambda: is_closed(hall.clients[5]))
    assert not any(map(is_closed, hall.clients[:5]))
    assert hall.count(AcceptorCounter.TOO_MANY_OF_ADDRESS) == 1
    assert hall.count(AcceptorCounter.ACCEPTED) == 5


def test_an_override_is_of_the_address_as_the_kernel_tells_it(hall):
    hall.serve(0)
    here, _ = address_words(socket.AF_INET, ("127.0.0.1", 1))
    limits = Limits(BrokerLimits(max_per_address=0), [], {here: AddressLimits(2)})
    LimitsPage(hall.memory.limits).publish(limits)
    hall.dial(3)
    hall.acceptor.accept_all()
    assert hall.handed(0) == 2


def test_those_that_come_too_fast_are_held_and_closed_the_first_of_them_first(hall):
    """Kafka's heap has the last one on top, and holds all until its time is up."""
    hall.serve(0)
    hall.dial(2)
    hall.acceptor.accept_all()
    hall.limit(address_rate=0)
    hall.dial(3)
    hall.acceptor.accept_all()
    assert hall.handed(0) == 2
    assert hall.acceptor.held == 3
    assert hall.count(AcceptorCounter.TOO_FAST_OF_ADDRESS) == 3
    assert not any(map(is_closed, hall.clients))
    first, *_, last = sorted(entry[0] for entry in hall.acceptor._held)
    hall.acceptor.close_held(first)
    assert hall.acceptor.held == 2
    wait_until(lambda: is_closed(hall.clients[2]))
    hall.acceptor.close_held(last)
    assert hall.acceptor.held == 0
    wait_until(lambda: all(map(is_closed, hall.clients[3:])))
    assert not any(map(is_closed, hall.clients[:2]))


def test_whoever_waits_for_room_is_accepted_when_there_is_some(hall):
    hall.serve(0)
    hall.limit(ListenerLimits(max_connections=2))
    hall.dial(3)
    hall.acceptor.turn(1)
    assert hall.handed(0) == 2
    for _ in range(3):
        hall.acceptor.turn(0.05)  # it looks, and does not spin
    assert hall.handed(0) == 2
    assert not is_closed(hall.clients[2])
    hall.limit(ListenerLimits(max_connections=3))

    def accepted() -> bool:
        hall.acceptor.turn(0.05)
        return hall.handed(0) == 3

    wait_until(accepted)
    assert hall.acceptor.blocked_ns > 0


def test_an_acceptor_that_waits_for_room_is_not_woken_by_those_who_wait(hall):
    hall.serve(0)
    hall.limit(ListenerLimits(max_connections=0))
    hall.dial()
    hall.acceptor.turn(1)
    assert hall.acceptor._blocked_since
    assert hall.acceptor._epoll.poll(0.05) == []
    hall.limit()

    def accepted() -> bool:
        hall.acceptor.turn(0.05)
        return hall.handed(0) == 1

    wait_until(accepted)


def test_one_that_cannot_be_set_up_goes_to_nobody_and_counts_no_more(hall, monkeypatch):
    """It has gone again, say: its place and its part of the rate are the next one's."""
    hall.serve(0)
    hall.limit(ListenerLimits(max_connections=1, creation_rate=1))
    configure = hall.acceptor._configure

    def fail(sock):
        raise OSError(errno.EINVAL, "it has gone")

    monkeypatch.setattr(hall.acceptor, "_configure", fail)
    hall.dial(3)
    hall.acceptor.accept_all()
    assert hall.handed(0) == 0
    monkeypatch.setattr(hall.acceptor, "_configure", configure)
    hall.dial()
    hall.acceptor.accept_all()
    assert hall.handed(0) == 1


def test_a_connection_that_was_reserved_for_and_did_not_come_leaves_no_trace(hall):
    hall.serve(0)
    hall.limit(ListenerLimits(max_connections=1, creation_rate=1))
    for _ in range(5):
        hall.acceptor.accept_all()
    hall.dial()
    hall.acceptor.accept_all()
    assert hall.handed(0) == 1
