"""What counts as moving: much to do is not taken for an endless loop."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from mpbroker.inspect.attach import attach
from mpbroker.ipc.layout import CONTROL_WORDS, HANDLER_STEPS, handler_row
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.delete_topics import DeleteTopicsRequest
from mpbroker.supervisor.child import Child, Role
from mpbroker.supervisor.repair.leases import LEASE_SAMPLES, Leases
from tests.broker.load import TOPIC, ask, create_topic, dial
from tests.support.broker import Broker

HANDLER = 3


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
    monkeypatch.setattr("mpbroker.supervisor.repair.leases._DISK", frozenset())
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
