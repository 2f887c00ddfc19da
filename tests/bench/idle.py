"""Start-up, and what a broker costs that nobody talks to."""

from __future__ import annotations

import resource
import socket
import time
from functools import partial
from typing import Final

from tests.bench import wire
from tests.bench.cases import Case, Context
from tests.bench.flatness import allow_files

IDLE_CONNECTIONS: Final = 2000
MANY_CONNECTIONS: Final = 10_000
SETTLE_S: Final = 1.0
STARTED_S: Final = 5.0  # the housekeeper and the coordinator start after readiness
TOPICS: Final = 10_000  # as many as one request may make
MIB: Final = 1 << 20


def _ended_cpu_s() -> float:
    """Return the CPU time of children that have ended, and of theirs."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def _first_answer(context: Context) -> dict[str, float]:
    cpu_s = _ended_cpu_s()
    began = time.monotonic()
    with context.source.broker() as broker:
        ready = time.monotonic()
        with broker.connect() as connection:
            connection.ask(wire.api_versions())
        answered = time.monotonic()
    return {
        "ready_ms": (ready - began) * 1e3,
        "answer_ms": (answered - began) * 1e3,
        "life_cpu_ms": (_ended_cpu_s() - cpu_s) * 1e3,
    }


def _memory(context: Context) -> dict[str, float]:
    with context.source.broker() as broker:
        time.sleep(STARTED_S)
        idle = broker.tree.idle_share(max(5.0, context.seconds))
        pss = broker.tree.pss_bytes()
    return {"pss_mib": pss / MIB, "idle_cpu_percent": idle * 100}


def _connections(context: Context, count: int = IDLE_CONNECTIONS) -> dict[str, float]:
    allow_files(count + 100)
    with context.source.broker() as broker:
        with broker.connect() as connection:
            connection.ask(wire.api_versions())
        time.sleep(SETTLE_S)
        before = broker.tree.pss_bytes()
        connections = [broker.connect() for _ in range(count)]
        try:
            # A connection that has spoken once, as every real one has.
            for connection in connections:
                connection.ask(wire.api_versions())
            time.sleep(SETTLE_S)
            pss = broker.tree.pss_bytes()
            idle = broker.tree.idle_share(2.0)
        finally:
            for connection in connections:
                _reset(connection)
    return {
        "kib_per_connection": (pss - before) / count / 1024,
        "pss_mib": pss / MIB,
        "idle_cpu_percent": idle * 100,
    }


def _reset(connection: wire.Connection) -> None:
    # No TIME_WAIT: two thousand of them a round would use up the ports.
    with socket.socket(fileno=socket.dup(connection.fileno())) as twin:
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def _topics(context: Context) -> dict[str, float]:
    """Measure what topics take, and what is left of that when they are deleted."""
    with context.source.broker() as broker, broker.connect() as connection:

        def settled() -> int:
            time.sleep(STARTED_S)  # all processes have read the metadata log by then
            return broker.tree.pss_bytes()

        connection.create_topic("another")
        before = settled()
        names = [f"topic-{number}" for number in range(TOPICS)]
        connection.ask(wire.create_topics(names))
        connection.end_offset(names[-1], 0)
        made = settled()
        connection.ask(wire.delete_topics(names))
        deleted = settled()
    return {
        "kib_per_topic": (made - before) / TOPICS / 1024,
        "kept_kib_per_topic": (deleted - before) / TOPICS / 1024,
        "pss_mib": deleted / MIB,
    }


CASES: Final = [
    Case("start/first-answer", _first_answer, starts_brokers=True),
    Case("idle/memory", _memory, starts_brokers=True),
    Case("idle/2000-connections", _connections, starts_brokers=True),
    Case(
        "idle/10000-connections",
        partial(_connections, count=MANY_CONNECTIONS),
        starts_brokers=True,
    ),
    Case("idle/10000-topics", _topics, starts_brokers=True),
]
