"""Walk the way of a new user with a wheel, from its installation to its removal.

    python3 deploy/first_use.py WHEEL LATER [--borrow FOLDER]
    python3 deploy/first_use.py PACKAGE LATER       as root, in a system to throw away

The wheel is installed into a fresh environment, the Debian package by apt. A broker is
started, records go in and come back, the pages for browsers open. While a producer and
a consumer run, the later one is installed and takes over in place; both clients go on,
and no record is missing or there twice. At the end the broker stops, and nothing is
left when all has been uninstalled. Each step says how long it took.

It needs the standard library only, and runs wherever there is a Python with venv:
scripts/prove runs it in bare Debian roots, and a test in this checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

NAME: Final = "mpbroker-server"
_LOCAL: Final = "127.0.0.1:0"
_STOP_S: Final = 120.0


class FirstUseError(Exception):
    """A step failed; the text says which, and what was said."""


class Walk:
    """One walk: an environment, a broker in it, and clients.

    Args:
        folder: for all files.
        borrow: a folder with what the wheel depends on, which is not installed then;
            "": pip gets it from its index.
    """

    def __init__(self, folder: Path, borrow: str = "") -> None:
        self.folder = folder
        self.data = folder / "data"
        self.pid_file = folder / "pid"
        self.programs = folder / "venv" / "bin"
        self._borrow = borrow
        self._bootstrap = ""

    def run(self, *words: str, given: str = "") -> str:
        """Run a command; return what it printed.

        Raises:
            FirstUseError: it failed.
        """
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, env=self._environ()
        )
        if done.returncode:
            raise FirstUseError(
                f"{' '.join(words)}: {done.returncode}:"
                f" {(done.stdout + done.stderr)[-2000:]}"
            )
        return done.stdout

    def command(self, *words: str) -> list[str]:
        """Return a command of mpbroker."""
        return [str(self.programs / "mpbroker"), *words]

    def mpbroker(self, *words: str, given: str = "") -> str:
        """Run a command of mpbroker; return what it printed."""
        return self.run(*self.command(*words), given=given)

    def _environ(self) -> dict[str, str]:
        kept = {key: each for key, each in os.environ.items() if key != "PYTHONPATH"}
        return (
            {**kept, "MPBROKER_BOOTSTRAP": self._bootstrap} if self._bootstrap else kept
        )

    # -- the steps ---------------------------------------------------------------------

    def make_environment(self) -> None:
        """Make a virtual environment."""
        without = ["--without-pip"] if self._borrow else []
        self.run(sys.executable, "-m", "venv", *without, str(self.folder / "venv"))
        if self._borrow:
            (site,) = (self.folder / "venv").glob("lib/python*/site-packages")
            (site / "borrowed.pth").write_text(f"{self._borrow}\n")

    def pip(self, *words: str) -> str:
        """Run pip for the environment; return what it printed."""
        python = str(self.programs / "python")
        if self._borrow:
            return self.run(sys.executable, "-m", "pip", "--python", python, *words)
        return self.run(python, "-m", "pip", *words)

    def install(self, wheel: Path) -> None:
        """Install a wheel over what there is."""
        alone = ["--no-deps", "--no-index"] if self._borrow else []
        self.pip("install", "--quiet", "--upgrade", *alone, str(wheel))

    def serve(self) -> None:
        """Start a broker."""
        self.mpbroker(
            *("serve", "--daemon", "--pid-file", str(self.pid_file)),
            f"listeners=PLAINTEXT://{_LOCAL}",
            f"metrics.listeners=HTTP://{_LOCAL}",
            f"console.listeners=HTTP://{_LOCAL}",
            f"log.dirs={self.data}",
        )
        status = self.status()
        self._bootstrap = status["listeners"]["PLAINTEXT"]
        if status["core"] != "compiled core":
            raise FirstUseError(f"the broker has no core: {status['core']}")

    def status(self) -> dict[str, Any]:
        """Return what the broker says of itself."""
        told = self.mpbroker("ctl", "status", "--json", "--data-dir", str(self.data))
        return dict(json.loads(told))

    def produce_and_consume(self) -> None:
        """Write a record and read it back."""
        self.mpbroker("produce", "-t", "greetings", given="hello\n")
        told = self.mpbroker("consume", "-t", "greetings", "-e")
        if told != "hello\n":
            raise FirstUseError(f"consumed {told!r}")

    def open_pages(self) -> None:
        """Open the console, the status page and the metrics."""
        status = self.status()
        for key, path, word in (
            ("console", "", "<title>"),
            ("metrics", "", "<title>"),
            ("metrics", "metrics", "mpbroker_"),
        ):
            with urllib.request.urlopen(f"{status[key]}{path}") as answer:
                if word not in answer.read().decode():
                    raise FirstUseError(f"{status[key]}{path} lacks {word}")

    def upgrade_to(self, later: Path) -> None:
        """Install a later wheel, and have the running broker go on with it."""
        before = str(self.status()["version"])
        self.install(later)
        self.mpbroker("ctl", "upgrade", "--data-dir", str(self.data))
        after = str(self.status()["version"])
        if after == before or after != self.mpbroker("--version").split()[-1]:
            raise FirstUseError(f"{before} became {after}")

    def stop(self) -> None:
        """Stop the broker."""
        pid = str(self.status()["pid"])
        self.mpbroker("ctl", "stop", "--data-dir", str(self.data))
        if _runs(pid):
            raise FirstUseError(f"process {pid} is there after its stop")
        if not (self.data / "mpbroker.log").read_text().endswith("stopped\n"):
            raise FirstUseError("the log does not tell of the stop")
        if left := list(Path("/dev/shm").glob(f"mpbroker-{pid}-*")):
            raise FirstUseError(f"left behind: {left}")

    def uninstall(self) -> None:
        """Take the wheel away again; nothing of it is left."""
        self.pip("uninstall", "--quiet", "--yes", NAME)
        there = (self.folder / "venv").rglob("mpbroker*")
        if left := [str(path) for path in there]:
            raise FirstUseError(f"left behind: {', '.join(left)}")

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        """Have a producer and a consumer run; compare what they saw at the end."""
        self.mpbroker("topic", "create", "numbers")
        producer = subprocess.Popen(
            self.command("produce", "-t", "numbers"),
            stdin=subprocess.PIPE,
            env=self._environ(),
        )
        consumer = subprocess.Popen(
            self.command("consume", "-t", "numbers", "-o", "beginning"),
            stdout=subprocess.PIPE,
            env=self._environ(),
            text=True,
        )
        assert consumer.stdout is not None
        output = consumer.stdout
        seen: list[str] = []
        reading = threading.Thread(target=lambda: seen.extend(output))
        writing = _Numbers(producer)
        try:
            reading.start()
            writing.start()
            _wait(lambda: bool(seen))
            yield
            # What is written from here on is written to the one after.
            reached = len(seen)
            _wait(lambda: len(seen) > reached)
            count = writing.end()
            if producer.wait():
                raise FirstUseError(f"the producer ended with {producer.returncode}")
            _wait(lambda: len(seen) >= count)
        finally:
            writing.end()
            for process in (producer, consumer):
                process.terminate()
                process.wait()
            reading.join()
            output.close()
        if seen != [f"{number}\n" for number in range(count)]:
            raise FirstUseError(
                f"of {count} records {len(seen)} were read, or in disorder"
            )
        print(f"  {count} records, each once and in order", flush=True)


class PackageWalk(Walk):
    """One walk with the Debian package; root installs it, and its user runs the broker.

    Args:
        folder: is not used: the package has its own places.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.programs = Path("/usr/bin")
        self.data = Path("/var/lib/mpbroker")
        self.pid_file = self.data / "pid"

    def command(self, *words: str) -> list[str]:
        """Return a command of mpbroker, run by the package's user."""
        user = ["setpriv", "--reuid=mpbroker", "--regid=mpbroker", "--clear-groups"]
        return [*user, *super().command(*words)]

    def apt(self, *words: str) -> None:
        """Run apt-get."""
        # A mirror may be a copy of some weeks ago.
        old = "Acquire::Check-Valid-Until=false"
        quiet = ("DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-o", old)
        self.run("env", *quiet, *words)

    def make_environment(self) -> None:
        """Have apt know what there is."""
        self.apt("update")

    def install(self, package: Path) -> None:
        """Install a package, or a later one over it."""
        # apt's own user reads it.
        package.parent.chmod(0o755)
        self.apt("install", "-y", "--no-install-recommends", str(package.resolve()))

    def uninstall(self) -> None:
        """Purge the package; nothing of it is left but its user."""
        self.apt("purge", "-y", "mpbroker")
        roots = ("/etc", "/opt", "/usr/bin", "/usr/lib", "/usr/share", "/var/lib")
        there = (each for root in roots for each in Path(root).glob("mpbroker*"))
        if left := [str(path) for path in there]:
            raise FirstUseError(f"left behind: {', '.join(left)}")


def _runs(pid: str) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        words = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return words[0] != "Z"


class _Numbers(threading.Thread):
    """Write a number a line into a producer until it is told to end."""

    def __init__(self, producer: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self._producer = producer
        self._is_over = threading.Event()
        self._count = 0

    def run(self) -> None:
        assert self._producer.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._producer.stdin as pipe:
            while not self._is_over.wait(0.002):
                pipe.write(f"{self._count}\n".encode())
                pipe.flush()
                self._count += 1

    def end(self) -> int:
        """End the input; return how many numbers there were."""
        self._is_over.set()
        if self.is_alive():
            self.join()
        return self._count


def _wait(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + _STOP_S
    while not condition():
        if time.monotonic() > deadline:
            raise FirstUseError("the clients do not go on")
        time.sleep(0.01)


@contextlib.contextmanager
def _step(title: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"{title}: {time.monotonic() - started:.1f} s", flush=True)


def walk(wheel: Path, later: Path, folder: Path, borrow: str = "") -> None:
    """Walk the whole way.

    Args:
        wheel: or a Debian package.
        later: a later version of it.
        folder: for all files.
        borrow: see `Walk`.

    Raises:
        FirstUseError: a step failed.
    """
    one = PackageWalk(folder) if wheel.suffix == ".deb" else Walk(folder, borrow)
    with _step("environment"):
        one.make_environment()
    try:
        with _step("installation to first answer"):
            with _step("  install"):
                one.install(wheel)
            one.serve()
        with _step("produce and consume"):
            one.produce_and_consume()
        with _step("pages"):
            one.open_pages()
        with _step("upgrade with clients"), one.clients():
            one.upgrade_to(later)
        with _step("stop"):
            one.stop()
    finally:
        _kill(one.pid_file)
    with _step("uninstall"):
        one.uninstall()


def _kill(pid_file: Path) -> None:
    """End a broker that a failed step has left."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(re.match(r"\d+", pid_file.read_text())[0])  # type: ignore[index]
        os.kill(pid, 15)


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="first_use.py")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("later", type=Path)
    parser.add_argument("--borrow", default="", metavar="FOLDER")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="mpbroker-first-") as folder:
            walk(options.wheel, options.later, Path(folder), options.borrow)
    except FirstUseError as error:
        print(f"first use: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
