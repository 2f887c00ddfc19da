"""A pytest plug-in that writes down what the gate has to know: --outcomes FILE.

The file has a JSON object a line: one for each failure, when it happens, and a summary
when the session ends. A session that was cut off has no summary.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson
import pytest

from tests.support.pressure import Reading
from tests.support.promises import UnforgivableError

# How xdist reports the test during which a worker's process has died.
_CRASHED: Final = "???"
# What no test prints of its own accord, and no load can cause.
_CRASHES: Final = re.compile(
    r"AddressSanitizer|UndefinedBehaviorSanitizer|ThreadSanitizer"
    r"|^\S+: runtime error: |Fatal Python error: (?!.*Timeout)"
    r"|SIGSEGV|SIGBUS|SIGABRT|SIGILL|SIGFPE",
    re.MULTILINE,
)
# What is kept of a failure; the gate shows less of it.
_TRACEBACK_LINES: Final = 400
_LOG_LINES: Final = 2000
_started = pytest.StashKey[Reading]()
_computed = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--outcomes", metavar="FILE", type=Path, help="write failures and times here"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(OutcomeWriter(path), "mpbroker-outcomes")


# -- in the process that runs the test -----------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_started] = Reading.now()
    item.stash[_computed] = _cpu_s()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: all sections are there
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:
    report: Any = yield
    # What is set here travels to the controller with the report.
    if report.when == "teardown":
        report.cpu_s = _cpu_s() - item.stash.get(_computed, _cpu_s())
    if report.failed:
        report.never_forgiven = _never_forgiven(call, report)
        began = item.stash.get(_started, None) or Reading.now()
        report.pressure = str(Reading.now().since(began))
    return report


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _never_forgiven(call: pytest.CallInfo[None], report: pytest.TestReport) -> str:
    """Return why this failure is not to be forgiven, or an empty text."""
    error = call.excinfo.value if call.excinfo is not None else None
    if _contains(error, UnforgivableError):
        return "a promise was broken"
    found = _CRASHES.search(_said(report))
    return f"a process crashed ({found[0].strip()})" if found else ""


def _contains(error: BaseException | None, kind: type[BaseException]) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_contains(each, kind) for each in error.exceptions)
    return isinstance(error, kind)


def _said(report: pytest.TestReport) -> str:
    """What was printed during the test, the brokers' logs included; not its source."""
    return "\n".join(f"-- {title}\n{text}" for title, text in report.sections)


# -- in the process that sees all reports --------------------------------------------


class OutcomeWriter:
    """Writes each failure at once, and counts and times at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._cpu_seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        path.write_bytes(b"")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            self._cpu_seconds[report.nodeid] = getattr(report, "cpu_s", 0.0)
        if report.failed:
            crashed = report.when == _CRASHED
            never = getattr(report, "never_forgiven", "")
            self._fail(
                report.nodeid,
                "the tests' own process crashed" if crashed else never,
                getattr(report, "pressure", ""),
                _end(report.longreprtext, _TRACEBACK_LINES),
                _end(_said(report), _LOG_LINES),
            )
        elif report.skipped:
            self._counts["skipped"] += 1
        elif report.when == "call":
            self._counts["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = _end(report.longreprtext, _TRACEBACK_LINES)
            self._fail(report.nodeid, "could not be collected", "", text, "")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._counts["failed"] = len(self._failed)
        self._write(
            {
                "kind": "summary",
                "exit_code": int(exitstatus),
                "counts": self._counts,
                "seconds": self._seconds,
                "cpu_seconds": self._cpu_seconds,
            }
        )

    def _fail(
        self, name: str, never: str, pressure: str, traceback: str, log: str
    ) -> None:
        self._failed.add(name)
        self._write(
            {
                "kind": "failure",
                "name": name,
                "never_forgiven": never,
                "pressure": pressure,
                "traceback": traceback,
                "log": log,
            }
        )

    def _write(self, row: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def _end(text: str, lines: int) -> str:
    """Return the last lines, without what JSON cannot hold."""
    text = text.encode(errors="replace").decode()
    return "\n".join(text.splitlines()[-lines:])
