"""The death of a node: how long its clients wait, and whether others feel it.

Three nodes, one of which gets SIGKILL with all its processes. Clients are librdkafka's,
with its defaults: producers that know the node as the leader, others that know another
one, and members of groups that the node coordinates. Each sends or commits all the
time; the figure is the longest time between two answers from the kill on. Beside it is
that of the same producers before.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Self

from mpbroker.protocol.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from tests.bench import wire
from tests.bench.brokers import Broker
from tests.bench.cases import Case, Context
from tests.bench.cluster_nodes import SHARED, engines, wait_until

_TOPIC: Final = "bench-deaths"
_NODES: Final = (1, 2, 3)
_PRODUCERS: Final = 4  # of the node that dies, and of another one
_GROUPS: Final = 2
_PAUSE_S: Final = 0.02
_LEAST_S: Final = 12.0  # before the death, and after it
_FIND_COORDINATOR: Final = (10, 3)
_HEAD: Final = 5  # correlation id and tagged fields, before an answer's body


def longest_gap(times: Sequence[float], since: float) -> float:
    """Return the longest time between two answers, of which the second is late enough.

    Args:
        times: when there was an answer, in their order.
        since: the second answer of a pair is not before this.

    Raises:
        AnswerError: there is no such pair.
    """
    gaps = [
        later - sooner for sooner, later in itertools.pairwise(times) if later >= since
    ]
    if not gaps:
        raise wire.AnswerError("there are no answers any more")
    return max(gaps)


class _Client:
    """A client that does something again and again; its answers' times are noted."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError

    def _note(self) -> None:
        self.times.append(time.monotonic())


class _Producing(_Client):
    """A producer that sends fifty messages a second, whatever is answered."""

    def __init__(self, node: Broker, partition: int) -> None:
        import confluent_kafka

        super().__init__()
        self._partition = partition
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": node.bootstrap, "enable.idempotence": True}
        )
        self.failures: list[str] = []

    def _run(self) -> None:
        due = time.monotonic()
        while not self._is_over.is_set():
            self._producer.produce(
                _TOPIC, b"x" * 100, partition=self._partition, on_delivery=self._done
            )
            due += _PAUSE_S
            while (left_s := due - time.monotonic()) > 0:
                self._producer.poll(left_s)  # returns when there is an answer, too
        self._producer.flush(10)

    def _done(self, error: object, _message: object) -> None:
        if error is None:
            self._note()
        else:
            self.failures.append(str(error))


class _Committing(_Client):
    """A group's only member, which commits each record that it gets."""

    def __init__(self, bootstrap: str, group: str) -> None:
        import confluent_kafka

        super().__init__()
        self._errors = confluent_kafka.KafkaException
        self._consumer: Any = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "enable.auto.commit": False,
            }
        )
        self._consumer.subscribe([_TOPIC])

    def _run(self) -> None:
        while not self._is_over.is_set():
            message = self._consumer.poll(0.1)
            if message is None or message.error():
                continue
            with contextlib.suppress(self._errors):
                self._consumer.commit(message, asynchronous=False)
                self._note()
        self._consumer.close()


def _coordinator(node: Broker, group: str) -> int:
    """Return the id of a group's node; -1: there is none now."""
    request = FindCoordinatorRequest(key=group, key_type=0)
    with node.connect() as connection:
        framed = wire.request(_FIND_COORDINATOR, request.encode(_FIND_COORDINATOR[1]))
        payload = connection.ask(framed)
    answer = FindCoordinatorResponse.decode(_FIND_COORDINATOR[1], payload[_HEAD:])
    return -1 if answer.error_code else answer.node_id


def _groups_of(nodes: Sequence[Broker], number: int) -> list[str]:
    """Return names of groups that a node coordinates, once all nodes agree on it."""
    names = [f"bench-{each}" for each in range(64)]
    found: list[str] = []

    def agreed() -> bool:
        found[:] = [
            name
            for name in names
            if {_coordinator(node, name) for node in nodes} == {number}
        ]
        return len(found) >= _GROUPS

    time.sleep(2.0)  # the shards have been given to all three
    wait_until(agreed, "groups")
    return found[:_GROUPS]


def _kill(broker: Broker) -> float:
    """Kill a broker's processes; return when."""
    killed = time.monotonic()
    for pid in broker.tree.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return killed


def _death(context: Context) -> dict[str, float]:
    with engines() as made, contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(made.node(number)) for number in _NODES]
        for node in nodes:
            node.topic(_TOPIC, 2 * _PRODUCERS, SHARED)
        dying, other, _ = nodes
        all_of_them = ",".join(node.bootstrap for node in nodes)
        groups = [
            stack.enter_context(_Committing(all_of_them, group))
            for group in _groups_of(nodes, _NODES[0])
        ]
        producers = [
            stack.enter_context(_Producing(node, number))
            for number, node in enumerate([dying, other] * _PRODUCERS)
        ]
        clients = [*groups, *producers]
        wait_until(lambda: all(len(each.times) > 20 for each in clients), "answers")
        seconds = max(context.seconds, _LEAST_S)
        began = time.monotonic()
        time.sleep(seconds)
        killed = _kill(dying)
        time.sleep(seconds)
        wait_until(lambda: all(each.times[-1] > killed for each in clients), "answers")
        failures = [text for each in producers for text in each.failures]
        if failures:
            raise wire.AnswerError(f"{len(failures)} lost messages: {failures[0]}")
        return {
            "gap_ms": _longest(producers[::2], killed),
            "groups_gap_ms": _longest(groups, killed),
            "others_gap_ms": _longest(producers[1::2], killed),
            "bare_gap_ms": _longest(producers[1::2], began, killed),
        }


def _longest(
    clients: Sequence[_Client], since: float, until: float = math.inf
) -> float:
    """Return the longest gap of any of some clients, in milliseconds."""
    cut = [[each for each in client.times if each < until] for client in clients]
    return max(longest_gap(times, since) for times in cut) * 1e3


CASES: Final = [Case("cluster/node-death", _death, starts_brokers=True)]
