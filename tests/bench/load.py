"""Run the load generator against a broker and read both their meters.

A script is a list of templates, native-endian u32 before every variable part:

    count, then per template
      size, the framed request        (its correlation id is overwritten)
      exact payload size of the answer, or 0; least payload size
      number of checks, then per check: position in the payload, size, bytes

Connection i sends template (i + k * connections) % count as its k-th request, so many
connections together touch all templates evenly.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tests.bench.processes import ProcessTree

_SOURCE = Path(__file__).with_name("loadgen.c")


class LoadFailedError(Exception):
    """The load generator gave up; the message says over what."""


class NoAnswerError(LoadFailedError):
    """Nothing was wrong, and nothing was answered in the time there was."""


class Template(NamedTuple):
    """A request and what its answer has to look like."""

    request: bytes
    exact_size: int = 0
    least_size: int = 4
    checks: tuple[tuple[int, bytes], ...] = ()

    def verify(self, payload: memoryview) -> None:
        """Raise AssertionError unless the answer is as it should be."""
        if self.exact_size and len(payload) != self.exact_size:
            raise AssertionError(
                f"answer of {len(payload)} bytes where {self.exact_size} were due"
            )
        if len(payload) < self.least_size:
            raise AssertionError(
                f"answer of {len(payload)} bytes, at least {self.least_size} were due"
            )
        for at, want in self.checks:
            got = payload[at : at + len(want)]
            if got != want:
                raise AssertionError(
                    f"answer differs in the {len(want)} bytes at {at}: {got[:16].hex()}"
                )


def same_as(request: bytes, payload: bytes, limit: int = 65536) -> Template:
    """Expect every answer to equal this one but for its correlation id."""
    return Template(request, len(payload), 4, ((4, payload[4:limit]),))


class LoadResult(NamedTuple):
    """What one run of the load generator and the broker's meters said."""

    answered: int
    seconds: float
    received_bytes: int
    own_cpu_s: float  # the load generator's
    p50_us: float
    p90_us: float
    p99_us: float
    p999_us: float
    max_us: float
    broker_cpu_s: float

    def metrics(self) -> dict[str, float]:
        """Return the usual figures, by metric name."""
        return {
            "per_s": self.answered / self.seconds,
            "cpu_us": self.broker_cpu_s / self.answered * 1e6,
            # The control: the same work in every run. Where it swings, the machine
            # does, and not the broker.
            "load_cpu_us": self.own_cpu_s / self.answered * 1e6,
            "p50_ms": self.p50_us / 1e3,
            "p99_ms": self.p99_us / 1e3,
        }


def save_script(templates: Sequence[Template], path: Path) -> None:
    """Write a script as the module's docstring draws it."""
    with path.open("wb") as file:
        _put_u32(file, len(templates))
        for template in templates:
            _put_u32(file, len(template.request))
            file.write(template.request)
            _put_u32(file, template.exact_size)
            _put_u32(file, template.least_size)
            _put_u32(file, len(template.checks))
            for at, want in template.checks:
                _put_u32(file, at)
                _put_u32(file, len(want))
                file.write(want)


def _put_u32(file: BinaryIO, value: int) -> None:
    file.write(struct.pack("=I", value))


def load_script(path: str | Path) -> list[Template]:
    """Read what `save_script` wrote."""
    data = Path(path).read_bytes()
    at = 0

    def u32() -> int:
        nonlocal at
        at += 4
        return int(struct.unpack_from("=I", data, at - 4)[0])

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    templates = []
    for _ in range(u32()):
        request = take(u32())
        exact, least = u32(), u32()
        checks = tuple((u32(), take(u32())) for _ in range(u32()))
        templates.append(Template(request, exact, least, checks))
    return templates


def generator_command() -> list[str]:
    """Return how to start the C load generator, or its Python twin without compiler.

    `MPBROKER_BENCH_LOADGEN=python` asks for the twin.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None or os.environ.get("MPBROKER_BENCH_LOADGEN") == "python":
        return [sys.executable, "-m", "tests.bench.loadgen"]
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(tempfile.gettempdir()) / f"mpbroker-bench-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    binary = cache / f"loadgen-{digest}"
    if not binary.exists():
        fresh = binary.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-o", fresh, _SOURCE], check=True)
        fresh.rename(binary)
    return [str(binary)]


def run_load(
    address: tuple[str, int],
    broker: ProcessTree,
    templates: Sequence[Template],
    *,
    connections: int,
    depth: int = 1,
    warmup_s: float = 0.3,
    measure_s: float = 1.5,
) -> LoadResult:
    """Keep `connections` times `depth` requests under way and measure the broker.

    A warm-up lasts until every connection was answered, too.

    Raises:
        LoadFailedError: a wrong answer, or a closed connection.
        NoAnswerError: there was none at all.
    """
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "script"
        save_script(templates, script)
        sizes = [connections, depth, int(warmup_s * 1000), int(measure_s * 1000)]
        command = [
            *generator_command(),
            address[0],
            str(address[1]),
            *map(str, sizes),
            str(script),
        ]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            before = broker.cpu_seconds()
            line = process.stdout.readline()
            cpu = broker.cpu_seconds() - before
            process.communicate("")
    if process.returncode or not line:
        raise LoadFailedError(f"load generator: exit code {process.returncode}")
    result = json.loads(line)
    if not result["answered"]:
        raise NoAnswerError(f"no answer in {measure_s} s")
    return LoadResult(**result, broker_cpu_s=cpu)
