"""A broker that gets faster by work works at all cases before the first one counts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tests.bench.__main__ import _Session
from tests.bench.brokers import Broker, BrokerSource
from tests.bench.cases import Case, Context
from tests.bench.wire import AnswerError


class _Source(BrokerSource):
    def __init__(self, label: str, *, warms_up: bool) -> None:
        self.label = label
        self.warms_up = warms_up

    @contextlib.contextmanager
    def broker(self) -> Iterator[Broker]:
        yield Broker(self.label, ("127.0.0.1", 0), os.getpid())


def test_a_jvm_is_at_work_with_each_case_before_it_is_measured() -> None:
    ran: list[tuple[str, str]] = []

    def case(name: str, *, fails: bool = False, starts_brokers: bool = False) -> Case:
        def run(context: Context) -> dict[str, float]:
            ran.append((name, context.source.label))
            if fails:
                raise AnswerError("not this one")
            return {}

        return Case(name, run, starts_brokers)

    cases = [
        case("fails", fails=True),
        case("a"),
        case("start", starts_brokers=True),
        case("b"),
    ]
    sources = [_Source("ours", warms_up=False), _Source("kafka", warms_up=True)]
    with _Session(sources, 1.0, 0.0) as session:
        session.warm_up(cases, 0)
        assert ran == []
        session.warm_up(cases, 1e-9)
        assert ran == [("fails", "kafka"), ("a", "kafka"), ("b", "kafka")]
        ran.clear()
        session.warm_up(cases, 0.01)
        assert set(ran[3:]) == {("a", "kafka"), ("b", "kafka")}
