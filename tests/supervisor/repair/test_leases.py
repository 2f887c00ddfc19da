"""What counts as moving: much to do is not taken for an endless loop."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from mpbroker.inspect.attach import attach
from mpbroker.inspect.process_state import process_state, waits_for_disk
from mpbroker.ipc.layout import (
    ACCEPTOR_PULSES,
    CONTROL_WORDS,
    EXPORTER_PULSE,
    HANDLER_AWAITS,
    HANDLER_STEPS,
    HEADER,
    HEADER_PHASE,
    HOUSEKEEPER_PULSE,
    KEEPER_PULSE,
    PULSE_AWAITS,
    PULSE_PID,
    PULSE_STEPS,
    Phase,
    handler_row,
    pulse_words,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.delete_topics import DeleteTopicsRequest
from mpbroker.supervisor.child import Child, Role
from mpbroker.supervisor.repair.leases import LEASE_SAMPLES, Leases
from tests.broker.load import TOPIC, ask, create_topic, dial
from tests.support.broker import Broker
from tests.support.children import wait_until

HANDLER, OTHER = 3, 4


class Owner:
    """A supervisor of one handler."""

    asides: frozenset[int] = frozenset()

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        child = Child(Role.HANDLER, HANDLER, lambda: None)
        child.pid, child.pidfd = process.pid, os.pidfd_open(process.pid)
        self.children = [child]
        self.before_repair = lambda: None

    def every(self, interval_s: float, run: object) -> None:
        raise NotImplementedError


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that waits for what never comes."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


@pytest.fixture
def owner(process: subprocess.Popen[bytes]) -> Iterator[Owner]:
    owner = Owner(process)
    yield owner
    os.close(owner.children[0].pidfd)


def test_a_handler_is_left_alone_while_it_takes_steps_and_no_longer(
    owner: Owner,
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Our cat does wait in a system call on files, and is not to be excused for it.
    monkeypatch.setattr("mpbroker.inspect.process_state._DISK", frozenset())
    words = memoryview(mmap.mmap(-1, CONTROL_WORDS * 8)).cast("q")
    leases = Leases(owner, words)
    for sample in range(3 * LEASE_SAMPLES):
        if sample % (LEASE_SAMPLES - 1) == 0:
            words[handler_row(HANDLER) + HANDLER_STEPS] += 1
        leases.check()
        assert process.poll() is None
    for _ in range(LEASE_SAMPLES):
        leases.check()
    assert process.wait() == -9


PULSES = {
    Role.HOUSEKEEPER: HOUSEKEEPER_PULSE,
    Role.KEEPER: KEEPER_PULSE,
    Role.EXPORTER: EXPORTER_PULSE,
    Role.ACCEPTOR: ACCEPTOR_PULSES + 2,
}
LONG_LEASES = {Role.HOUSEKEEPER: 10 * LEASE_SAMPLES, Role.EXPORTER: 10 * LEASE_SAMPLES}


@pytest.fixture
def pulsing(
    owner: Owner, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Role], tuple[Leases, memoryview]]:
    """Make the owner's child one of a role without a row, in a broker that serves."""

    def make(role: Role) -> tuple[Leases, memoryview]:
        monkeypatch.setattr("mpbroker.inspect.process_state._DISK", frozenset())
        (handler,) = owner.children
        child = Child(role, 2 if role is Role.ACCEPTOR else 0, lambda: None)
        child.pid, child.pidfd = handler.pid, handler.pidfd
        owner.children = [child]
        words = memoryview(mmap.mmap(-1, CONTROL_WORDS * 8)).cast("q")
        words[HEADER + HEADER_PHASE] = Phase.SERVING
        words[pulse_words(PULSES[role]) + PULSE_PID] = process.pid
        return Leases(owner, words), words

    return make


@pytest.mark.parametrize("role", PULSES)
def test_a_process_without_a_row_is_left_alone_while_it_takes_steps_and_no_longer(
    pulsing: Callable[[Role], tuple[Leases, memoryview]],
    process: subprocess.Popen[bytes],
    role: Role,
) -> None:
    leases, words = pulsing(role)
    lease = LONG_LEASES.get(role, LEASE_SAMPLES)
    for sample in range(2 * lease):
        if sample % (lease - 1) == 0:
            words[pulse_words(PULSES[role]) + PULSE_STEPS] += 1
        leases.check()
        assert process.poll() is None
    for _ in range(lease):
        leases.check()
    assert process.wait() == -9


@pytest.mark.parametrize(
    "why", ["no pulse", "the broker stops", "it has a lock to get"]
)
def test_a_process_without_a_row_is_left_alone(
    pulsing: Callable[[Role], tuple[Leases, memoryview]],
    process: subprocess.Popen[bytes],
    why: str,
) -> None:
    leases, words = pulsing(Role.KEEPER)
    first = pulse_words(KEEPER_PULSE)
    if why == "no pulse":
        words[first + PULSE_PID] = 0
    elif why == "the broker stops":
        words[HEADER + HEADER_PHASE] = Phase.DRAINING
    else:
        words[first + PULSE_AWAITS] = os.getppid()
    for _ in range(2 * LEASE_SAMPLES):
        leases.check()
    assert process.poll() is None


def test_all_processes_of_a_broker_but_the_supervisor_show_that_they_move(
    make_broker: Callable[..., Broker],
) -> None:
    broker = make_broker({"metrics.listeners": "HTTP://127.0.0.1:0"})
    view = attach(broker.pid)
    assert view is not None
    numbers = (HOUSEKEEPER_PULSE, KEEPER_PULSE, EXPORTER_PULSE, ACCEPTOR_PULSES)
    pulses = [pulse_words(number) for number in numbers]
    wait_until(lambda: all(view.control[each + PULSE_STEPS] > 1 for each in pulses))
    pids = {view.control[each + PULSE_PID] for each in pulses}
    assert len(pids) == len(pulses)
    assert "" not in map(process_state, pids)


@pytest.fixture
def two(owner: Owner) -> Iterator[tuple[Owner, subprocess.Popen[bytes]]]:
    """A second handler beside the first one."""
    with subprocess.Popen(["sleep", "1000"]) as started:
        child = Child(Role.HANDLER, OTHER, lambda: None)
        child.pid, child.pidfd = started.pid, os.pidfd_open(started.pid)
        owner.children.append(child)
        wait_until(lambda: not waits_for_disk(started.pid))  # it is read from one
        yield owner, started
        started.kill()
        os.close(child.pidfd)


@pytest.mark.parametrize("chain", ["one", "two", "a process aside"])
def test_who_waits_for_a_lock_of_another_process_is_left_alone(
    owner: Owner,
    two: tuple[Owner, subprocess.Popen[bytes]],
    process: subprocess.Popen[bytes],
    caplog: pytest.LogCaptureFixture,
    chain: str,
) -> None:
    """Its successor would wait for the same lock; the lock's owner waits for a disk."""
    words = memoryview(mmap.mmap(-1, CONTROL_WORDS * 8)).cast("q")
    leases = Leases(owner, words)
    sleeper = two[1]
    wait_until(lambda: waits_for_disk(process.pid))  # it may not have begun to read
    awaited = os.getppid() if chain == "a process aside" else process.pid
    words[handler_row(OTHER) + HANDLER_AWAITS] = awaited
    if chain == "two":  # the cat waits in a system call on files all the same
        words[handler_row(HANDLER) + HANDLER_AWAITS] = os.getppid()
    for _ in range(3 * LEASE_SAMPLES):
        leases.check()
    assert sleeper.poll() is process.poll() is None
    assert f"handler {OTHER} (pid {sleeper.pid}) has waited for a lock" in caplog.text


@pytest.mark.parametrize("other", ["itself", "each other"])
def test_processes_that_wait_for_each_other_are_killed(
    two: tuple[Owner, subprocess.Popen[bytes]],
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    other: str,
) -> None:
    monkeypatch.setattr("mpbroker.inspect.process_state._DISK", frozenset())
    words = memoryview(mmap.mmap(-1, CONTROL_WORDS * 8)).cast("q")
    owner, sleeper = two
    leases = Leases(owner, words)
    awaited = sleeper if other == "itself" else process
    words[handler_row(OTHER) + HANDLER_AWAITS] = awaited.pid
    words[handler_row(HANDLER) + HANDLER_AWAITS] = sleeper.pid
    wait_until(lambda: leases.check() or sleeper.poll())
    assert sleeper.wait() == -9


@pytest.fixture
def helper(owner: Owner) -> Iterator[int]:
    """The child of a housekeeper."""
    script = "sleep 1000 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        child = Child(Role.HOUSEKEEPER, 0, lambda: None)
        child.pid, child.pidfd = started.pid, os.pidfd_open(started.pid)
        owner.children.append(child)
        yield pid
        if process_state(pid) not in ("", "Z"):
            os.kill(pid, signal.SIGKILL)
        started.kill()
        os.close(child.pidfd)


@pytest.mark.parametrize("when", ["twice", "before a repair", "it has a lock"])
def test_a_stopped_child_of_the_housekeeper_is_killed(
    owner: Owner, helper: int, when: str
) -> None:
    words = memoryview(mmap.mmap(-1, CONTROL_WORDS * 8)).cast("q")
    leases = Leases(owner, words)
    look: Callable[[], object] = {
        "twice": leases.check,
        "before a repair": leases.kill_stopped,
        "it has a lock": lambda: leases.let_go(helper),
    }[when]
    for _ in range(3):
        look()
    assert process_state(helper) not in ("", "Z")
    os.kill(helper, signal.SIGSTOP)
    wait_until(lambda: process_state(helper) == "T")
    if when == "twice":
        look()
        assert process_state(helper) == "T"
    look()
    wait_until(lambda: process_state(helper) in ("", "Z"))


def test_a_stopped_owner_of_a_lock_is_killed_when_the_supervisor_waits_for_it(
    two: tuple[Owner, subprocess.Popen[bytes]],
) -> None:
    owner, sleeper = two
    words = memoryview(mmap.mmap(-1, CONTROL_WORDS * 8)).cast("q")
    leases = Leases(owner, words)
    leases.let_go(sleeper.pid)
    assert sleeper.poll() is None
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: process_state(sleeper.pid) == "T")
    leases.let_go(os.getpid())
    leases.let_go(sleeper.pid)
    assert sleeper.wait() == -9


def test_each_partition_of_a_request_is_a_step_of_its_handler(
    make_broker: Callable[..., Broker],
) -> None:
    broker = make_broker({"num.io.threads": 1})
    view = attach(broker.pid)
    assert view is not None
    word = handler_row(0) + HANDLER_STEPS
    before = view.control[word]
    create_topic(broker, partitions=50)
    created = view.control[word]
    assert created - before > 50
    with dial(broker) as sock:
        request = DeleteTopicsRequest(topic_names=[TOPIC], timeout_ms=10_000)
        ask(sock, ApiKey.DELETE_TOPICS, 4, request.encode(4))
    assert view.control[word] - created > 50


@pytest.mark.parametrize("state", ["R", "S"])
def test_computing_for_a_lease_is_told_from_waiting(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr("mpbroker.inspect.process_state._DISK", frozenset())
    monkeypatch.setattr(
        "mpbroker.supervisor.repair.leases.process_state", lambda pid: state
    )
    leases = Leases(owner, memoryview(mmap.mmap(-1, CONTROL_WORDS * 8)).cast("q"))
    for _ in range(LEASE_SAMPLES + 1):
        leases.check()
    assert owner.children[0].overran == (state == "R")
