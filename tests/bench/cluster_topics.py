"""Topics of a cluster: latency, throughput and CPU of produces and fetches.

    cluster/produce/16/PAUSE 16 clients that wait for each answer, and then on average
                             as long as the name says
    cluster/produce/librdkafka/16
                             16 producers that send 20 messages a second each, whatever
                             is answered: the time until a message's own answer
    cluster/produce/librdkafka/16-one-in-flight
                             the same, and each waits before its next request
    cluster/produce/librdkafka/16-50ms
                             the same as the first, with a shorter interval of the node
    cluster/produce/lone     one client that waits for each answer, without a pause
    cluster/visible          how soon a waiting fetch gets a record, at both nodes
    cluster/in               requests of nearly 1 MB from 16 connections
    cluster/tail-fetch/SIZE  the same fetches of a shared and of a local topic
    cluster/local/produce-acks1/16
                             a topic of one node, beside a broker without a cluster

Beside each is what the same database and the same store do for bare calls of as many
bytes, in turns.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import select
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

from tests.bench import wire
from tests.bench.brokers import Broker, CheckoutBroker, scratch_directory
from tests.bench.cases import Case, Context
from tests.bench.cluster_nodes import SHARED, BareCalls, engines
from tests.bench.latency import percentiles_ms
from tests.bench.load import LoadResult, Template, run_load
from tests.bench.machinery import CHECKOUT, figures_of
from tests.bench.small_requests import KINDS

_TOPIC: Final = "bench-shared"
_LOCAL: Final = "bench-local"
_PRODUCERS: Final = 16
_PAUSES_MS: Final = (500, 50)
_RATE_PER_S: Final = 20.0  # messages of each producer of librdkafka
_VALUE_BYTES: Final = 1024
_BATCH_BYTES: Final = 1_000_000  # what librdkafka sends at most
_OBJECT_BYTES: Final = 8 * 1024 * 1024
_PUTS_AT_ONCE: Final = 8  # as a node
_LEAST_S: Final = 5.0  # of a latency's measurement
_LEAST_IN_S: Final = 3.0
_TURNS: Final = 5
_IN_TURN: Final = 20
_PAIRS: Final = 6
_IN_PAIRS: Final = 3
_LOCAL_PAIRS: Final = 30
_PATIENCE_S: Final = 60
_STORED: Final = {"1KiB": _VALUE_BYTES, "1MB": _BATCH_BYTES}  # a batch's size
_BATCHES: Final = 16


def _bound(bare: list[float]) -> dict[str, float]:
    p50, p99 = percentiles_ms(bare)
    return {"bound_p50_ms": p50, "bound_p99_ms": p99}


def _found(taken: list[float]) -> dict[str, float]:
    p50, p99 = percentiles_ms(taken)
    return {"p50_ms": p50, "p99_ms": p99}


# -- latency -----------------------------------------------------------------------


class _Producers:
    """Some producers of librdkafka; each message's time until its answer is noted.

    Each producer has a partition, and sends a message at random moments.
    """

    def __init__(self, bootstrap: str, count: int, in_flight: int) -> None:
        import confluent_kafka

        settings = {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "max.in.flight.requests.per.connection": in_flight,
        }
        self._producers = [confluent_kafka.Producer(settings) for _ in range(count)]
        self._value = wire.filler(_VALUE_BYTES)
        self._random = random.Random(count)
        self._taken: list[float] = []
        self._failed: list[str] = []
        self._is_over = threading.Event()
        # Each answer is noted when it comes, and not when the next message is sent.
        self._threads = [
            threading.Thread(target=self._poll, args=(each,))
            for each in self._producers
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _poll(self, producer: Any) -> None:
        while not self._is_over.is_set():
            producer.poll(0.2)

    def send(self, seconds: float) -> list[float]:
        """Send, wait for all answers, and return the seconds that each has taken.

        Raises:
            AnswerError: a message was refused, or has got no answer.
        """
        self._taken.clear()
        due = time.perf_counter()
        until = due + seconds
        sent = 0
        while True:
            due += self._random.expovariate(_RATE_PER_S * len(self._producers))
            if due > until:
                break
            time.sleep(max(0.0, due - time.perf_counter()))
            self._send(self._random.randrange(len(self._producers)))
            sent += 1
        deadline = time.monotonic() + _PATIENCE_S
        while len(self._taken) + len(self._failed) < sent:
            if time.monotonic() > deadline:
                raise wire.AnswerError(f"{len(self._taken)} answers to {sent} messages")
            time.sleep(0.01)
        if self._failed:
            raise wire.AnswerError(self._failed[0])
        return list(self._taken)

    def _send(self, number: int) -> None:
        began = time.perf_counter()

        def answered(error: object, _message: object) -> None:
            if error is None:
                self._taken.append(time.perf_counter() - began)
            else:
                self._failed.append(str(error))

        producer = self._producers[number]
        producer.produce(_TOPIC, self._value, partition=number, on_delivery=answered)


def _librdkafka(in_flight: int, interval_ms: int, context: Context) -> dict[str, float]:
    seconds = max(context.seconds, _LEAST_S) / _TURNS
    taken: list[float] = []
    bare: list[float] = []
    interval = str(interval_ms)
    with (
        engines() as made,
        made.node(diskless_append_commit_interval_ms=interval) as node,
        BareCalls(made) as calls,
    ):
        node.topic(_TOPIC, _PRODUCERS, SHARED)
        with _Producers(node.bootstrap, _PRODUCERS, in_flight) as producers:
            producers.send(1.0)  # each has found its way
            for _ in range(_TURNS):
                taken += producers.send(seconds)
                bare += calls.writes(_PRODUCERS * _VALUE_BYTES, _IN_TURN)
    return _found(taken) | _bound(bare)


def _produce(pause_ms: int, context: Context) -> dict[str, float]:
    seconds = max(context.seconds, _LEAST_S) / _TURNS
    taken: list[float] = []
    bare: list[float] = []
    batch = wire.record_batch([wire.RecordSpec(wire.filler(_VALUE_BYTES))])
    with (
        engines() as made,
        made.node() as node,
        BareCalls(made) as calls,
        contextlib.ExitStack() as stack,
    ):
        node.topic(_TOPIC, _PRODUCERS, SHARED)
        clients = [
            (
                stack.enter_context(node.connect()),
                wire.produce(_TOPIC, number, batch, acks=-1),
            )
            for number in range(_PRODUCERS)
        ]
        for connection, request in clients:
            _ask(connection, request, 1)
        for _ in range(_TURNS):
            taken += _ask_with_pauses(clients, pause_ms / 1000, seconds)
            bare += calls.writes(_PRODUCERS * len(batch), _IN_TURN)
    return _found(taken) | _bound(bare)


def _ask_with_pauses(
    clients: Sequence[tuple[wire.Connection, bytes]], pause_s: float, seconds: float
) -> list[float]:
    """Let each client produce, and pause at random; return the seconds of each answer.

    Args:
        clients: the connection and the request of each.
        pause_s: the mean of the pauses.
        seconds: for which requests are sent.
    """
    source = random.Random(len(clients))
    began = time.perf_counter()
    due = [
        (began + source.expovariate(1 / pause_s), number)
        for number in range(len(clients))
    ]
    heapq.heapify(due)
    numbers = {each.fileno(): number for number, (each, _) in enumerate(clients)}
    sent: dict[int, float] = {}
    taken = []
    poll = select.poll()
    while due or sent:
        left_s = due[0][0] - time.perf_counter() if due else _PATIENCE_S
        if left_s <= 0:
            at, number = heapq.heappop(due)
            if at < began + seconds:
                connection, request = clients[number]
                connection.send(request)
                sent[connection.fileno()] = time.perf_counter()
                poll.register(connection.fileno(), select.POLLIN)
            continue
        events = poll.poll(left_s * 1000)
        now = time.perf_counter()
        for fd, _ in events:
            poll.unregister(fd)
            taken.append(now - sent.pop(fd))
            _check(clients[numbers[fd]][0].receive())
            heapq.heappush(due, (now + source.expovariate(1 / pause_s), numbers[fd]))
    return taken


def _lone(context: Context) -> dict[str, float]:
    taken: list[float] = []
    bare: list[float] = []
    batch = wire.record_batch([wire.RecordSpec(wire.filler(_VALUE_BYTES))])
    with engines() as made, made.node() as node, BareCalls(made) as calls:
        node.topic(_TOPIC, 1, SHARED)
        request = wire.produce(_TOPIC, 0, batch, acks=-1)
        with node.connect() as connection:
            _ask(connection, request, _IN_TURN)
            until = time.monotonic() + max(context.seconds, _LEAST_S)
            while time.monotonic() < until:
                taken += _ask(connection, request, _IN_TURN)
                bare += calls.writes(len(batch), _IN_TURN)
    return _found(taken) | _bound(bare)


def _ask(connection: wire.Connection, request: bytes, count: int) -> list[float]:
    """Produce one after the other; return the seconds that each has taken."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        answer = connection.ask(request)
        taken.append(time.perf_counter() - began)
        _check(answer)
    return taken


def _check(answer: bytes) -> None:
    code = wire.parse_produce(answer).error_code
    if code:
        raise wire.AnswerError(f"error {code} in answer to a produce")


def _visible(context: Context) -> dict[str, float]:
    """Produce while a fetch waits at the same node, and another one elsewhere."""
    same: list[float] = []
    other: list[float] = []
    bare: list[float] = []
    batch = wire.record_batch([wire.RecordSpec(wire.filler(_VALUE_BYTES))])
    with (
        engines() as made,
        made.node(1) as first,
        made.node(2) as second,
        BareCalls(made) as calls,
    ):
        for node in (first, second):
            node.topic(_TOPIC, 1, SHARED)
        connections = [each.connect() for each in (first, first, second)]
        with contextlib.ExitStack() as stack:
            for connection in connections:
                stack.enter_context(connection)
            offset = 0
            for _ in range(_IN_TURN):
                _pass_on(connections, batch, offset)
                offset += 1
            until = time.monotonic() + max(context.seconds, _LEAST_S)
            while time.monotonic() < until:
                for _ in range(_IN_TURN):
                    here, there = _pass_on(connections, batch, offset)
                    same.append(here)
                    other.append(there)
                    offset += 1
                bare += calls.reads(len(batch), _IN_TURN)
    p50, p99 = percentiles_ms(same)
    other_p50, other_p99 = percentiles_ms(other)
    return {
        "after_ack_p50_ms": p50,
        "after_ack_p99_ms": p99,
        "other_node_p50_ms": other_p50,
        "other_node_p99_ms": other_p99,
        **_bound(bare),
    }


def _pass_on(
    connections: list[wire.Connection], batch: bytes, offset: int
) -> tuple[float, float]:
    """Return the seconds from the answer of a produce to those of two fetches.

    Args:
        connections: those of the producer, and of each fetch.
    """
    poll = select.poll()
    for connection in connections:
        poll.register(connection.fileno(), select.POLLIN)
    for connection in connections[1:]:
        connection.send(
            wire.fetch(_TOPIC, 0, offset, max_bytes=4096, max_wait_ms=30_000)
        )
    # Both fetches wait already, and the other node's look comes at any moment.
    time.sleep(random.uniform(0.01, 0.06))
    connections[0].send(wire.produce(_TOPIC, 0, batch, acks=-1))
    arrived: dict[int, float] = {}
    while len(arrived) < len(connections):
        events = poll.poll(_PATIENCE_S * 1000)
        now = time.perf_counter()
        if not events:
            raise wire.AnswerError(f"nothing within {_PATIENCE_S} s")
        for fd, _ in events:
            arrived[fd] = now
            poll.unregister(fd)
    produced = wire.parse_produce(connections[0].receive())
    if produced != (0, offset):
        raise wire.AnswerError(f"{produced} where offset {offset} was due")
    for connection in connections[1:]:
        records = wire.iter_records(wire.parse_fetch(connection.receive()).records)
        if [record.offset for record in records] != [offset]:
            raise wire.AnswerError(f"{len(records)} records where {offset} was due")
    acked, here, there = (arrived[each.fileno()] for each in connections)
    return max(0.0, here - acked), max(0.0, there - acked)


# -- throughput --------------------------------------------------------------------


def _in(context: Context) -> dict[str, float]:
    batch = wire.batch_of_size(_BATCH_BYTES)
    records = len(wire.iter_records(batch))
    content = (batch * (_OBJECT_BYTES // len(batch) + 1))[:_OBJECT_BYTES]
    found: list[tuple[float, float, float]] = []  # bytes/s, CPU s a byte of two
    bare: list[tuple[float, float, float]] = []
    written: list[float] = []  # CPU s a byte
    seconds = max(context.seconds, _LEAST_IN_S)
    with (
        engines() as made,
        made.node() as node,
        BareCalls(made) as calls,
        scratch_directory() as directory,
    ):
        node.topic(_TOPIC, _PRODUCERS, SHARED)
        ok = ((wire.produce_error_at(_TOPIC), b"\0\0"),)
        templates = [
            Template(wire.produce(_TOPIC, number, batch, acks=-1), checks=ok)
            for number in range(_PRODUCERS)
        ]
        for turn in range(_IN_PAIRS):
            for is_bare in (False, True) if turn % 2 else (True, False):
                engines_cpu, end = made.cpu_seconds(), _end(node)
                if is_bare:
                    own = time.process_time()
                    rate = calls.puts(content, _PUTS_AT_ONCE, seconds)
                    own = time.process_time() - own
                    moved = stored = rate * seconds
                    taken = bare
                else:
                    result = _load(node, templates, seconds)
                    moved = result.answered * len(batch)
                    rate = moved / result.seconds
                    own = result.broker_cpu_s
                    taken = found
                    time.sleep(1.0)  # what was under way may end
                    stored = (_end(node) - end) / records * len(batch)
                spent = made.cpu_seconds() - engines_cpu
                taken.append((rate, own / moved, spent / stored))
            written.append(_write(directory / str(turn), content))
    (rate, own, spent), (bare_rate, bare_own, bare_spent) = (
        [median(column) for column in zip(*each, strict=True)] for each in (found, bare)
    )
    return {
        "mib_per_s": rate / 2**20,
        "bare_mib_per_s": bare_rate / 2**20,
        "cpu_s_per_gib": own * 2**30,
        "bare_cpu_s_per_gib": bare_own * 2**30,
        "write_cpu_s_per_gib": median(written) * 2**30,
        "engines_cpu_s_per_gib": spent * 2**30,
        "bare_engines_cpu_s_per_gib": bare_spent * 2**30,
    }


def _write(path: Path, content: bytes) -> float:
    """Write a file of 256 MiB, as a local log; return the CPU seconds a byte."""
    count = (256 << 20) // len(content)
    began = time.process_time()
    with open(path, "wb", buffering=0) as file:
        for _ in range(count):
            file.write(content)
    return (time.process_time() - began) / (count * len(content))


def _end(node: Broker) -> int:
    """Return how many records the shared topic has."""
    with node.connect() as connection:
        return sum(connection.end_offset(_TOPIC, each) for each in range(_PRODUCERS))


def _load(node: Broker, templates: list[Template], seconds: float) -> LoadResult:
    return run_load(
        node.address,
        node.tree,
        templates,
        connections=_PRODUCERS,
        measure_s=seconds,
    )


def _fill(node: Broker, topic: str, batch: bytes) -> list[Template]:
    """Produce batches; return a fetch of each of them."""
    offsets = []
    with node.connect() as connection:
        for _ in range(_BATCHES):
            answer = wire.parse_produce(connection.ask(wire.produce(topic, 0, batch)))
            if answer.error_code:
                raise wire.AnswerError(f"produce: error {answer.error_code}")
            offsets.append(answer.base_offset)
        exact = [
            wire.fetch(topic, 0, offset, max_bytes=len(batch)) for offset in offsets
        ]
        for request in exact:
            if wire.parse_fetch(connection.ask(request)).records[61:] != batch[61:]:
                raise wire.AnswerError("a fetch gave other bytes than were produced")
    ok = ((wire.fetch_error_at(topic), b"\0\0"),)
    return [Template(each, least_size=len(batch), checks=ok) for each in exact]


def _tail_fetch(size: int, context: Context) -> dict[str, float]:
    batch = wire.batch_of_size(size)
    with engines() as made, made.node() as node:
        loads = [
            _fill(node, node.topic(_TOPIC, 1, SHARED), batch),
            _fill(node, node.topic(_LOCAL), batch),
        ]
        for templates in loads:
            _load(node, templates, context.seconds)
        pairs = []
        for turn in range(_PAIRS):
            step = -1 if turn % 2 else 1
            runs = [_load(node, each, context.seconds) for each in loads[::step]]
            pairs.append(runs[::step])
    return {
        "per_s": median(shared.metrics()["per_s"] for shared, _ in pairs),
        "rate_ratio": median(
            shared.metrics()["per_s"] / local.metrics()["per_s"]
            for shared, local in pairs
        ),
        "cpu_ratio": median(
            shared.metrics()["cpu_us"] / local.metrics()["cpu_us"]
            for shared, local in pairs
        ),
    }


def _local(context: Context) -> dict[str, float]:
    """Compare in turns: at the same time, what a node does when idle counts double."""
    with (
        engines() as made,
        made.node() as node,
        CheckoutBroker(CHECKOUT).broker() as broker,
    ):
        loads = [(each, KINDS["produce-acks1"](each)) for each in (node, broker)]
        for each, templates in loads:
            _load(each, templates, context.seconds)
        pairs = []
        for turn in range(_LOCAL_PAIRS):
            step = -1 if turn % 2 else 1
            runs = [_load(*load, context.seconds / 3) for load in loads[::step]]
            with_it, without = (run.metrics()["cpu_us"] for run in runs[::step])
            pairs.append((with_it, without))
    return figures_of(pairs)


CASES: Final = [
    *(
        Case(
            f"cluster/produce/{_PRODUCERS}/{pause_ms}ms",
            partial(_produce, pause_ms),
            starts_brokers=True,
        )
        for pause_ms in _PAUSES_MS
    ),
    *(
        Case(
            f"cluster/produce/librdkafka/{_PRODUCERS}{suffix}",
            partial(_librdkafka, in_flight, interval_ms),
            starts_brokers=True,
        )
        for suffix, in_flight, interval_ms in (
            ("", 5, 250),
            ("-one-in-flight", 1, 250),
            ("-50ms", 5, 50),
        )
    ),
    Case("cluster/produce/lone", _lone, starts_brokers=True),
    Case("cluster/visible", _visible, starts_brokers=True),
    Case("cluster/in", _in, starts_brokers=True),
    *(
        Case(
            f"cluster/tail-fetch/{label}",
            partial(_tail_fetch, size),
            starts_brokers=True,
        )
        for label, size in _STORED.items()
    ),
    Case("cluster/local/produce-acks1/16", _local, starts_brokers=True),
]
