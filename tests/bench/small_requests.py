"""Small synchronous requests: rate, broker CPU a request, latency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.bench import wire
from tests.bench.brokers import Broker
from tests.bench.cases import Case, Context
from tests.bench.load import Template, run_load, same_as

CONNECTIONS: Final = (1, 16, 64, 256)
VALUE_BYTES: Final = 100
SEVERAL: Final = 8  # partitions of one request

Templates = Callable[[Broker], list[Template]]


def api_versions(broker: Broker) -> list[Template]:
    # Not the whole answer: Apache Kafka's ends in an epoch that moves.
    template = _asked_once(broker, wire.api_versions())
    ((at, answer),) = template.checks
    return [template._replace(checks=((at, answer[:100]),))]


def _asked_once(broker: Broker, request: bytes) -> Template:
    with broker.connect() as connection:
        return same_as(request, connection.ask(request))


def produce_templates(topic: str, partitions: int, acks: int) -> list[Template]:
    """Return a one-record Produce for every partition of a topic."""
    batch = wire.record_batch([wire.RecordSpec(wire.filler(VALUE_BYTES))])
    ok = ((wire.produce_error_at(topic), b"\0\0"),)
    return [
        Template(wire.produce(topic, p, batch, acks), checks=ok)
        for p in range(partitions)
    ]


def produce_acks_1(broker: Broker) -> list[Template]:
    return produce_templates(broker.topic("bench-produce-1"), 1, acks=1)


def produce_acks_all(broker: Broker) -> list[Template]:
    return produce_templates(broker.topic("bench-produce-all"), 1, acks=-1)


def _to_several(topic: str, value_bytes: int) -> list[Template]:
    batch = wire.record_batch([wire.RecordSpec(wire.filler(value_bytes))])
    ok = tuple((wire.produce_error_at(topic, n), b"\0\0") for n in range(SEVERAL))
    request = wire.produce_to_several(topic, [(n, batch) for n in range(SEVERAL)])
    return [Template(request, checks=ok)]


def produce_to_several(broker: Broker) -> list[Template]:
    """One request a producer's turn: a record for each of several partitions."""
    return _to_several(broker.topic("bench-produce-several", SEVERAL), VALUE_BYTES)


def produce_8_kib_to_several(broker: Broker) -> list[Template]:
    return _to_several(broker.topic("bench-produce-several-8k", SEVERAL), 8 * 1024)


def metadata_1_topic(broker: Broker) -> list[Template]:
    return [_asked_once(broker, wire.metadata([broker.topic("bench-metadata-1")]))]


def metadata_1000_partitions(broker: Broker) -> list[Template]:
    topic = broker.topic("bench-metadata-1000", 1000)
    return [_asked_once(broker, wire.metadata([topic]))]


def _one_record(broker: Broker, topic: str) -> str:
    """Return a topic of one partition that has a record from now on."""
    broker.topic(topic)
    with broker.connect() as connection:
        if not connection.end_offset(topic, 0):
            batch = wire.record_batch([wire.RecordSpec(wire.filler(VALUE_BYTES))])
            connection.ask(wire.produce(topic, 0, batch))
    return topic


def latest_offset(broker: Broker) -> list[Template]:
    topic = _one_record(broker, "bench-list-offsets")
    return [_asked_once(broker, wire.latest_offset(topic, 0))]


def find_coordinator(broker: Broker) -> list[Template]:
    return [_asked_once(broker, wire.find_coordinator("bench"))]


def small_fetch(broker: Broker) -> list[Template]:
    topic = _one_record(broker, "bench-small-fetch")
    request = wire.fetch(topic, 0, 0, max_bytes=4096)
    template = _asked_once(broker, request)
    if template.exact_size < VALUE_BYTES:
        raise wire.AnswerError(f"a fetch answer of {template.exact_size} bytes")
    return [template]


KINDS: Final[dict[str, Templates]] = {
    "api-versions": api_versions,
    "produce-acks1": produce_acks_1,
    "produce-acks-all": produce_acks_all,
    "metadata-1": metadata_1_topic,
    "metadata-1000": metadata_1000_partitions,
    "fetch": small_fetch,
}
# What clients ask for beside records; several requests of a connection are under way.
QUESTIONS: Final[dict[str, Templates]] = {
    "metadata-1": metadata_1_topic,
    "list-offsets": latest_offset,
    "find-coordinator": find_coordinator,
}
DEPTH: Final = 4


def _case(kind: str, templates: Templates, connections: int, depth: int = 1) -> Case:
    def run(context: Context) -> dict[str, float]:
        broker = context.broker
        prepared = broker.once(f"requests/{kind}", lambda: templates(broker))
        return run_load(
            broker.address,
            broker.tree,
            prepared,
            connections=connections,
            depth=depth,
            measure_s=context.seconds,
        ).metrics()

    deep = "" if depth == 1 else f"x{depth}"
    return Case(f"requests/{kind}/{connections}{deep}", run)


CASES: Final = [
    *(
        _case(kind, templates, connections)
        for kind, templates in KINDS.items()
        for connections in CONNECTIONS
    ),
    *(_case(kind, templates, 16, DEPTH) for kind, templates in QUESTIONS.items()),
    _case(f"produce-{SEVERAL}-partitions", produce_to_several, 16),
    _case(f"produce-{SEVERAL}-partitions-8KiB", produce_8_kib_to_several, 16),
]
