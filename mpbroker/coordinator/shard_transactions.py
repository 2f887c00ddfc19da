"""ShardTransactions: offsets of groups in transactions, between the nodes of a cluster.

A group's coordinator asks the transaction's coordinator, mostly another node, whether a
producer may commit offsets. It writes them only in the term in which it has asked, and
only if no end of the transaction has come meanwhile. Otherwise offsets could be written
behind the end of their transaction, and would be pending for ever.

A transaction's coordinator tells shards how transactions end. An end is open until the
shard has written it; the producer's next transaction cannot begin before.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.cluster.groups.transaction_exchange import (
    Answered,
    Asked,
    Ended,
    ExchangeEvent,
    OffsetsEnd,
    Question,
)
from mpbroker.protocol.error_code import ErrorCode

if TYPE_CHECKING:
    from mpbroker.cluster.groups.group_store import GroupStore
    from mpbroker.coordinator.timers import Timers

# A transaction's coordinator that has died comes back later, or not at all.
_PATIENCE_MS: Final = 5000

Done = Callable[[ErrorCode, int], None]


class _Waiting(NamedTuple):
    question: Question
    done: Done


class ShardTransactions:
    """Asks about transactions, and ends them, for the loop of the coordinator.

    Args:
        is_coordinator: returns whether this node coordinates transactions.
        now_ms: returns the time in ms.

    Attributes:
        on_asked: called with each question to this node, and the time.
        on_ended: called with a producer id, whose transaction has ended in a shard, and
            the time; returns whether somebody has waited for that.
    """

    def __init__(
        self,
        store: GroupStore,
        timers: Timers,
        is_coordinator: Callable[[], bool],
        now_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._timers = timers
        self._is_coordinator = is_coordinator
        self._now_ms = now_ms
        self._told = False
        self._waiting: dict[uuid.UUID, _Waiting] = {}
        # By shard and producer: whether the shard has written the end.
        self._ends: dict[tuple[int, int], bool] = {}
        self.on_asked: Callable[[Question, int], object] = lambda question, now_ms: None
        self.on_ended: Callable[[int, int], bool] = lambda producer_id, now_ms: False

    def go_on(self) -> None:
        """Tell the thread if this node has begun, or ceased, to coordinate."""
        now = self._is_coordinator()
        if now != self._told:
            self._told = now
            self._store.coordinate(now)

    def take(self, event: ExchangeEvent) -> None:
        """Take an event of the thread."""
        match event:
            case Asked(questions):
                for each in questions:
                    self.on_asked(each, self._now_ms())
            case Answered(question_id, code):
                self._finish(question_id, ErrorCode(code))
            case Ended(shard, producer_id):
                self._ended(shard, producer_id)

    # -- a group's coordinator -----------------------------------------------------

    def ask(
        self,
        transactional_id: str,
        producer: tuple[int, int],
        shard: int,
        done: Done,
        now_ms: int,
        *,
        adds: bool,
    ) -> None:
        """Ask whether a producer may commit offsets in a shard, in its transaction.

        Args:
            producer: its id and epoch.
            done: called with the answer, and the time. If that is NONE, the caller must
                have the offsets written before it returns.
            adds: whether to add the shard to the transaction.
        """
        number = uuid.uuid4()
        question = Question(number, transactional_id, *producer, shard, adds)
        self._waiting[number] = _Waiting(question, done)
        self._timers.schedule(
            ("question", number),
            now_ms + _PATIENCE_MS,
            lambda at_ms: self._give_up(number, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        )
        self._store.ask(question)

    def _finish(self, question_id: uuid.UUID, code: ErrorCode) -> None:
        waiting = self._waiting.pop(question_id, None)
        if waiting is not None:
            self._timers.cancel(("question", question_id))
            waiting.done(code, self._now_ms())

    def _give_up(self, question_id: uuid.UUID, code: ErrorCode) -> None:
        self._store.forget(question_id)
        self._finish(question_id, code)

    def refuse(self, end: OffsetsEnd) -> None:
        """Refuse the offsets of a transaction that has ended."""
        for each in self._of(end.shard):
            if each.producer_id == end.producer_id and (
                each.producer_epoch <= end.producer_epoch
            ):
                self._give_up(each.id, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)

    def lost(self, shard: int) -> None:
        """Refuse what is asked for a shard that is another node's now, or may be."""
        for each in self._of(shard):
            self._give_up(each.id, ErrorCode.NOT_COORDINATOR)

    def _of(self, shard: int) -> list[Question]:
        asked = [each.question for each in self._waiting.values()]
        return [each for each in asked if each.shard == shard]

    # -- a transaction's coordinator -----------------------------------------------

    def answer(self, question: Question, code: ErrorCode) -> None:
        """Answer a question that `on_asked` was called with."""
        self._store.answer(question.id, int(code))

    def is_ending(self, shard: int, producer_id: int) -> bool:
        """Whether a shard has still to write the end of a producer's transaction."""
        return (shard, producer_id) in self._ends

    def end(self, end: OffsetsEnd) -> bool:
        """End a transaction in a shard; return whether the shard has written it.

        If it has not, call this again after `on_ended`.
        """
        key = end.shard, end.producer_id
        written = self._ends.get(key)
        if written is None:
            # Only once: a second one might come when the transaction has ended, and
            # end the producer's next one.
            self._ends[key] = False
            self._store.end_offsets(end)
        elif written:
            del self._ends[key]
        return bool(written)

    def _ended(self, shard: int, producer_id: int) -> None:
        self._ends[shard, producer_id] = True
        if not self.on_ended(producer_id, self._now_ms()):
            del self._ends[shard, producer_id]
