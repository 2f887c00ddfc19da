"""Does a request cost the same among many partitions, or many connections?"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Final

from tests.bench import wire
from tests.bench.brokers import Broker
from tests.bench.cases import Case, Context
from tests.bench.load import Template, run_load, same_as
from tests.bench.small_requests import api_versions, produce_templates

FEW_CONNECTIONS: Final = 16
MANY_CONNECTIONS: Final = 2000
MANY_PARTITIONS: Final = 1000


def _cpu_us(context: Context, templates: list[Template], connections: int) -> float:
    broker = context.broker
    result = run_load(
        broker.address,
        broker.tree,
        templates,
        connections=connections,
        measure_s=context.seconds,
    )
    return result.metrics()["cpu_us"]


def _produce(broker: Broker, partitions: int) -> list[Template]:
    topic = broker.topic(f"bench-flat-{partitions}", partitions)
    return broker.once(
        f"flat produce {partitions}",
        lambda: _touched(broker, produce_templates(topic, partitions, acks=1)),
    )


def _touched(broker: Broker, templates: list[Template]) -> list[Template]:
    # The first touch opens files; the question is what the thousandth costs.
    with broker.connect() as connection:
        for template in templates:
            connection.ask(template.request)
    return templates


def _fetch(broker: Broker, partitions: int) -> list[Template]:
    _produce(broker, partitions)
    topic = broker.topic(f"bench-flat-{partitions}", partitions)

    def ask() -> list[Template]:
        templates = []
        with broker.connect() as connection:
            for partition in range(partitions):
                # Room for the first batch only: later produces must not change it.
                request = wire.fetch(topic, partition, 0, max_bytes=180)
                answer = connection.ask(request)
                template = same_as(request, answer)
                error = (wire.fetch_error_at(topic), b"\0\0")
                templates.append(template._replace(checks=(error,)))
        return templates

    return broker.once(f"flat fetch {partitions}", ask)


def _over_partitions(
    templates: Callable[[Broker, int], list[Template]],
) -> Callable[[Context], dict[str, float]]:
    def run(context: Context) -> dict[str, float]:
        one = _cpu_us(context, templates(context.broker, 1), FEW_CONNECTIONS)
        many = _cpu_us(
            context, templates(context.broker, MANY_PARTITIONS), FEW_CONNECTIONS
        )
        return {"cpu_us": many, "cpu_ratio": many / one}

    return run


def _over_connections(
    templates: Callable[[Broker], list[Template]],
) -> Callable[[Context], dict[str, float]]:
    def run(context: Context) -> dict[str, float]:
        allow_files(MANY_CONNECTIONS + 100)
        prepared = templates(context.broker)
        few = _cpu_us(context, prepared, FEW_CONNECTIONS)
        many = _cpu_us(context, prepared, MANY_CONNECTIONS)
        return {"cpu_us": many, "cpu_ratio": many / few}

    return run


def allow_files(count: int) -> None:
    """Raise this process's limit of open files, and so its children's, to `count`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


CASES: Final = [
    Case("flatness/produce/1000-partitions", _over_partitions(_produce)),
    Case("flatness/fetch/1000-partitions", _over_partitions(_fetch)),
    Case("flatness/api-versions/2000-connections", _over_connections(api_versions)),
    Case(
        "flatness/produce/2000-connections",
        _over_connections(lambda broker: _produce(broker, 1)),
    ),
]
