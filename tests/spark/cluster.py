"""Pipelines to kill: a cluster of two workers, and a driver that is started again."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from mpbroker.spark import worker_python

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 600  # a loaded machine takes minutes to start Spark
# For JVMs that live for a minute: the second compiler would take half of their CPU.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

_DIE_WITH_US = (
    ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
)


def wait_for(condition: Callable[[], Any], what: str | Callable[[], str]) -> Any:
    """Return the condition's value as soon as it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.1)
    return found


def has_java() -> bool:
    return bool(shutil.which("java") or os.environ.get("JAVA_HOME"))


def spark_environ(directory: Path) -> dict[str, str]:
    """Return this process's environment with what Spark's processes need.

    Args:
        directory: for their files.
    """
    # What a session with a local master does by itself: a third of the CPU for each
    # Python that Spark starts, to which it gives ten seconds.
    python = directory / "python"
    python.write_text(worker_python._SCRIPT % shlex.quote(sys.executable))
    python.chmod(0o755)
    return {
        **os.environ,  # those of an object store, too
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": str(python),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(directory / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
        "JDK_JAVA_OPTIONS": QUICK_JAVA,
    }


class Cluster:
    """A standalone cluster on loopback: a master and two workers.

    Attributes:
        address: ``spark://HOST:PORT`` of the master.
    """

    def __init__(self, environ: dict[str, str], directory: Path) -> None:
        """Start it; `close` ends all of its processes."""
        import pyspark

        self._command = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        self._environ, self._directory = environ, directory
        self._running: list[subprocess.Popen[bytes]] = []
        self.address = ""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        log = self._launch("master", "master.Master", "--port", "0")
        found = wait_for(
            lambda: re.search(r"spark://127\.0\.0\.1:[1-9]\d*", log.read_text()),
            "no master",
        )
        self.address = found[0]
        for number in (0, 1):
            self._launch(
                f"worker{number}",
                *("worker.Worker", "--cores", "1", "--memory", "1g", "--port", "0"),
                *("--work-dir", str(self._directory / f"work{number}"), self.address),
            )
        wait_for(lambda: log.read_text().count("Registering worker") == 2, "no workers")

    def _launch(self, name: str, role: str, *arguments: str) -> Path:
        log = self._directory / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    *_DIE_WITH_US,
                    *(self._command, f"org.apache.spark.deploy.{role}"),
                    *("--host", "127.0.0.1", "--webui-port", "0", *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environ,
            )
        self._running.append(process)
        return log

    def executors(self) -> list[psutil.Process]:
        found = []
        for worker in self._running[1:]:
            for child in psutil.Process(worker.pid).children(recursive=True):
                with suppress(psutil.Error):  # gone meanwhile, or not reaped yet
                    if "CoarseGrainedExecutorBackend" in " ".join(child.cmdline()):
                        found.append(child)
        return found

    def workers_that_ran(self) -> int:
        """Return how many workers have run an executor."""
        found = (self._directory / f"work{number}" for number in (0, 1))
        return sum(any(each.glob("app-*")) for each in found)

    def close(self) -> None:
        """Kill all processes."""
        for process in reversed(self._running):
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.wait()


@contextmanager
def cluster_of_two(environ: dict[str, str], directory: Path) -> Iterator[Cluster]:
    """Run a cluster for the time being."""
    found = Cluster(environ, directory)
    try:
        yield found
    finally:
        found.close()


class Driver:
    """`mpbroker pipeline run`, started again whenever it is not running.

    Attributes:
        log: what it prints, at each start behind what is there.
    """

    def __init__(
        self, files: Sequence[Path], master: str, environ: dict[str, str], log: Path
    ) -> None:
        self._command = [
            *(sys.executable, "-m", "mpbroker", "pipeline", "run"),
            *(map(str, files)),
            *("--master", master),
        ]
        self._environ, self.log = environ, log
        self.process: subprocess.Popen[bytes] | None = None

    def ensure(self, *more: str) -> subprocess.Popen[bytes]:
        """Start it unless it runs, with ``more`` arguments."""
        if self.process is None or self.process.poll() is not None:
            with self.log.open("ab") as out:
                self.process = subprocess.Popen(
                    [*_DIE_WITH_US, *self._command, *more],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=self._environ,
                    start_new_session=True,
                )
        return self.process

    def kill(self) -> None:
        """Kill Python and its JVM, which are a session of their own, if they run."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text()[-3000:]

    def finish(self) -> None:
        """Run it once more, until it has read all that is there now."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()  # it ends in good order
            self.process.wait(PATIENCE_S)
        # Much is left: many batches, and on a loaded machine a minute for each try to
        # start Python in the ten seconds that Spark gives it. A run that a kill has hit
        # may end with an error; the next one goes on.
        for _ in range(4):
            if self.ensure("--once").wait(3 * PATIENCE_S) == 0:
                return
        raise AssertionError(self.tail())
