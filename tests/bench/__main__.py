"""Measure a broker, or two of them in turn: see `scripts/bench --help`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.bench import (
    authorization,
    client_throughput,
    cluster_commits,
    cluster_deaths,
    cluster_topics,
    console,
    control_plane,
    everything,
    flatness,
    groups,
    idle,
    large_requests,
    latency,
    machinery,
    mirroring,
    pytest_fixture,
    python_consumers,
    python_producers,
    quotas,
    share_consumers,
    share_groups,
    small_requests,
    tiered_storage,
    tls,
    transactions,
)
from tests.bench.brokers import (
    SCRATCH_VARIABLE,
    Broker,
    BrokerSource,
    BrokerStartError,
    CheckoutBroker,
    CommandBroker,
    RunningBroker,
)
from tests.bench.cases import Case, Context
from tests.bench.kafka import KafkaBroker
from tests.bench.load import LoadFailedError, generator_command
from tests.bench.processes import Bystanders
from tests.bench.rdkafka import RdKafkaError
from tests.bench.report import OTHERS_CORES, CaseResult, heading, machine, save
from tests.bench.wire import AnswerError

CHECKOUT: Final = Path(__file__).parents[2]
ALL_CASES: Final = [
    *idle.CASES,
    *console.CASES,
    *control_plane.CASES,
    *small_requests.CASES,
    *quotas.CASES,
    *authorization.CASES,
    *machinery.CASES,
    *everything.CASES,
    *client_throughput.CASES,
    *large_requests.CASES,
    *latency.CASES,
    *python_producers.CASES,
    *python_consumers.CASES,
    *pytest_fixture.CASES,
    *flatness.CASES,
    *groups.CASES,
    *share_groups.CASES,
    *share_consumers.CASES,
    *transactions.CASES,
    *tls.CASES,
    *cluster_commits.CASES,
    *cluster_topics.CASES,
    *cluster_deaths.CASES,
    *mirroring.CASES,
    *tiered_storage.CASES,
]

# What ends a run of a case; the others go on.
FAILURES: Final = (
    AnswerError,
    BrokerStartError,
    LoadFailedError,
    OSError,
    RdKafkaError,
)

EPILOG: Final = """\
A NAME selects every case that starts with it: `requests`, `requests/produce-acks1/16`.
Rates on a shared machine swing; compare CPU a request, summed over the broker's
processes, of runs that alternate (--vs...). The exit code is 1 if a broker failed.

  scripts/bench                                          every case, this checkout
  scripts/bench requests latency --seconds 3
  scripts/bench requests --vs-checkout ../other          another checkout of mpbroker
  scripts/bench spark --rows 800000                      Spark and its own connector
  scripts/bench spark lake                               lakes on a disk and on S3
  scripts/bench --vs 127.0.0.1:9092                      a broker that runs already
  scripts/bench --vs-command 'kfake -l 127.0.0.1:{port}' any other
"""


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases to run")
    parser.add_argument("--list", action="store_true", help="name the cases and exit")
    parser.add_argument(
        "--broker", metavar="HOST:PORT", help="measure this one, not ours"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the broker that is started from this checkout",
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--vs", metavar="HOST:PORT", help="compare with a running one")
    other.add_argument(
        "--vs-command",
        metavar="COMMAND",
        help="start this and compare; {port} and {dir} are filled in",
    )
    other.add_argument(
        "--vs-kafka",
        action="store_true",
        help="compare with Apache Kafka, after its warm-up",
    )
    other.add_argument(
        "--vs-checkout", metavar="DIR", type=Path, help="compare with this checkout"
    )
    other.add_argument(
        "--vs-set",
        action="append",
        metavar="KEY=VALUE",
        help="compare with this checkout under another setting",
    )
    parser.add_argument(
        "--rounds", type=int, help="runs of each case (1; 3 with two brokers)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="length of a measurement (1.5)"
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="so long Apache Kafka is at work with the same cases before the first is "
        "measured, until its JVM has compiled what they need (60)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait and repeat so long a run for other processes to be quiet (0)",
    )
    parser.add_argument(
        "--dir",
        metavar="DIR",
        type=Path,
        help="where brokers started here keep their logs: a memory file system shows "
        "what the broker can do, a disk what the disk can",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all runs here")
    return parser.parse_args(argv)


def _sources(arguments: argparse.Namespace) -> list[BrokerSource]:
    sources: list[BrokerSource] = [
        _by_address(arguments.broker)
        if arguments.broker
        else CheckoutBroker(CHECKOUT, settings=tuple(arguments.set))
    ]
    if arguments.vs:
        sources.append(RunningBroker(arguments.vs))
    elif arguments.vs_command:
        sources.append(CommandBroker(arguments.vs_command))
    elif arguments.vs_kafka:
        sources.append(KafkaBroker())
    elif arguments.vs_checkout:
        label = arguments.vs_checkout.resolve().name
        sources.append(
            CheckoutBroker(arguments.vs_checkout, label, tuple(arguments.set))
        )
    elif arguments.vs_set:
        settings = (*arguments.set, *arguments.vs_set)
        sources.append(CheckoutBroker(CHECKOUT, ",".join(arguments.vs_set), settings))
    if len({source.label for source in sources}) < len(sources):
        sources[1].label += " (2)"
    return sources


def _by_address(text: str) -> BrokerSource:
    return KafkaBroker() if text == "kafka" else RunningBroker(text)


def _selected(names: Sequence[str]) -> list[Case]:
    cases = [c for c in ALL_CASES if not names or any(map(c.name.startswith, names))]
    if not cases:
        raise SystemExit(f"no case starts with any of {' '.join(names)}; see --list")
    return cases


class _Session:
    """The brokers under measurement, started when the first case needs them."""

    def __init__(
        self, sources: Sequence[BrokerSource], seconds: float, patience_s: float
    ) -> None:
        self._sources = sources
        self._seconds = seconds
        self._patience_s = patience_s
        self._stack = contextlib.ExitStack()
        self._brokers: dict[str, Broker] = {}
        self.failures: list[str] = []

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def warm_up(self, cases: Sequence[Case], seconds: float) -> None:
        """Run the cases, each at least once, on brokers that get faster by it.

        A case that fails is left out here; the measurement says why.
        """
        for source in self._sources:
            if not source.warms_up or seconds <= 0:
                continue
            began = time.monotonic()
            left = deque(case for case in cases if not case.starts_brokers)
            owed = len(left)
            while left and (owed > 0 or time.monotonic() - began < seconds):
                owed -= 1
                case = left.popleft()
                with contextlib.suppress(*FAILURES):
                    case.run(self._context(source, case))
                    left.append(case)
            took_s = time.monotonic() - began
            print(f"{source.label} was at work with these cases for {took_s:.0f} s")

    def run(self, case: Case, rounds: int) -> CaseResult:
        """Run a case on every broker in turn, `rounds` times: A B A B."""
        runs: dict[str, list[dict[str, float]]] = {s.label: [] for s in self._sources}
        others = 0.0
        for _ in range(rounds):
            for source in self._sources:
                if case.starts_brokers and not source.can_start:
                    continue
                try:
                    figures, cores = self._run_undisturbed(source, case)
                    runs[source.label].append(figures)
                    others = max(others, cores)
                except FAILURES as error:
                    failure = f"{case.name} on {source.label}: {error}"
                    self.failures.append(failure)
                    print(f"    FAILED {failure}", file=sys.stderr)
        return CaseResult(case.name, runs, others)

    def _run_undisturbed(
        self, source: BrokerSource, case: Case
    ) -> tuple[dict[str, float], float]:
        """Run again, while our patience lasts, if other processes took part.

        Returns:
            The figures of the least disturbed run, and the others' cores during it.
        """
        deadline = time.monotonic() + self._patience_s
        best: tuple[dict[str, float], float] | None = None
        while True:
            context = self._context(source, case)
            while time.monotonic() < deadline:
                if self._others_now() <= OTHERS_CORES:
                    break
            bystanders = self._bystanders()
            figures = case.run(context)
            cores = bystanders.cores()
            if best is None or cores < best[1]:
                best = figures, cores
            if cores <= OTHERS_CORES or time.monotonic() >= deadline:
                return best

    def _bystanders(self) -> Bystanders:
        return Bystanders(broker.tree for broker in self._brokers.values())

    def _others_now(self) -> float:
        bystanders = self._bystanders()
        time.sleep(0.2)
        return bystanders.cores()

    def _context(self, source: BrokerSource, case: Case) -> Context:
        if case.starts_brokers:
            return Context(None, source, self._seconds)
        if source.label not in self._brokers:
            broker = self._stack.enter_context(source.broker())
            self._brokers[source.label] = broker
        return Context(self._brokers[source.label], source, self._seconds)


def main(argv: Sequence[str]) -> int:
    """Run the selected cases and print them; return the exit code."""
    if argv[:1] == ["spark"]:
        # With options of its own, and Spark and Java, which others do without.
        if argv[1:2] == ["lake"]:
            from tests.bench import spark_lake

            spark_lake.main(argv[2:])
            return 0
        from tests.bench import spark_read

        spark_read.main(argv[1:])
        return 0
    arguments = _arguments(argv)
    cases = _selected(arguments.names)
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return 0
    if arguments.dir:
        os.environ[SCRATCH_VARIABLE] = str(arguments.dir.resolve(strict=True))
    sources = _sources(arguments)
    rounds = arguments.rounds or (3 if len(sources) > 1 else 1)
    print(", ".join(f"{key}: {value}" for key, value in machine().items()))
    print(f"load generator: {' '.join(generator_command())}")
    print(heading([source.label for source in sources]))
    results = []
    began = time.monotonic()
    with _Session(sources, arguments.seconds, arguments.patience) as session:
        session.warm_up(cases, arguments.warm_up)
        for case in cases:
            print(case.name, flush=True)
            results.append(session.run(case, rounds))
            for line in results[-1].lines():
                print(line, flush=True)
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s")
    missed = [line for result in results for line in result.missed()]
    if missed:
        print("\nNot reached:", *missed, sep="\n  ")
    if session.failures:
        print("\nFailed:", *session.failures, sep="\n  ")
    if arguments.json:
        save(arguments.json, results)
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
