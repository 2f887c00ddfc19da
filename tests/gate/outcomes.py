"""What one pytest session has left in its outcome file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import orjson
import pytest


@dataclass
class Failure:
    """A test that failed, with the ends of what it said.

    Attributes:
        name: pytest's node id.
        never_forgiven: why it is not run again; empty if it may be.
        pressure: how loaded the machine was during the test.
        traceback: the end of its traceback.
        log: the end of what the test and its brokers printed.
    """

    name: str
    never_forgiven: str = ""
    pressure: str = ""
    traceback: str = ""
    log: str = ""


@dataclass
class Outcomes:
    """The result of one pytest session.

    Attributes:
        exit_code: pytest's; negative: the signal that ended it.
        is_whole: the session has come to its end.
        counts: how many tests "passed", "failed" and "skipped".
        seconds: how long each test took, with its fixtures.
        cpu_seconds: the CPU time of each test, and of its processes that have ended.
        failures: by name, a test once.
    """

    exit_code: int
    is_whole: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, exit_code: int) -> Outcomes:
        """Read an outcome file; a missing or cut one is a session that did not end."""
        outcomes = cls(exit_code)
        lines = path.read_bytes().splitlines() if path.exists() else []
        for line in lines:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                break  # the process was killed while it wrote
            if row.pop("kind") == "summary":
                outcomes.is_whole = True
                outcomes.counts = row["counts"]
                outcomes.seconds = row["seconds"]
                outcomes.cpu_seconds = row["cpu_seconds"]
            else:
                outcomes._add(Failure(**row))
        return outcomes

    def _add(self, failure: Failure) -> None:
        """Keep one failure a test, the worse one: its teardown may fail as well."""
        known = self.failures.get(failure.name)
        if known is None or (failure.never_forgiven and not known.never_forgiven):
            self.failures[failure.name] = failure

    @property
    def trouble(self) -> str:
        """Why this session says nothing about its tests; empty if it does."""
        if not self.is_whole:
            return f"the tests were cut off (pytest's exit code: {self.exit_code})"
        if self.exit_code == pytest.ExitCode.NO_TESTS_COLLECTED:
            return "no test was found"
        if self.exit_code == pytest.ExitCode.INTERRUPTED and not self.failures:
            return "interrupted"
        if self.exit_code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return f"pytest ended with exit code {self.exit_code}"
        if self.exit_code == pytest.ExitCode.TESTS_FAILED and not self.failures:
            return "pytest failed outside all tests; see its output"
        return ""


def minutes_by_folder(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the folders of tests with the minutes they took, the longest first."""
    folders: defaultdict[str, float] = defaultdict(float)
    for name, taken in seconds.items():
        folders["/".join(PurePosixPath(name.partition("::")[0]).parts[:2])] += (
            taken / 60
        )
    return sorted(folders.items(), key=lambda each: -each[1])


def slowest(seconds: Mapping[str, float], count: int) -> list[tuple[str, float]]:
    """Return the slowest tests with their seconds, the slowest first."""
    return sorted(seconds.items(), key=lambda each: -each[1])[:count]
