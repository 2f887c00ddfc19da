"""Pre-encoded 1 MiB produces and fetches: what the byte path itself can carry.

Beside each the same bytes' way without a broker, in the same run and on the same file
system: what the machine could do at most just then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.bench import wire
from tests.bench.brokers import Broker, scratch_directory
from tests.bench.byte_path import Bound, fetch_bound, produce_bound
from tests.bench.cases import Case, Context
from tests.bench.load import LoadResult, Template, run_load

MIB: Final = 1 << 20
CONNECTIONS: Final = 8
STORED_BATCHES: Final = 64
# Kafka refuses a batch above max.message.bytes, whose default is just over 1 MiB. The
# small retention keeps a long run from filling the disk.
TOPIC: Final = {
    "max.message.bytes": str(2 * MIB),
    "segment.bytes": str(256 * MIB),
    "retention.bytes": str(512 * MIB),
}


def _batch() -> bytes:
    return wire.batch_of_size(MIB)


def _measure(context: Context, templates: list[Template]) -> LoadResult:
    broker = context.broker
    return run_load(
        broker.address,
        broker.tree,
        templates,
        connections=CONNECTIONS,
        measure_s=context.seconds,
    )


def _figures(result: LoadResult, answer_bytes: float, bound: Bound) -> dict[str, float]:
    return result.metrics() | {
        "mb_per_s": result.answered * answer_bytes / result.seconds / 1e6,
        "bound_mb_per_s": bound.mb_per_s,
        "bound_cpu_us": bound.cpu_us,
    }


def _bound(measure: Callable[[Path, float], Bound], context: Context) -> Bound:
    with scratch_directory() as directory:
        return measure(directory, context.seconds)


def _produce(context: Context) -> dict[str, float]:
    topic = context.broker.topic("bench-large-produce", 1, TOPIC)
    batch = context.broker.once("1 MiB batch", _batch)
    ok = ((wire.produce_error_at(topic), b"\0\0"),)
    result = _measure(context, [Template(wire.produce(topic, 0, batch), checks=ok)])
    return _figures(result, len(batch), _bound(produce_bound, context))


def _fill(broker: Broker) -> list[Template]:
    topic = broker.topic("bench-large-fetch", 1, TOPIC | {"retention.bytes": "-1"})
    batch = broker.once("1 MiB batch", _batch)
    offsets = []
    with broker.connect() as connection:
        for _ in range(STORED_BATCHES):
            answer = wire.parse_produce(connection.ask(wire.produce(topic, 0, batch)))
            if answer.error_code:
                raise wire.AnswerError(f"produce: error {answer.error_code}")
            offsets.append(answer.base_offset)
        # One batch and not a byte of the next, so that every answer has one size.
        exact = [
            wire.fetch(topic, 0, offset, max_bytes=len(batch)) for offset in offsets
        ]
        for request in exact:
            got = wire.parse_fetch(connection.ask(request)).records
            if got[61:] != batch[61:]:
                raise wire.AnswerError("a fetch gave other bytes than were produced")
    ok = ((wire.fetch_error_at(topic), b"\0\0"),)
    return [Template(r, least_size=len(batch), checks=ok) for r in exact]


def _fetch(context: Context) -> dict[str, float]:
    broker = context.broker
    templates = broker.once("large fetch", lambda: _fill(broker))
    result = _measure(context, templates)
    size = result.received_bytes / result.answered
    return _figures(result, size, _bound(fetch_bound, context))


CASES: Final = [
    Case("large/produce-1MiB", _produce),
    Case("large/fetch-1MiB", _fetch),
]
