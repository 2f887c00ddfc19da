"""MpbrokerServer: a broker that is started for tests, and removed after them."""

from __future__ import annotations

import json
import os
import select
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import mpbroker
from mpbroker.testing import pytest_keeper

_READY_TIMEOUT_S: Final = 60.0
_KEEPER: Final = Path(pytest_keeper.__file__)


class Keeper:
    """The clean-up process, which outlives this one; the first line starts it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def tell(self, line: str) -> None:
        """Tell the clean-up process of something that exists, or is gone.

        Args:
            line: "broker PID" or "directory PATH"; with "-" before it, it is gone.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has been killed
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Have the clean-up process end and remove all that is left; wait for it."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()


keeper = Keeper()
"""The one of this process."""


@contextmanager
def new_directory() -> Iterator[Path]:
    """Make a directory that is removed afterwards, however this process ends."""
    with tempfile.TemporaryDirectory(prefix="mpbroker-") as name:
        keeper.tell(f"directory {name}")
        yield Path(name)
    keeper.tell(f"-directory {name}")


def environment() -> dict[str, str]:
    """Return environment variables with which a broker ignores the user's own modules.

    A file select.py in the user's project would take the place of the standard
    library's module.
    """
    changed = os.environ | {"PYTHONSAFEPATH": "1"}
    parent = str(Path(mpbroker.__file__).parents[1])
    if parent not in (*site.getsitepackages(), site.getusersitepackages()):
        # Without it mpbroker itself might not be found.
        paths = [parent, *filter(None, [os.environ.get("PYTHONPATH")])]
        changed["PYTHONPATH"] = os.pathsep.join(paths)
    return changed


class MpbrokerServer:
    """A broker that runs for tests, in processes of its own.

    Attributes:
        bootstrap: the value for bootstrap.servers, HOST:PORT.
        host: the host of ``bootstrap``.
        port: the port of ``bootstrap``.
        data_dir: the directory of the broker's logs of records.
        log_path: the file with all that the broker has printed.
    """

    bootstrap: str
    host: str
    port: int

    def __init__(
        self, directory: Path, config: Mapping[str, object], *, wait: bool = True
    ) -> None:
        """Start a broker and wait until it serves.

        Args:
            directory: the directory for the broker's files; the caller removes it.
            config: Kafka's settings by name, added to those of a small broker.
            wait: whether to wait; if not, the caller calls `wait_until_ready`.

        Raises:
            RuntimeError: the broker did not start; the text has the end of its log.
        """
        self.data_dir = directory / "data"
        self.log_path = directory / "broker.log"
        settings: dict[str, object] = {
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": self.data_dir,
            # Tests are short, and start many brokers: one process of each kind.
            "num.network.threads": 1,
            "num.io.threads": 1,
            # Tests do not cut the power, and each transaction waits for the disk twice.
            "log.flush.acks.all": "false",
            **config,
        }
        ready_fd, their_fd = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "mpbroker", "serve"),
                        *("--ready-fd", str(their_fd)),
                        *(f"{name}={value}" for name, value in settings.items()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[their_fd],
                    start_new_session=True,
                    env=environment(),
                )
            keeper.tell(f"broker {self._process.pid}")
        except BaseException:
            os.close(ready_fd)
            raise
        finally:
            os.close(their_fd)
        self._ready_fd = ready_fd
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until a broker that was made with ``wait=False`` serves.

        Raises:
            RuntimeError: it did not start, or not in 60 s, and is killed; the text has
                the end of its log.
        """
        ready_fd, self._ready_fd = self._ready_fd, -1
        try:
            self.bootstrap = self._read_address(ready_fd)
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(ready_fd)
        host, _, port = self.bootstrap.rpartition(":")
        self.host, self.port = host, int(port)

    def _read_address(self, ready_fd: int) -> str:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        line = b""
        poll = select.poll()
        poll.register(ready_fd, select.POLLIN)
        while not line.endswith(b"\n"):
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms <= 0 or not poll.poll(left_ms):
                raise RuntimeError(
                    f"mpbroker was not ready in {_READY_TIMEOUT_S:g} s:"
                    f" {self.last_words()}"
                )
            chunk = os.read(ready_fd, 4096)
            if not chunk:
                raise RuntimeError(f"mpbroker did not start: {self.last_words()}")
            line += chunk
        listeners: dict[str, str] = json.loads(line)["listeners"]
        return next(iter(listeners.values()))

    def last_words(self) -> str:
        """Return the end of the broker's output, for error texts."""
        return self.log_path.read_text(errors="replace")[-4000:].strip() or "no output"

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic on this broker.

        Args:
            name: the topic's name.
            partitions: the number of partitions.
            config: the topic's own configs, by name.

        Raises:
            ApiError: the broker refused, for example because the topic exists.
        """
        # Imported late: pytest loads this module at every start, with or without use.
        from mpbroker.client.addresses import parse_addresses
        from mpbroker.client.admin.topic_admin import create_topic
        from mpbroker.client.cluster import Cluster

        with Cluster(parse_addresses(self.bootstrap), _READY_TIMEOUT_S) as cluster:
            create_topic(cluster, name, partitions=partitions, configs=config)

    def stop(self) -> None:
        """Stop the broker and wait for its end; do nothing if it has ended."""
        if self._process.poll() is None and self._ready_fd < 0:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(pytest_keeper.STOP_TIMEOUT_S)
        self.kill()  # ended already, or too slow, or does not serve yet

    def kill(self) -> None:
        """Kill the broker and all its processes, as a power cut would."""
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1
        pid = self._process.pid
        if self._process.returncode is None:
            with suppress(ProcessLookupError):  # gone already
                os.killpg(pid, signal.SIGKILL)
            self._process.wait()
            pytest_keeper.remove_shared_memory(pid)
        keeper.tell(f"-broker {pid}")
