"""PostgreSQL: a real server for tests, on a Unix socket or on loopback.

Each server has a directory of its own. Its programs are installed already: Debian's, or
those on PATH.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

OLDEST: Final = 15
"""The oldest version of which a cluster's database can be."""

PATIENCE_S: Final = 60
_DEBIAN: Final = Path("/usr/lib/postgresql")
_SETTINGS: Final = {
    "max_connections": 60,
    "shared_buffers": "32MB",
    # A server that is killed leaves no names in /dev/shm.
    "dynamic_shared_memory_type": "mmap",
    "log_min_messages": "warning",
}


def programs() -> Path | None:
    """Return the directory of PostgreSQL's programs.

    Returns:
        None: there are none, or only those of a version that is too old; what_lacks()
        says which.
    """
    found = _installed()
    newest = max(found, default=0)
    return found[newest] if newest >= OLDEST else None


def what_lacks() -> str:
    """Return a sentence for those who get no programs(): what is to be installed."""
    newest = max(_installed(), default=0)
    what = f"needs PostgreSQL {OLDEST} or newer (Debian: postgresql)"
    return f"{what}; version {newest} is installed" if 0 < newest < OLDEST else what


def _installed() -> dict[int, Path]:
    """Return directories of programs by version: Debian's, or the one on PATH."""
    found = {
        int(path.parent.name): path
        for path in _DEBIAN.glob("[0-9]*/bin")
        if (path / "postgres").exists()
    }
    if max(found, default=0) < OLDEST and (on_path := shutil.which("postgres")):
        directory = Path(on_path).resolve().parent
        found[_version(directory / "postgres")] = directory
    return found


def _version(program: Path) -> int:
    """Return the major version of a server's program; 0: it does not tell."""
    try:
        told = subprocess.run(
            [program, "--version"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE_S,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return 0
    number = re.search(r"\(PostgreSQL\) (\d+)", told)
    return int(number[1]) if number else 0


def _without_root() -> dict[str, Any]:
    """Return arguments of Popen that give up root, as PostgreSQL demands."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise RuntimeError("no user but root to run PostgreSQL as")


@dataclass
class PostgreSQL:
    """A PostgreSQL server that runs, or does not run yet or any more.

    Attributes:
        bin: the directory of PostgreSQL's programs.
        directory: the directory of its socket, its data and its log.
        fsync: whether a commit waits for the disk.
        password: the password of the user "admin"; "": no password is asked for.
        port: the TCP port on loopback; 0: there is a Unix socket only.
        process: the server's process; None: it does not run.
    """

    bin: Path
    directory: Path
    fsync: bool = False
    password: str = ""
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        """Make the data directory by initdb.

        Raises:
            subprocess.CalledProcessError: initdb failed.
        """
        user = _without_root()
        if user:
            os.chown(self.directory, user["user"], user["group"])
        given = ["--auth", "trust"]
        if self.password:
            secret = self.directory / "password"
            secret.write_text(self.password)
            secret.chmod(0o644)  # below a directory that is closed to others
            given = ["--auth", "scram-sha-256", "--pwfile", os.fspath(secret)]
        subprocess.run(
            [
                self.bin / "initdb",
                *("--pgdata", self.directory / "data", "--no-sync"),
                *("--username", "admin"),
                *given,
                *("--encoding", "UTF8", "--locale", "C"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            cwd="/",
            **user,
        )

    def start(self) -> None:
        """Start the server and wait until it takes connections.

        Raises:
            RuntimeError: it does not take any in 60 s; the text has the end of its log.
        """
        settings = {
            **_SETTINGS,
            "listen_addresses": "127.0.0.1" if self.port else "",
            "port": self.port or 5432,  # 5432: a part of the socket's name only
            "fsync": "on" if self.fsync else "off",
            "unix_socket_directories": self.directory,
        }
        with (self.directory / "log").open("ab") as out:
            self.process = subprocess.Popen(
                [
                    self.bin / "postgres",
                    *("-D", self.directory / "data"),
                    *(f"--{name}={value}" for name, value in settings.items()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd="/",
                **_without_root(),
            )
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {self.log_text()}")
            time.sleep(0.02)

    def _is_ready(self) -> bool:
        # The last line of the lock file is the server's state; an old file names
        # another process.
        try:
            lines = (self.directory / "data/postmaster.pid").read_text().split("\n")
        except FileNotFoundError:
            return False
        return (
            self.process is not None
            and lines[0] == str(self.process.pid)
            and "ready" in lines[-2]
        )

    def log_text(self) -> str:
        """Return the end of the server's log."""
        return (self.directory / "log").read_text()[-3000:]

    def url(self, database: str, user: str = "admin") -> str:
        """Return the URL of a database of this server, for a user."""
        if self.port:
            host = f"127.0.0.1:{self.port}"
            return f"postgresql://{user}:{self.password}@{host}/{database}"
        return f"postgresql://{user}@/{database}?host={self.directory}"

    def kill(self) -> None:
        """End the server at once, without a checkpoint; all connections are cut."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        """End the server as an administrator does; all connections are cut."""
        self._end(signal.SIGINT)

    def _end(self, number: signal.Signals) -> None:
        if self.process is None:
            return
        self.process.send_signal(number)
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            # A child that a test has stopped: SIGKILL to the server lets the others
            # end, too.
            self.process.kill()
            self.process.wait()
        self.process = None


@contextlib.contextmanager
def postgresql(
    *, fsync: bool = False, password: str = "", port: int = 0
) -> Iterator[PostgreSQL]:
    """Run a server with an empty directory, which is removed afterwards.

    Raises:
        RuntimeError: no PostgreSQL of version 15 or newer is installed.
    """
    path = programs()
    if path is None:
        raise RuntimeError(what_lacks())
    # Not below pytest's directory: no other user may enter that one. And a socket's
    # path has a hundred characters at most.
    with tempfile.TemporaryDirectory(prefix="mpbroker-pg-") as name:
        server = PostgreSQL(path, Path(name), fsync, password, port)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.kill()
