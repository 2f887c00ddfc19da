"""Call PostgreSQL within a time limit, and try again when it was restarted.

A call is one statement, which PostgreSQL commits by itself. If the connection breaks,
or no answer comes in time, the statement may or may not have been executed. So the call
is repeated, and each function of the schema answers its second call like the first.

A late call is never cancelled. A cancelled commit no longer waits for its synchronous
standby, and would count without being on a second machine. Instead, the connection is
dropped: the server goes on waiting, and the rows stay locked until then.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Self, TypeAlias, TypeVar

import asyncpg
from asyncpg.connect_utils import SessionAttribute

from mpbroker.base.errors import MpbrokerError
from mpbroker.cluster.errors import (
    ClusterError,
    DatabaseUnavailableError,
    ObjectGivenUpError,
)

OLDEST_SERVER: Final = 15
CONNECT_TIMEOUT_S: Final = 5.0
# The server's own limits, for a node that is gone or hangs in the middle of a call.
_SESSION: Final = {
    "application_name": "mpbroker",
    "search_path": "pg_catalog",
    # Overrides the database's default: an acknowledged commit is on disk, and on the
    # synchronous standby if there is one.
    "synchronous_commit": "on",
    "jit": "off",  # takes longer than our statements do
    # All our statements look rows up by an index. A plan made while a table was small
    # would read the whole table until it is analyzed: 23 ms a commit, not 1, behind the
    # creation of a topic of 100,000 partitions.
    "enable_seqscan": "off",
    "statement_timeout": "60s",
    "lock_timeout": "30s",
    "idle_in_transaction_session_timeout": "30s",
    "client_connection_check_interval": "5s",
}
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
# SQLSTATEs after which the same call may succeed: connections, deadlocks, a server that
# stops, starts or has become a standby, too many connections, a lock's or a statement's
# time limit.
_TRANSIENT: Final = (
    *("08", "40001", "40P01", "53", "57P01", "57P02", "57P03", "57P05"),
    *("25006", "55P03", "57014"),
)
_GIVEN_UP: Final = "MP001"
_REFUSED: Final = "MP002"  # a function refuses; its text is for the operator
_WARNING: Final = "01000"
_NO_SCHEMA: Final = ("3F000", "42P01", "42883", "42703")
# SQLSTATEs of faults that an operator has to mend, and the advice for each.
_ADVICE: Final = {
    ("28",): "check the user and the password of the URL, and pg_hba.conf",
    ("3D000",): "create the database, or correct the URL",
    ("42501",): "grant the right, or use the user who ran 'mpbroker cluster init'",
    _NO_SCHEMA: "run 'mpbroker cluster init', or 'mpbroker cluster migrate' after an"
    " upgrade",
}
_FAILURES: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    # A session that the server has ended, and whose socket is not closed yet.
    asyncpg.InternalClientError,
    OSError,
)
_T = TypeVar("_T")
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


class ClusterDatabase:
    """The connections of one process, with one event loop, to a cluster's database.

    Args:
        url: postgresql://user:password@host[,host2]/database?option=...; several hosts
            are tried until one of them takes writes.
        timeout_s: for a call with all its retries.
        connections: calls that may be on their way at the same time.

    Attributes:
        failures: calls that failed, each of their tries counted.
        sessions: the connections that were made. A server that has taken the place of
            another one is always met by a new one.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 30.0, connections: int = 1
    ) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._turns = asyncio.Semaphore(connections)
        self._doubtful: set[Connection] = set()
        self.failures = 0
        self.sessions = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the database at once; do not wait for open calls."""
        while self._idle:
            self._idle.pop().terminate()

    async def rows(
        self, statement: str, *arguments: object, timeout_s: float | None = None
    ) -> Sequence[asyncpg.Record]:
        """Execute a statement that may be executed twice, and return its rows.

        Raises:
            DatabaseUnavailableError: there was no answer within the time limit.
            ClusterError: the database refuses; an operator has to do something.
            ObjectGivenUpError: commit_object_v1 was called for an object that was given
                up.
        """

        async def call(
            connection: Connection,
        ) -> Sequence[asyncpg.Record]:
            return await connection.fetch(statement, *arguments)

        return await self.run(call, timeout_s=timeout_s)

    async def row(
        self, statement: str, *arguments: object, timeout_s: float | None = None
    ) -> asyncpg.Record:
        """Execute a statement that gives exactly one row, and return this row.

        The errors are those of ``rows``.
        """
        (found,) = await self.rows(statement, *arguments, timeout_s=timeout_s)
        return found

    async def run(
        self,
        work: Callable[[Connection], Awaitable[_T]],
        *,
        timeout_s: float | None = None,
    ) -> _T:
        """Call ``work`` with a connection; call it again after a transient error.

        Raises:
            As ``rows``.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._attempt(work, deadline)
            except _FAILURES as error:
                self.failures += 1
                if not _is_transient(error):
                    raise _explained(error) from error
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise DatabaseUnavailableError(
                        f"the cluster's database gave no answer in {limit_s:g} s:"
                        f" {one_line(error)}"
                    ) from error
            # All nodes lose the database at the same time. Random pauses keep them from
            # coming back at the same moment.
            await asyncio.sleep(min(left_s, pause_s * random.uniform(0.5, 1)))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _attempt(
        self, work: Callable[[Connection], Awaitable[_T]], deadline: float
    ) -> _T:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            await self._turns.acquire()
        try:
            connection = await self._connected(deadline)
            return await self._use(connection, work, deadline)
        finally:
            self._turns.release()

    async def _connected(self, deadline: float) -> Connection:
        while self._idle:
            idle = self._idle.pop()
            if not idle.is_closed():
                return idle
        left_s = max(0.0, deadline - time.monotonic())
        connection: Connection = await asyncpg.connect(
            self._url,
            timeout=min(left_s, CONNECT_TIMEOUT_S),
            target_session_attrs=SessionAttribute.read_write,
            server_settings=_SESSION,
        )
        self.sessions += 1
        version = connection.get_server_version()
        if version.major < OLDEST_SERVER:
            connection.terminate()
            raise ClusterError(
                f"the database is PostgreSQL {version.major}; a cluster needs"
                f" {OLDEST_SERVER} or newer"
            )
        connection.add_log_listener(self._note_warning)
        return connection

    def _note_warning(
        self, connection: Any, message: asyncpg.PostgresLogMessage
    ) -> None:
        # The only warning that our statements can get: a commit that did not wait for
        # its standby. It comes before the statement's answer.
        if message.sqlstate == _WARNING:
            self._doubtful.add(connection)

    async def _use(
        self,
        connection: Connection,
        work: Callable[[Connection], Awaitable[_T]],
        deadline: float,
    ) -> _T:
        task = asyncio.ensure_future(work(connection))
        usable = False
        try:
            left_s = max(0.0, deadline - time.monotonic())
            done, _ = await asyncio.wait({task}, timeout=left_s)
            if not done:
                raise TimeoutError("it took too long")
            if connection in self._doubtful:
                raise ConnectionError("a commit did not wait for its standby")
            usable = task.exception() is None
            return task.result()
        finally:
            if usable and not connection.is_closed():
                self._idle.append(connection)
            else:
                # Drop the connection without a message to the server: asyncpg's own way
                # to cancel a call would also end a wait for a standby.
                connection.terminate()
                self._doubtful.discard(connection)
                await asyncio.gather(task, return_exceptions=True)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, asyncpg.PostgresError):
        return str(error.sqlstate).startswith(_TRANSIENT)
    # An error that is also a ValueError is permanent: an argument, the URL or a
    # certificate is wrong.
    return not isinstance(error, ValueError)


def _explained(error: BaseException) -> MpbrokerError:
    """Return the error to raise in place of a database error that a retry cannot cure.

    It tells an operator what to do, if that is known. A value or a row that the
    database refuses concerns one call, and must not end the process that has all.
    """
    state = error.sqlstate if isinstance(error, asyncpg.PostgresError) else ""
    text = one_line(error)
    if state == _GIVEN_UP:
        return ObjectGivenUpError(text)
    if state == _REFUSED:
        return ClusterError(text)
    for states, advice in _ADVICE.items():
        if str(state).startswith(states):
            return ClusterError(f"the cluster's database refuses: {text}; {advice}")
    if isinstance(error, asyncpg.ClientConfigurationError | ssl.SSLError):
        return ClusterError(f"the cluster's database cannot be reached: {text}")
    return ClusterError(f"the cluster's database refuses: {text}")


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class."""
    return str(error).split("\n", 1)[0] or type(error).__name__
