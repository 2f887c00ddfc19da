"""ShardTopic: what stands for __consumer_offsets where a broker is a node of a cluster.

The records of groups are in the cluster's database, in shards. A shard is used like a
partition of the topic: its number is the partition's. The node has some of them, which
come and go. A thread does all that takes time (cluster/groups/group_store.py); this
object takes its events and tells the coordinator of them.

An append gives the records to the thread, and the log end offset counts the appends.
The durable end offset follows when they are in the database. They get there without
being asked for, so a shard is never synced.

    taken      requests for its groups are answered COORDINATOR_LOAD_IN_PROGRESS
    loaded     its records are here; the coordinator applies them, then serves
    stopped    the node gives it away: NOT_COORDINATOR. What was appended is written yet
    lost       NOT_COORDINATOR; what was not written is refused

All shards are dropped when the database has not said for some seconds that the node has
them: another node may have them by then.

The offsets of open transactions are records of a shard, too: see `pending_records`.
The node that coordinates a transaction tells how it ends. The end stays in the database
until the shard has written what it means.

What has not been taken since the start counts as being loaded, until the database says
that another node has it, or is to have it, or says nothing for some seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from mpbroker.cluster.groups.group_store import (
    GroupStore,
    Held,
    Loaded,
    Lost,
    ShardTerm,
    Spare,
    Taken,
    Written,
)
from mpbroker.cluster.groups.transaction_exchange import (
    Answered,
    Asked,
    Ended,
    Ends,
    ShardEnd,
)
from mpbroker.cluster.membership import boot_time
from mpbroker.coordinator.coordinator_topic import LoadedRecord
from mpbroker.coordinator.pending_records import PendingRecords
from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.cluster_nodes import GROUP_SHARD_COUNT
from mpbroker.metadata.log_config import LogConfig
from mpbroker.metadata.topic_names import OFFSETS_TOPIC
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

if TYPE_CHECKING:
    from mpbroker.cluster.groups.transaction_exchange import ExchangeEvent
    from mpbroker.coordinator.outbox import TransactionalRecord

# Far from the rows of partitions.
_FIRST_INDEX: Final = 1 << 40
# So many records of a load are applied in one step.
_STEP_RECORDS: Final = 2000
# When the database has been silent for so long, shards that are not taken yet, and that
# this node had before, may be on other nodes.
_SILENCE_S: Final = 5.0
_CONFIG: Final = LogConfig()


class ShardRow:
    """How far a shard is written; see ``WrittenRow``."""

    __slots__ = ("durable_end_offset", "index", "log_end_offset", "status")

    def __init__(self, index: int) -> None:
        self.index = index
        self.log_end_offset = 0
        self.durable_end_offset = 0
        self.status: int = RowStatus.ONLINE

    def take_waiters(self) -> int:
        return 0  # nobody can fetch a shard


class ShardView:
    """A shard's settings: answers wait until its records are in the database."""

    config: Final = _CONFIG

    def require_online(self) -> None:
        return


class ShardLog:
    """A shard in one term, as a log."""

    __slots__ = ("ends", "pending", "row", "term", "view")

    def __init__(self, term: ShardTerm) -> None:
        self.term = term
        self.pending = PendingRecords()
        # The serials of ends of transactions that are appended.
        self.ends: set[int] = set()
        self.row = ShardRow(_FIRST_INDEX + term.serial)
        self.view = ShardView()


def _ignore(number: int) -> None:
    return


class ShardTopic:
    """The shards that this node has.

    Args:
        store: the thread, which `start` starts.
        clock: returns seconds, as `boot_time`.

    Attributes:
        on_taken, on_loaded, on_lost: called with the number of a shard.
        on_written: called with a row's index when more is in the database, or when the
            shard is lost.
        on_exchange: called with what other nodes tell about transactions.
    """

    name: Final = OFFSETS_TOPIC
    num_partitions: Final = GROUP_SHARD_COUNT
    has_changed: Final = False
    looks_again: Final = False

    def __init__(
        self, store: GroupStore, clock: Callable[[], float] = boot_time
    ) -> None:
        self._store = store
        self._clock = clock
        self.event_fd = store.event_fd
        self._logs: dict[int, ShardLog] = {}  # that may be appended to
        # These, and those that are stopped, and whose writes are on their way.
        self._by_term: dict[ShardTerm, ShardLog] = {}
        self._loaded: dict[int, Sequence[tuple[bytes, bytes]]] = {}
        self._held_until_s = 0.0
        # Neither taken nor said to be elsewhere, since the start.
        self._unknown = set(range(self.num_partitions))
        self._unknown_until_s = math.inf
        self._is_ending = False
        self._ends: Sequence[ShardEnd] = ()
        self.on_taken: Callable[[int], object] = _ignore
        self.on_loaded: Callable[[int], object] = _ignore
        self.on_lost: Callable[[int], object] = _ignore
        self.on_written: Callable[[int], object] = _ignore
        self.on_exchange: Callable[[ExchangeEvent], object] = lambda event: None

    def start(self) -> None:
        """Begin to take shards."""
        self._unknown_until_s = self._clock() + _SILENCE_S
        self._store.start()

    def end(self) -> None:
        """Write what was appended, release all shards, and wait until it is done."""
        self._store.end()

    # -- events --------------------------------------------------------------------

    def go_on(self) -> None:
        """Take the events that have come; drop all shards if the node may lose them.

        Raises:
            RuntimeError: the thread has failed.
        """
        for event in self._store.take_events():
            match event:
                case Written(term, puts):
                    self._note_written(term, puts)
                case Taken(term):
                    self._logs[term.number] = self._by_term[term] = ShardLog(term)
                    self._unknown.discard(term.number)
                    self.on_taken(term.number)
                case Loaded(term, records):
                    if self._is_current(term):
                        self._loaded[term.number] = records
                        self.on_loaded(term.number)
                case Spare(term):
                    if self._is_current(term):
                        self._stop(self._logs[term.number])
                case Lost(term):
                    self._forget(term)
                case Ends(ends):
                    self._note_transactions(ends)
                case Asked() | Answered() | Ended():
                    self.on_exchange(event)
                case Held(until_s, numbers):
                    self._held_until_s = until_s
                    self._unknown_until_s = self._clock() + _SILENCE_S
                    self._note_elsewhere(self._unknown - numbers)
        if self._clock() > self._unknown_until_s:
            self._note_elsewhere(self._unknown)
        if self._by_term and self._clock() > self._held_until_s:
            # While this process ends, no Held comes any more. What it has stopped is
            # still written: the database refuses it if another node has the shard.
            for term in [
                each
                for each in self._by_term
                if not self._is_ending or self._is_current(each)
            ]:
                self._store.drop(term)
                self._forget(term)

    def _note_transactions(self, ends: Sequence[ShardEnd]) -> None:
        """Take the ends that are in the database, all of them."""
        self._ends = ends
        serials = {each.serial for each in ends}
        for log in self._logs.values():
            log.ends &= serials  # the others are gone for good

    def ends_to_append(self) -> list[ShardEnd]:
        """Return the ends of transactions that are not appended yet."""
        return [
            each
            for each in self._ends
            if (log := self._logs.get(each.end.shard)) is not None
            and log.term.serial == each.term
            and each.serial not in log.ends
        ]

    def append_end(self, wanted: ShardEnd) -> tuple[ShardLog, int]:
        """Have a transaction's offsets in a shard committed, or dropped.

        Args:
            wanted: from `ends_to_append`, for a shard that is loaded.

        Raises:
            ApiError: NOT_COORDINATOR: the node does not have the shard.
        """
        end = wanted.end
        log = self.log_of(end.shard)
        log.ends.add(wanted.serial)
        records = log.pending.end(end.producer_id, commit=end.commit)
        return self._put(log, records, wanted.serial)

    def _is_current(self, term: ShardTerm) -> bool:
        log = self._logs.get(term.number)
        return log is not None and log.term == term

    def _note_elsewhere(self, numbers: Iterable[int]) -> None:
        """Tell of shards of other nodes, as soon as it is known which these are."""
        for number in sorted(numbers):
            self._unknown.discard(number)
            self.on_lost(number)

    def _note_written(self, term: ShardTerm, puts: int) -> None:
        log = self._by_term.get(term)
        if log is None:
            return
        log.row.durable_end_offset = puts
        if puts == log.row.log_end_offset and not self._is_current(term):
            del self._by_term[term]  # it was stopped, and all is written
        self.on_written(log.row.index)

    def _stop(self, log: ShardLog) -> None:
        """Serve a shard no more; it is released when all is written."""
        number = log.term.number
        del self._logs[number]
        self._loaded.pop(number, None)
        if log.row.durable_end_offset == log.row.log_end_offset:
            del self._by_term[log.term]
        self.on_lost(number)
        self._store.stop(log.term)

    def _forget(self, term: ShardTerm) -> None:
        log = self._by_term.pop(term, None)
        if log is None:
            return
        log.row.status = RowStatus.OFFLINE
        if self._is_current(term):
            del self._logs[term.number]
            self._loaded.pop(term.number, None)
            self.on_lost(term.number)
        self.on_written(log.row.index)  # what waits for it fails

    def drop(self, number: int) -> None:
        """Forget a shard, if the node has it: it is loaded again if it still has it."""
        log = self._logs.get(number)
        if log is not None:
            self._store.drop(log.term)
            self._forget(log.term)

    def stop_all(self) -> None:
        """Give all shards away, and take none any more: the broker stops."""
        if not self._is_ending:
            self._is_ending = True
            self._store.take_no_more()
        for log in list(self._logs.values()):
            self._stop(log)

    # -- as a topic ------------------------------------------------------------------

    def partitions_to_load(self) -> list[int]:
        return []  # events tell what is to be loaded

    def log_of(self, partition: int) -> ShardLog:
        """Return the log of a shard.

        Raises:
            ApiError: NOT_COORDINATOR: the node does not have it.
        """
        log = self._logs.get(partition)
        if log is None:
            raise ApiError(
                ErrorCode.NOT_COORDINATOR, f"shard {partition} is not this node's"
            )
        return log

    def append(
        self, partition: int, records: list[tuple[bytes, bytes | None]], now_ms: int
    ) -> tuple[ShardLog, int]:
        """Have records written; return the log, and the offset behind them.

        Raises:
            ApiError: NOT_COORDINATOR: the node does not have the shard.
        """
        log = self.log_of(partition)
        return self._put(log, [*records, *log.pending.outdo(records)])

    def append_transactional(
        self, partition: int, records: Sequence[TransactionalRecord], now_ms: int
    ) -> tuple[ShardLog, int]:
        """Have offsets written that wait for the ends of their transactions.

        Raises:
            ApiError: as `append`.
        """
        log = self.log_of(partition)
        return self._put(log, log.pending.put(records))

    def _put(
        self,
        log: ShardLog,
        records: list[tuple[bytes, bytes | None]],
        *end: int,
    ) -> tuple[ShardLog, int]:
        self._store.put(log.term, records, *end)
        log.row.log_end_offset += 1
        return log, log.row.log_end_offset

    def load(self, partition: int) -> Iterator[list[LoadedRecord]]:
        """Return the records of a shard that was loaded, in steps."""
        records = self.log_of(partition).pending.load(self._loaded.pop(partition, ()))
        for start in range(0, len(records), _STEP_RECORDS):
            yield records[start : start + _STEP_RECORDS]
