"""TransactionExchange: carries messages between nodes about offsets in transactions.

One node of a cluster coordinates transactions: it has __transaction_state. A group's
coordinator is any node: it has the group's shard. They talk by two tables of the
database, in which each of them looks a few times a second, and quickly while there is
something to wait for:

    group's shard                                  transaction's coordinator
    ask()        ── transaction_question ───────▶  Asked
    Answered     ◀──────────────────────────────── answer()
    Ends         ◀── transaction_end ───────────── end()
    written()    ── deletes the row ────────────▶  Ended

An end stays in its table until the shard has written it. So it does not matter who of
the two dies when: the next owner of the shard finds the end, and the next process of
the transaction's coordinator, which finds the decision in its log, writes it again if
it is gone. The shard then has nothing left to do for it.

A late write of an end must not meet the producer's next transaction, which may have the
same epoch. So the coordinator's epoch in the database is raised before a write is
repeated, and by each new process: earlier writes are done by then, or are refused.

All this runs in the thread of `group_store`, and all methods are called there.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from mpbroker.base.logger import get_logger
from mpbroker.cluster.database import ClusterDatabase, Connection
from mpbroker.cluster.errors import ClusterError, DatabaseUnavailableError
from mpbroker.metadata.cluster_nodes import NodeEpoch, read_node_epoch

_LOG = get_logger(__name__)
# The longest wait for another node's look into a table: as often as the copies of
# shared topics are brought up to date, and more seldom where nothing has come for long.
_QUICK_S: Final = 0.02
_IDLE_S: Final = 0.2
_QUICK_FOR_S: Final = 10.0
_CALL_TIMEOUT_S: Final = 4.0


class Question(NamedTuple):
    """May a producer commit offsets in a shard, as a part of its transaction?

    Attributes:
        adds: whether the shard is added to the transaction; if not, it must be in it.
    """

    id: uuid.UUID
    transactional_id: str
    producer_id: int
    producer_epoch: int
    shard: int
    adds: bool


class OffsetsEnd(NamedTuple):
    """A transaction that may have offsets in a shard was decided."""

    shard: int
    producer_id: int
    producer_epoch: int
    commit: bool


class Asked(NamedTuple):
    """Other nodes, or this one, have asked this node's transaction coordinator."""

    questions: Sequence[Question]


class Answered(NamedTuple):
    """A question of this node has its answer, an error code; 0: it may."""

    id: uuid.UUID
    code: int


class ShardEnd(NamedTuple):
    """An end that a shard of this node has still to write.

    Attributes:
        serial: another one for each end.
        term: the serial of the term in which this node has had the shard since before
            the database was asked.
    """

    serial: int
    term: int
    end: OffsetsEnd


class Ends(NamedTuple):
    """All ends that shards of this node have still to write, as of now.

    The answer of an `Answered` that follows was given before the database was asked for
    these.
    """

    ends: Sequence[ShardEnd]


class Ended(NamedTuple):
    """A shard has written the end of a producer's transaction."""

    shard: int
    producer_id: int


ExchangeEvent = Asked | Answered | Ends | Ended


class TransactionExchange:
    """Talks with other nodes about offsets in transactions.

    Args:
        epoch_path: the file with the node's epoch.
        tell: called with each event.
        terms: returns the shards that this node has, with the serials of their terms.

    Attributes:
        is_coordinator: whether this node coordinates the cluster's transactions.
    """

    def __init__(
        self,
        epoch_path: str,
        tell: Callable[[ExchangeEvent], None],
        terms: Callable[[], Mapping[int, int]],
    ) -> None:
        self._epoch_path = epoch_path
        self._tell = tell
        self._terms = terms
        self.is_coordinator = False
        self._wake = asyncio.Event()
        self._quick_until_s = 0.0
        # This node's questions: not in the database yet, without an answer, answered.
        self._to_ask: dict[uuid.UUID, Question] = {}
        self._asked: set[uuid.UUID] = set()
        self._known: set[uuid.UUID] = set()
        self._answered: list[Answered] = []  # not told yet
        # The other nodes' questions: told of, and with an answer that is to be written.
        self._told: set[uuid.UUID] = set()
        self._answers: dict[uuid.UUID, int] = {}
        # Ends of this node's coordinator: to write, and written.
        self._to_end: dict[tuple[int, int], OffsetsEnd] = {}
        self._ended: set[tuple[int, int]] = set()
        self._fenced: tuple[NodeEpoch, int] | None = None
        # Ends that shards of this node have written.
        self._done: set[int] = set()
        self._had_ends = False
        self._complained = ""

    # -- what the loop asks for ----------------------------------------------------

    def ask(self, question: Question) -> None:
        """Ask the transaction's coordinator; `Answered` follows, if it is there."""
        self._to_ask[question.id] = question
        self._hurry()

    def forget(self, question_id: uuid.UUID) -> None:
        """Wait no longer for the answer to a question."""
        self._to_ask.pop(question_id, None)
        self._asked.discard(question_id)

    def answer(self, question_id: uuid.UUID, code: int) -> None:
        """Answer a question that `Asked` has told of."""
        self._answers[question_id] = code
        self._hurry()

    def end(self, end: OffsetsEnd) -> None:
        """Tell a shard how a transaction ends; `Ended` follows when it has written it.

        The decision must be on disk, and the producer must not begin its next
        transaction in the shard before `Ended`.
        """
        key = end.shard, end.producer_id
        if key not in self._ended:
            self._to_end[key] = end
        self._hurry()

    def coordinate(self, is_coordinator: bool) -> None:
        """Note whether this node coordinates the cluster's transactions."""
        self.is_coordinator = is_coordinator
        self._hurry()

    def written(self, serials: Iterable[int]) -> None:
        """Note that ends of `Ends` are in the database, with all that follows."""
        self._done.update(serials)
        self._hurry()

    def _hurry(self) -> None:
        self._quick_until_s = time.monotonic() + _QUICK_FOR_S
        self._wake.set()

    # -- the thread's task ---------------------------------------------------------

    async def run(self, database: ClusterDatabase) -> None:
        """Exchange questions, answers and ends, until this task is cancelled."""
        while True:
            self._wake.clear()
            try:
                await self._look(database)
                self._complained = ""
            except DatabaseUnavailableError:
                pass  # told by the process that has the node's lease
            except (ClusterError, OSError) as error:
                if str(error) != self._complained:
                    self._complained = str(error)
                    _LOG.error("no offsets are committed in transactions: %s", error)
                self._quick_until_s = 0.0
            is_quick = time.monotonic() < self._quick_until_s
            # What came while the database was asked does not wait for the next look.
            pause_s = _QUICK_S if is_quick else _IDLE_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    async def _look(self, database: ClusterDatabase) -> None:
        node = read_node_epoch(self._epoch_path)
        if node is None:
            return
        await self._write_answers(database)
        await self._write_ends(database, node)
        await self._drop_ends(database)
        await self._ask(database)
        await self._look_for_ends(database)
        if self.is_coordinator:
            await self._look_for_questions(database)

    async def _call(
        self, database: ClusterDatabase, statement: str, *arguments: object
    ) -> list[tuple[Any, ...]]:
        rows = await database.rows(
            f"SELECT * FROM mpbroker.{statement}",
            *arguments,
            timeout_s=_CALL_TIMEOUT_S,
        )
        return [tuple(row) for row in rows]

    # -- a shard's side ------------------------------------------------------------

    async def _ask(self, database: ClusterDatabase) -> None:
        if new := list(self._to_ask.values()):
            columns = zip(
                *((q.id, q.transactional_id.encode(), *q[2:]) for q in new), strict=True
            )
            await self._call(
                database,
                "ask_transactions_v1($1, $2, $3, $4, $5, $6)",
                *map(list, columns),
            )
            for each in new:
                if self._to_ask.pop(each.id, None) is not None:
                    self._asked.add(each.id)
        if not (self._asked or self._known):
            return
        known = list(self._known)
        rows = await self._call(
            database,
            "transaction_answers_v1($1, $2)",
            list(self._asked),
            known,
        )
        self._known.difference_update(known)
        for question_id, code in rows:
            self._known.add(question_id)
            if question_id in self._asked:
                self._asked.remove(question_id)
                self._answered.append(Answered(question_id, code))

    async def _look_for_ends(self, database: ClusterDatabase) -> None:
        """Tell of ends, and then of answers.

        An answer about the producer's next transaction was given when the end of the
        last one was gone. So with such an answer that end must not be known any more:
        it would be taken for the end of the next one.
        """
        terms = self._terms()
        rows: Sequence[tuple[Any, ...]] = ()
        if terms:
            rows = await self._call(database, "transaction_ends_v1($1)", list(terms))
        if rows or self._had_ends:
            self._tell(
                Ends(
                    [
                        ShardEnd(serial, terms[end[0]], OffsetsEnd(*end))
                        for serial, *end in rows
                    ]
                )
            )
        if rows:
            self._quick_until_s = time.monotonic() + _QUICK_FOR_S
        self._had_ends = bool(rows)
        answered, self._answered = self._answered, []
        for each in answered:
            self._tell(each)

    async def _drop_ends(self, database: ClusterDatabase) -> None:
        if done := list(self._done):
            await self._call(database, "drop_transaction_ends_v1($1)", done)
            self._done.difference_update(done)

    # -- the coordinator's side ----------------------------------------------------

    async def _write_answers(self, database: ClusterDatabase) -> None:
        if answers := dict(self._answers):
            await self._call(
                database,
                "answer_transactions_v1($1, $2)",
                list(answers),
                list(answers.values()),
            )
            for each in answers:
                del self._answers[each]

    async def _write_ends(self, database: ClusterDatabase, node: NodeEpoch) -> None:
        ends = dict(self._to_end)
        if not ends:
            return
        columns = [list(column) for column in zip(*ends.values(), strict=True)]

        async def write(connection: Connection) -> tuple[NodeEpoch, int] | None:
            # Used again only when the whole call has succeeded.
            fenced, self._fenced = self._fenced, None
            if fenced is None or fenced[0] != node:
                epoch = await connection.fetchval(
                    "SELECT mpbroker.fence_transaction_ends_v1($1, $2)", *node
                )
                if epoch is None:
                    return None  # the node has just been started again
                fenced = node, epoch
            done: bool = await connection.fetchval(
                "SELECT mpbroker.put_transaction_ends_v1($1, $2, $3, $4, $5)",
                fenced[1],
                *columns,
            )
            return fenced if done else None

        self._fenced = await database.run(write, timeout_s=_CALL_TIMEOUT_S)
        if self._fenced is not None:
            for key in ends:
                del self._to_end[key]
            self._ended.update(ends)

    async def _look_for_questions(self, database: ClusterDatabase) -> None:
        rows = await self._call(database, "transaction_questions_v1()")
        found = [
            Question(question_id, transactional_id.decode("utf-8", "replace"), *others)
            for question_id, transactional_id, *others in rows
        ]
        there = {each.id for each in found}
        new = [each for each in found if each.id not in self._told]
        self._told = there
        if new:
            self._quick_until_s = time.monotonic() + _QUICK_FOR_S
            self._tell(Asked(new))
        if not self._ended:
            return
        left = await self._call(database, "open_transaction_ends_v1()")
        for shard, producer_id in sorted(self._ended.difference(left)):
            self._ended.remove((shard, producer_id))
            self._tell(Ended(shard, producer_id))
