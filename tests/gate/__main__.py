"""Run tests so that only a fault fails them: python -m tests.gate PYTEST-ARGUMENT...

First phase: all tests, in random order, by several workers. Second phase: each test
that failed, again, alone, in a fresh process, with the same seed. A test that passes
there is reported as FLAKY, with how loaded the machine was when it failed, and does not
close the gate. A test that fails again does; so does each that broke a promise (see
tests/support/promises.py), which is not run again; so do more than ten failures.

The last lines say what failed and why, which tests were slow, and then
"N passed, N failed, N skipped". The exit code is 0 if the gate is open.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson
import pytest

from tests.gate.outcomes import Failure, Outcomes, minutes_by_folder, slowest
from tests.support.pressure import Reading

MOST_FORGIVEN: Final = 10
_REPORT_LINES: Final = 140  # of all failures together, so that 200 lines show them
_SLOWEST: Final = 20
# For fixtures to stop what they have started, when the gate is told to end.
_GOOD_ORDER_S: Final = 60.0
# Between SIGABRT, upon which Python writes its stacks, and SIGKILL.
_LAST_WORDS_S: Final = 10.0
# Logs of brokers, JVMs and data lakes at once. A run of 11,881 tests had 631 MiB; the
# rest is for tests that have come since, whose peak was not measured.
_ROOM_BYTES: Final = 2 << 30
_LEDGER: Final = Path(".pytest_cache/flaky.jsonl")
# All that is known of failures that are never forgiven: seed, traceback, logs, boxes.
_UNFORGIVEN: Final = Path(".pytest_cache/unforgiven.jsonl")
# A gate that is killed takes its tests with it (where util-linux has setpriv).
DIE_WITH_US: Final = (
    ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
)


@dataclass
class Verdict:
    """What the gate has found.

    Attributes:
        first: the first phase.
        flaky: failed beside others and passed alone.
        failed: failed for good, each with its reason.
        trouble: what else closes the gate.
    """

    first: Outcomes
    flaky: list[Failure] = field(default_factory=list)
    failed: list[tuple[Failure, str]] = field(default_factory=list)
    trouble: str = ""

    @property
    def is_open(self) -> bool:
        return not self.failed and not self.trouble


class Gate:
    """Runs the two phases.

    Args:
        seed: of the order of tests and of all that is random in them.
        limit_s: how long the first phase may take.
        alone_limit_s: how long one test of the second phase may take.
    """

    def __init__(self, seed: int, limit_s: float, alone_limit_s: float) -> None:
        self._seed = seed
        self._limit_s = limit_s
        self._alone_limit_s = alone_limit_s

    def run(self, arguments: Sequence[str]) -> Verdict:
        """Run both phases with pytest's arguments for the first one."""
        first = self._pytest(arguments, self._limit_s)
        verdict = Verdict(first, trouble=first.trouble)
        never = [each for each in first.failures.values() if each.never_forgiven]
        again = [each for each in first.failures.values() if not each.never_forgiven]
        verdict.failed += [(each, each.never_forgiven) for each in never]
        if len(again) > MOST_FORGIVEN or verdict.trouble:
            reason = "not run again"
            if len(again) > MOST_FORGIVEN:
                reason += f": {len(again)} tests failed, at most {MOST_FORGIVEN} may"
            verdict.failed += [(each, reason) for each in again]
            return verdict
        for number, failure in enumerate(again, 1):
            _say(f"again, alone ({number} of {len(again)}): {failure.name}")
            alone = self._pytest(["-n", "0", failure.name], self._alone_limit_s)
            self._judge(failure, alone, verdict)
            if alone.exit_code == pytest.ExitCode.INTERRUPTED:
                verdict.trouble = "interrupted"
                break
        return verdict

    def _judge(self, failure: Failure, alone: Outcomes, verdict: Verdict) -> None:
        if alone.exit_code == 0 and alone.is_whole and alone.counts.get("passed"):
            verdict.flaky.append(failure)
            return
        latest = alone.failures.get(failure.name, failure)
        reason = latest.never_forgiven or alone.trouble or "it fails alone, too"
        verdict.failed.append((latest, reason))

    def _pytest(self, arguments: Sequence[str], limit_s: float) -> Outcomes:
        with tempfile.TemporaryDirectory(prefix="mpbroker-gate-") as folder:
            path = Path(folder, "outcomes")
            command = [
                *DIE_WITH_US,
                *(sys.executable, "-m", "pytest"),
                *("-p", "tests.gate.plugin", f"--outcomes={path}"),
                f"--randomly-seed={self._seed}",
                *arguments,
            ]
            return Outcomes.read(path, _run(command, limit_s))


def _run(command: Sequence[str], limit_s: float) -> int:
    """Run a command in a process group of its own, and end all of it in time.

    Whoever tells the gate to end, tells the tests: they end in good order, as upon
    Ctrl-C, or are ended after a while. A process that is ended by SIGABRT writes
    Python's stacks first.
    """
    deadline = time.monotonic() + limit_s
    process: subprocess.Popen[bytes] | None = None

    def end_early(number: int, _: object) -> None:
        nonlocal deadline
        deadline = min(deadline, time.monotonic() + _GOOD_ORDER_S)
        if process is not None:
            _signal_group(process, signal.SIGINT)

    with _handling(end_early):
        # Only now: a signal with a handler here has its default action there, even if
        # it is ignored in the shell that started us, as in a background job.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(0.5)
        _say("the tests do not end in time: their stacks, and an end")
        _signal_group(process, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_S)
        _signal_group(process, signal.SIGKILL)
        process.wait()
        return -signal.SIGKILL


@contextlib.contextmanager
def _handling(handler: Callable[[int, object], None]) -> Iterator[None]:
    told = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in told}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def report(verdict: Verdict, seed: int, load: str) -> str:
    """Return the gate's last lines: times, then failures, then the counts."""
    first = verdict.first
    lines = ["", f"== the gate: seed {seed}, {load}"]
    lines.append("minutes of tests by folder, and of CPU:")
    computed = dict(minutes_by_folder(first.cpu_seconds))
    for folder, minutes in minutes_by_folder(first.seconds):
        if minutes >= 0.05:
            lines.append(f"{minutes:8.1f}{computed.get(folder, 0):8.1f}  {folder}")
    lines.append(f"the {_SLOWEST} slowest tests, in seconds, and of CPU:")
    for name, seconds in slowest(first.seconds, _SLOWEST):
        cpu_s = first.cpu_seconds.get(name, 0)
        lines.append(f"{seconds:8.1f}{cpu_s:8.1f}  {name}")
    share = _REPORT_LINES // max(1, len(verdict.failed))
    for failure, _ in verdict.failed:
        lines += _last_words(failure, max(8, share))
    for failure in verdict.flaky:
        lines.append(f"FLAKY {failure.name} (passed alone; {failure.pressure})")
    for failure, reason in verdict.failed:
        pressure = f"; {failure.pressure}" if failure.pressure else ""
        lines.append(f"FAILED {failure.name} ({reason}{pressure})")
    if verdict.trouble:
        lines.append(f"FAILED: {verdict.trouble}")
    failed = len(verdict.failed) + bool(verdict.trouble)
    passed = first.counts.get("passed", 0)
    skipped = first.counts.get("skipped", 0)
    lines.append(f"{passed} passed, {failed} failed, {skipped} skipped")
    return "\n".join(lines)


def _last_words(failure: Failure, most: int) -> list[str]:
    """Return the end of a traceback, and of a log, in so many lines together."""
    log = failure.log.splitlines()[-(most // 2) :]
    traceback = failure.traceback.splitlines()[-(most - len(log)) :]
    return [f"---- {failure.name}", *traceback, *log]


def write_ledger(verdict: Verdict, seed: int) -> None:
    """Append a line for each flaky test, and one for each that is never forgiven."""
    for failure in verdict.flaky:
        reason = failure.traceback.rpartition("\n")[2]
        _append(_LEDGER, failure, seed, {"reason": reason})
    for failure, reason in verdict.failed:
        if failure.never_forgiven:
            said = {"traceback": failure.traceback, "log": failure.log}
            _append(_UNFORGIVEN, failure, seed, {"reason": reason, **said})


def _append(path: Path, failure: Failure, seed: int, more: dict[str, str]) -> None:
    row = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "name": failure.name,
        "seed": seed,
        "pressure": failure.pressure,
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def too_full(*folders: str) -> str:
    """Return a sentence if there is too little room for tests, or an empty text."""
    for folder in folders:
        free = shutil.disk_usage(folder).free
        if free < _ROOM_BYTES:
            return (
                f"{folder} has {free >> 20} MiB free, and tests need"
                f" {_ROOM_BYTES >> 20}: make room, or set TMPDIR to another folder"
            )
    return ""


def _say(text: str) -> None:
    print(f"mpbroker: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the gate; return 0 if it is open."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gate", description="Other arguments are pytest's."
    )
    parser.add_argument("--gate-seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--gate-minutes", type=float, default=60, help="of phase 1")
    parser.add_argument(
        "--alone-minutes", type=float, default=15, help="of a test in phase 2"
    )
    parser.add_argument("--report", type=Path, help="append the last lines here, too")
    ours, pytests = parser.parse_known_args(arguments)
    if full := too_full(tempfile.gettempdir(), str(Path.cwd())):
        _say(full)
        return 1
    gate = Gate(ours.gate_seed, ours.gate_minutes * 60, ours.alone_minutes * 60)
    began = Reading.now()
    verdict = gate.run(pytests)
    text = report(verdict, ours.gate_seed, str(Reading.now().since(began)))
    write_ledger(verdict, ours.gate_seed)
    print(text, flush=True)
    if ours.report is not None:
        with ours.report.open("a") as file:
            print(text, file=file)
    return 0 if verdict.is_open else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
