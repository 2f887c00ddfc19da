"""MpbrokerCluster: three nodes of a cluster for one test, with database and store.

The database is a new one in a PostgreSQL server: one that the user names, or one that
is started for the tests of this process. The object store is a directory.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

from mpbroker.testing.postgresql import PostgreSQL, programs, what_lacks

if TYPE_CHECKING:
    import asyncpg

    from mpbroker.testing.server import MpbrokerServer

NODES: Final = 3
_INIT_TIMEOUT_S: Final = 60.0


class Databases:
    """Makes databases in a PostgreSQL server.

    Args:
        url: the URL of a database of the server, with a user that may create databases.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    @contextmanager
    def new(self) -> Iterator[str]:
        """Make a database, yield its URL, and drop it afterwards."""
        name = f"mpbroker_test_{secrets.token_hex(6)}"
        self._execute(f"CREATE DATABASE {name}")
        try:
            yield urlunsplit(urlsplit(self._url)._replace(path=f"/{name}"))
        finally:
            self._execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        import asyncpg

        async def execute() -> None:
            connection: asyncpg.Connection = await asyncpg.connect(self._url)
            try:
                await connection.execute(statement)
            finally:
                await connection.close()

        _run(execute)


def _run(work: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine in a new thread, because this one may run an event loop."""

    async def all_of_it() -> None:
        await work()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, all_of_it()).result()


@contextmanager
def databases(
    url: str | None, directory: Path, note: Callable[[str], None]
) -> Iterator[Databases]:
    """Yield an object that makes databases in a PostgreSQL server.

    Args:
        url: the URL of a database of a running server; None: start a server.
        directory: an empty directory for the server that is started.
        note: called with a line for the clean-up process, `pytest_keeper`.

    Raises:
        RuntimeError: a package or PostgreSQL is missing; the text says how to get it.
    """
    missing = [name for name in ("asyncpg", "obstore") if find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"mpbroker_cluster needs {' and '.join(missing)}:"
            " pip install 'mpbroker-server[cluster]'"
        )
    if url is not None:
        yield Databases(url)
        return
    found = programs()
    if found is None:
        raise RuntimeError(
            f"mpbroker_cluster {what_lacks()}: install it, or name a server by"
            " --mpbroker-database-url"
        )
    server = PostgreSQL(found, directory)
    server.create()
    with ExitStack() as stack:
        stack.callback(server.kill)
        server.start()
        assert server.process is not None
        note(f"broker {server.process.pid}")
        stack.callback(note, f"-broker {server.process.pid}")
        yield Databases(server.url("postgres"))


class MpbrokerCluster:
    """A running cluster of several nodes.

    Attributes:
        nodes: the nodes; the first one has node.id 1.
        bootstrap: the value for bootstrap.servers, "HOST:PORT,HOST:PORT,HOST:PORT".
    """

    def __init__(self, nodes: list[MpbrokerServer]) -> None:
        self.nodes = nodes
        self.bootstrap = ",".join(node.bootstrap for node in nodes)

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
    ) -> None:
        """Create a topic that all nodes share.

        With the config diskless.enable=false only the first node has its records.

        Raises:
            ApiError: the first node refused, for example because the topic exists.
        """
        config = {"diskless.enable": "true", **(config or {})}
        self.nodes[0].create_topic(name, partitions, config)


def init_cluster(url: str, store: str, environment: Mapping[str, str]) -> None:
    """Make an empty cluster in a database, by the command `mpbroker cluster init`.

    Args:
        url: the URL of the database.
        store: the URL of the object store.
        environment: the command's environment variables.

    Raises:
        RuntimeError: the command failed; the text has its error output.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mpbroker", "cluster", "init"),
            *("--database", url, "--storage", store),
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=_INIT_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"no cluster could be made: {done.stderr.strip()}")
