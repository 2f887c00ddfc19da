"""Run tests many times on a busy machine: does load fail them? scripts/deflake TEST...

Twenty runs, four at a time, each a pytest process with a seed of its own, beside two
loops that do nothing but keep cores busy. A test that starts a process has to pass all
of them before it is committed. What fails is shown with its seed; the exit code is 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from tests.gate.__main__ import DIE_WITH_US
from tests.support.pressure import Reading

_TAIL_LINES: Final = 60


class Run(NamedTuple):
    """One run of the tests: its seed, pytest's exit code, what it printed."""

    seed: int
    exit_code: int
    said: str


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile."""
    command = [*DIE_WITH_US, sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(loops):
            loop = stack.enter_context(subprocess.Popen(command))
            stack.callback(loop.kill)
        yield


def run_once(pytest_arguments: Sequence[str], seed: int) -> Run:
    """Run the tests once, in one process."""
    done = subprocess.run(
        [
            *(*DIE_WITH_US, sys.executable, "-m", "pytest", "-n", "0", "-q"),
            *(f"--randomly-seed={seed}", *pytest_arguments),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return Run(seed, done.returncode, done.stdout)


def main(arguments: Sequence[str]) -> int:
    """Run the tests as often as wanted; return 0 if all runs passed."""
    parser = argparse.ArgumentParser(
        prog="scripts/deflake", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--busy", type=int, default=2, help="busy loops beside")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    ours, pytests = parser.parse_known_args(arguments)
    if not pytests:
        parser.error("name the tests")
    began = Reading.now()
    seeds = range(ours.seed, ours.seed + ours.runs)
    with busy(ours.busy), concurrent.futures.ThreadPoolExecutor(ours.workers) as pool:
        futures = [pool.submit(run_once, pytests, seed) for seed in seeds]
        failed = []
        for future in concurrent.futures.as_completed(futures):
            run = future.result()
            print("F" if run.exit_code else ".", end="", flush=True)
            if run.exit_code:
                failed.append(run)
    print()
    for run in failed:
        print(f"---- seed {run.seed}: exit code {run.exit_code}")
        print("\n".join(run.said.splitlines()[-_TAIL_LINES:]))
    load = Reading.now().since(began)
    print(f"{ours.runs - len(failed)} passed, {len(failed)} failed ({load})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
