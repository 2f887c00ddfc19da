"""Does a request cost the same among many partitions, or many connections?"""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable
from typing import Final

from tests.bench import wire
from tests.bench.bare_writes import BareWrites
from tests.bench.brokers import Broker, scratch_directory
from tests.bench.cases import Case, Context
from tests.bench.load import LoadFailedError, LoadResult, Template, run_load, same_as
from tests.bench.small_requests import VALUE_BYTES, api_versions, produce_templates

FEW_CONNECTIONS: Final = 16
MANY_CONNECTIONS: Final = 2000
MANY_PARTITIONS: Final = 1000
_PAIRS: Final = 5
_SHARE: Final = 1 / 3  # of --seconds, each run
_TOUCHES: Final = 40


def _load(context: Context, templates: list[Template], connections: int) -> LoadResult:
    broker = context.broker
    return run_load(
        broker.address,
        broker.tree,
        templates,
        connections=connections,
        measure_s=context.seconds * _SHARE,
    )


def _cpu_us(result: LoadResult) -> float:
    return result.metrics()["cpu_us"]


def _produce(broker: Broker, partitions: int) -> list[Template]:
    topic = broker.topic(f"bench-flat-{partitions}", partitions)
    return broker.once(
        f"flat produce {partitions}",
        lambda: _touched(broker, produce_templates(topic, partitions, acks=1)),
    )


def _touched(broker: Broker, templates: list[Template]) -> list[Template]:
    """Ask all of it often enough for every handler to have done each of it before.

    The first touch opens files, and that of an index does, some twenty requests later;
    the question is what the thousandth costs.
    """
    left = _TOUCHES * len(templates)
    while left > 0:
        left -= run_load(
            broker.address, broker.tree, templates, connections=FEW_CONNECTIONS
        ).answered
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
        return _touched(broker, templates)

    return broker.once(f"flat fetch {partitions}", ask)


class _Pairs:
    """Short runs of few and of many in turn, and what they say of each other.

    A machine whose speed changes from one moment to the next is the same machine for
    both of a pair.
    """

    def __init__(
        self, few: Callable[[], LoadResult], many: Callable[[], LoadResult]
    ) -> None:
        pairs = []
        for number in range(_PAIRS):
            # Who is first this time is second the next.
            if number % 2:
                second = many()
                first = few()
            else:
                first = few()
                second = many()
            # No CPU: we were not let run before all was over, and looked too late.
            if _cpu_us(first) > 0 and _cpu_us(second) > 0:
                pairs.append((first, second))
        if not pairs:
            raise LoadFailedError("this machine stands still all the time")
        self.few_cpu_us = statistics.median(_cpu_us(each) for each, _ in pairs)
        self.many_cpu_us = statistics.median(_cpu_us(each) for _, each in pairs)
        self.ratio = statistics.median(_cpu_us(m) / _cpu_us(f) for f, m in pairs)
        self.per_s = statistics.median(m.answered / m.seconds for _, m in pairs)

    def metrics(self) -> dict[str, float]:
        return {
            "cpu_us": self.many_cpu_us,
            "few_cpu_us": self.few_cpu_us,
            "cpu_ratio": self.ratio,
        }


def _over_partitions(
    templates: Callable[[Broker, int], list[Template]],
) -> Callable[[Context], dict[str, float]]:
    def run(context: Context) -> dict[str, float]:
        return _pairs_over_partitions(context, templates).metrics()

    return run


def _pairs_over_partitions(
    context: Context, templates: Callable[[Broker, int], list[Template]]
) -> _Pairs:
    one = templates(context.broker, 1)
    many = templates(context.broker, MANY_PARTITIONS)
    return _Pairs(
        lambda: _load(context, one, FEW_CONNECTIONS),
        lambda: _load(context, many, FEW_CONNECTIONS),
    )


def _produce_over_partitions(context: Context) -> dict[str, float]:
    """With what the kernel takes more for the same writes to as many files."""
    pairs = _pairs_over_partitions(context, _produce)
    record = wire.record_batch([wire.RecordSpec(wire.filler(VALUE_BYTES))])
    seconds = context.seconds * _SHARE
    with (
        scratch_directory() as directory,
        BareWrites(directory, 1, record) as few,
        BareWrites(directory, MANY_PARTITIONS, record) as many,
    ):
        more_us = statistics.median(
            -few.cpu_us(pairs.per_s, seconds) + many.cpu_us(pairs.per_s, seconds)
            for _ in range(_PAIRS)
        )
    return {
        **pairs.metrics(),
        "bare_more_cpu_us": more_us,
        "own_cpu_ratio": pairs.ratio - more_us / pairs.few_cpu_us,
    }


def _over_connections(
    templates: Callable[[Broker], list[Template]],
) -> Callable[[Context], dict[str, float]]:
    def run(context: Context) -> dict[str, float]:
        allow_files(MANY_CONNECTIONS + 100)
        prepared = templates(context.broker)
        return _Pairs(
            lambda: _load(context, prepared, FEW_CONNECTIONS),
            lambda: _load(context, prepared, MANY_CONNECTIONS),
        ).metrics()

    return run


def allow_files(count: int) -> None:
    """Raise this process's limit of open files, and so its children's, to `count`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


CASES: Final = [
    Case("flatness/produce/1000-partitions", _produce_over_partitions),
    Case("flatness/fetch/1000-partitions", _over_partitions(_fetch)),
    Case("flatness/api-versions/2000-connections", _over_connections(api_versions)),
    Case(
        "flatness/produce/2000-connections",
        _over_connections(lambda broker: _produce(broker, 1)),
    ),
]
