"""What it costs that any process may be killed: this broker, and one without all that.

The other one runs from a copy of the sources in which `CUTS` have taken away what only
a successor, a repair or the supervisor's watch would ever read. It serves as well, as
long as nobody dies. Both copies' compiled core is built here, with the same flags.

What is cut: the robustness of the mutexes; the states of slots on the rings, and those
of connections with their two copies of both streams' positions; what an append intends
and has done of its request; what a handler is busy with, and its black box; the steps
at which tests die; duplicates of sockets with the keeper, whose epoll the kernel looks
into whenever something arrives; leases and fences.

What is not, because it has another use as well: the two copies of a partition's state
(who fetches takes no lock), the generation of a slot (extents are freed by it), time
stamps (metrics), and that requests lie in shared memory at all, which is how processes
speak to each other. A connection's and a process's begin and end are not in it either,
and nothing is said of the pure Python twins.

CPU a request is compared, in many short runs of both at the same time: a machine whose
speed changes from one moment to the next is the same machine for both then. A pair
counts if both did about as much. What is given is the median of the pairs, and the
quartiles beside it. Two unchanged brokers (`machinery/nothing`) show how much of that
is noise. More priority than others have helps: `nice -n -15 scripts/bench machinery`.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tests.bench import wire
from tests.bench.brokers import (
    Broker,
    BrokerStartError,
    CheckoutBroker,
    scratch_directory,
)
from tests.bench.cases import Case, Context
from tests.bench.load import NoAnswerError, Template, run_load, same_as
from tests.bench.small_requests import KINDS

CHECKOUT: Final = Path(__file__).parents[2]
_CONNECTIONS: Final = 16
_PAIRS: Final = 60
_ATTEMPTS: Final = 240
_SHARE: Final = 1 / 3  # of --seconds, each run
_ALIKE: Final = 0.8
_VALUE_BYTES: Final = 1024


class Cut(NamedTuple):
    """A piece of source, there exactly once, and what stands there without it."""

    path: str  # below the package
    text: str
    instead: str = ""


def _statements(path: str, *texts: str) -> list[Cut]:
    return [Cut(path, text) for text in texts]


CUTS: Final = (
    # -- locks: no list of those that a thread holds, for the kernel to walk
    Cut(
        "ipc/robust_mutex.py",
        "_pthread.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST)",
        "pass",
    ),
    Cut(
        "native/base/steps.h",
        "if (counts_steps && ++steps_done == step_to_die_at)",
        "if (0)",
    ),
    # -- rings: whose a request is
    *_statements(
        "native/ipc/ring.c",
        "set_slot_state(control, slots[i], L.STATE_READY);",
        "set_slot_state(control, taken[i], claimed);",
        "set_slot_state(control, load(control, entry(r, position)),"
        " L.STATE_RESPONDING);",
    ),
    # -- connections: where each is in both streams
    Cut(
        "native/network/processor_end.c",
        "for (int i = 0; i < CLEARED_WORDS; i++)\n"
        "        store(control, row + L.SLOT_INTENT + i, 0);",
        "store(control, row + L.SLOT_INTENT + 2, 0); /* progress */\n"
        "    store(control, row + L.SLOT_INTENT + 9, 0); /* session claim */\n"
        "    store(control, row + L.SLOT_INTENT + 10, 0); /* deadline */",
    ),
    *_statements(
        "native/network/processor_end.c",
        "store(control, n->row + L.CONNECTION_STATE,\n"
        "          (state & ~L.STATE_MASK) | L.CONNECTION_IN_FLIGHT);",
        "store(control, copy + L.CONNECTION_POSITION,"
        " n->base << L.POSITION_SHIFT | n->start);",
        "store(control, copy + L.CONNECTION_SENT, n->sent);",
        "store(control, n->row + L.CONNECTION_STATE,\n"
        "          (state & ~L.STATE_MASK) | L.CONNECTION_READING);",
        "set_slot_state(&self->control, n->slot, L.STATE_HELD);",
    ),
    # -- appends: what is intended, and what of the request is done
    Cut(
        "native/server/produce.c",
        "p->progress = find_progress(self, slot, p->partition_count);\n"
        "    return p->progress >= 0;",
        "return 1;",
    ),
    *_statements(
        "native/server/produce.c",
        "store(control, words + L.SLOT_INTENT_BASE, r->state[END_OFFSET]);",
        "store(control, words + L.SLOT_INTENT,"
        " (int64_t)(ordinal + 1) << 32 | (r->row + 1));",
        "store(r->rows, row_at(r->row) + L.ROW_INTENT, slot + 1);",
        "store(&self->arena, progress + ordinal, base_offset);",
        "store(control, words + L.SLOT_PROGRESS, ordinal + 1);",
        "store(control, words + L.SLOT_INTENT, 0);",
        "store(r->rows, row_at(r->row) + L.ROW_INTENT, 0);",
    ),
    # -- handlers: what each is at, and its black box
    *_statements(
        "server/request_handler.py",
        "words[row + HANDLER_BUSY_SINCE] = started\n",
        "                words[row + HANDLER_BUSY_SLOT] = slot + 1\n",
        "            if api_key != current:\n"
        "                if alike:\n"
        "                    totals[requests + current] += alike\n"
        "                    totals[spent + current] += before - since\n"
        "                current, alike, since = api_key, 0, before\n"
        "            alike += 1\n",
        "        totals[requests + current] += alike\n"
        "        totals[spent + current] += before - since\n",
    ),
    Cut(
        "server/request_handler.py",
        "        words[row + HANDLER_BUSY_SLOT] = 0\n"
        "        words[row + HANDLER_COUNTERS",
        "        words[row + HANDLER_COUNTERS",
    ),
    *_statements(
        "native/server/handler_wait.c",
        "store(&self->control, self->handler_row + L.HANDLER_BUSY_SINCE, now);",
        "store(&self->control, self->handler_row + L.HANDLER_BUSY_SLOT, slot + 1);",
    ),
    # -- who watches: the keeper, leases, fences
    Cut(
        "network/moves/keeper.py",
        "for fd in fds:\n                cookie, is_new = self._keep(fd)",
        "while fds:\n                os.close(fds.pop())\n"
        "                continue\n                cookie, is_new = 0, False",
    ),
    Cut(
        "supervisor/repair/leases.py",
        "self._owner.every(INTERVAL_S, self.check)",
        "pass",
    ),
    Cut(
        "supervisor/repair/canaries.py",
        "self._owner.every(INTERVAL_S, self.check)",
        "pass",
    ),
)


def apply_cuts(package: Path) -> None:
    """Cut the sources below a directory.

    Raises:
        ValueError: a piece is not there, or more than once: the sources have changed,
            and `CUTS` has to follow.
    """
    for cut in CUTS:
        path = package / cut.path
        source = path.read_text()
        if source.count(cut.text) != 1:
            raise ValueError(f"{cut.path} has not exactly one {cut.text!r}")
        path.write_text(source.replace(cut.text, cut.instead))


@contextlib.contextmanager
def copy_of_sources(*, is_cut: bool) -> Iterator[Path]:
    """Yield a directory with the sources and a core of their own.

    Raises:
        BrokerStartError: the core cannot be built.
    """
    with scratch_directory() as directory:
        package = directory / "mpbroker"
        left_out = shutil.ignore_patterns("__pycache__", "_core*.so")
        shutil.copytree(CHECKOUT / "mpbroker", package, ignore=left_out)
        if is_cut:
            apply_cuts(package)
        _build_core(package)
        yield directory


def _build_core(package: Path) -> None:
    native = package / "native"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BrokerStartError("machinery: a C compiler is needed")
    done = subprocess.run(
        [
            *(compiler, "-shared", "-fPIC", "-O3", "-DNDEBUG", "-fwrapv"),
            *("-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden"),
            *(f"-I{sysconfig.get_path('include')}", f"-I{native}"),
            *("-o", native / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"),
            *(native / "_core.c", *sorted(native.glob("*/[!_]*.c"))),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BrokerStartError(f"machinery: the core does not build:\n{done.stderr}")


def fetch_1_kib(broker: Broker) -> list[Template]:
    topic = broker.topic("bench-machinery-fetch")
    batch = wire.record_batch([wire.RecordSpec(wire.filler(_VALUE_BYTES))])
    with broker.connect() as connection:
        connection.ask(wire.produce(topic, 0, batch))
        request = wire.fetch(topic, 0, 0, max_bytes=4096)
        template = same_as(request, connection.ask(request))
    if template.exact_size < _VALUE_BYTES:
        raise wire.AnswerError(f"a fetch answer of {template.exact_size} bytes")
    return [template]


def costs_percent(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """How much of the throughput each pair of CPU times a request says it costs."""
    return [100 * (1 - without / with_it) for with_it, without in pairs]


class Run(NamedTuple):
    """What one broker did while the other did the same."""

    answered: int
    cpu_s: float

    @property
    def cpu_us(self) -> float:
        return self.cpu_s / self.answered * 1e6


def is_fair(one: Run, other: Run) -> bool:
    """Neither stood still while the other went on."""
    return min(one.answered, other.answered) >= _ALIKE * max(
        one.answered, other.answered
    )


def together(
    brokers: Sequence[tuple[Broker, list[Template]]], seconds: float
) -> list[Run] | None:
    """Load both at the same time; None: one of them was not answered at all.

    All of the run counts, and both readings are taken outside of it: so it does no harm
    where this process comes late.
    """

    def load(broker: Broker, templates: list[Template]) -> Run:
        before = broker.tree.cpu_seconds()
        result = run_load(
            broker.address,
            broker.tree,
            templates,
            connections=_CONNECTIONS,
            warmup_s=0.0,
            measure_s=seconds,
        )
        return Run(result.answered, broker.tree.cpu_seconds() - before)

    with ThreadPoolExecutor(len(brokers)) as pool:
        runs = [pool.submit(load, *each) for each in brokers]
        try:
            return [run.result() for run in runs]
        except NoAnswerError:
            return None


def compare(
    one: Broker,
    other: Broker,
    prepare: Callable[[Broker], list[Template]],
    seconds: float,
) -> list[tuple[float, float]]:
    """Return the CPU a request of both, us, in each fair pair of runs.

    Raises:
        BrokerStartError: there are not enough of them.
    """
    pairs: list[tuple[float, float]] = []
    brokers = [(each, prepare(each)) for each in (one, other)]
    together(brokers, seconds)  # what they touch for the first time
    for attempt in range(_ATTEMPTS):
        # Who is first this time is second the next.
        turn = -1 if attempt % 2 else 1
        runs = together(brokers[::turn], seconds * _SHARE)
        if runs is not None and is_fair(*runs):
            with_it, without = runs[::turn]
            pairs.append((with_it.cpu_us, without.cpu_us))
        if len(pairs) == _PAIRS:
            break
    if len(pairs) < 2:
        raise BrokerStartError("this machine stands still all the time")
    return pairs


def figures_of(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """What is given of the pairs: medians, and quartiles of the cost."""
    low, middle, high = statistics.quantiles(costs_percent(pairs), n=4)
    return {
        "cpu_us": statistics.median(each for each, _ in pairs),
        "bare_cpu_us": statistics.median(each for _, each in pairs),
        "cost_percent": middle,
        "cost_low_percent": low,
        "cost_high_percent": high,
        "pairs": len(pairs),
    }


def _case(name: str, prepare: Callable[[Broker], list[Template]], cut: bool) -> Case:
    def run(context: Context) -> dict[str, float]:
        with (
            copy_of_sources(is_cut=False) as whole,
            copy_of_sources(is_cut=cut) as other,
            CheckoutBroker(whole).broker() as protected,
            CheckoutBroker(other).broker() as bare,
        ):
            pairs = compare(protected, bare, prepare, context.seconds)
        return figures_of(pairs)

    return Case(f"machinery/{name}/{_CONNECTIONS}", run, starts_brokers=True)


CASES: Final = [
    _case("produce-acks1", KINDS["produce-acks1"], cut=True),
    _case("api-versions", KINDS["api-versions"], cut=True),
    _case("fetch-1KiB", fetch_1_kib, cut=True),
    _case("nothing", KINDS["api-versions"], cut=False),
]
