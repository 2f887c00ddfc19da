"""Keep the states of all share-partitions, and write them to __share_group_state.

A share-partition is a partition of a topic, as a share group reads it. Each change of
its state is written as a record (ShareUpdate), and after some hundreds of them the
whole state is written (ShareSnapshot). A hash of the share-partition chooses the
partition of __share_group_state. The share-partitions of this log are served after it
was loaded. They are forgotten if it can no longer be written: only the log counts.

The topic is not compacted. When a partition of it has many records, all its states are
written again, and once these are on disk, the records before them are deleted.

Source: KIP-932; Kafka's ShareCoordinatorShard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.outbox import share_log
from mpbroker.coordinator.share.share_partition import (
    NEVER,
    Limits,
    SharePartition,
    StateBatch,
)
from mpbroker.coordinator.share.share_records import (
    KeyValue,
    ShareKey,
    ShareSnapshotValue,
    ShareUpdateValue,
    batches_of,
    read_share_record,
    rows_of,
    snapshot_record,
    state_partition,
    update_record,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.primitives import Buffer

UNINITIALIZED: Final = -1  # the start offset of a group that has not begun to read
# A log with more records than this, and so many for each of its states, is pruned.
_PRUNE_RECORDS: Final = 10_000
_PRUNE_RECORDS_PER_STATE: Final = 4


class ShareState:
    """Holds the state of one share-partition, and the epochs of its records.

    Attributes:
        share: the delivery state; None: the group has not begun to read the partition.
    """

    __slots__ = (
        "created_ms",
        "share",
        "snapshot_epoch",
        "state_epoch",
        "updates",
        "written_ms",
    )

    def __init__(self, state_epoch: int, created_ms: int) -> None:
        self.share: SharePartition | None = None
        self.state_epoch = state_epoch
        self.snapshot_epoch = 0
        self.created_ms = self.written_ms = created_ms
        self.updates = 0  # the number of updates since the last snapshot

    @property
    def start_offset(self) -> int:
        return UNINITIALIZED if self.share is None else self.share.start_offset


class ShareStates:
    """Keeps the states of share-partitions, by group, topic and partition.

    Args:
        num_partitions: the number of partitions of __share_group_state.
        limits: returns the settings of a group.
        updates_per_snapshot: share.coordinator.snapshot.update.records.per.snapshot.
    """

    def __init__(
        self,
        context: CoordinatorContext,
        num_partitions: int,
        limits: Callable[[str], Limits],
        updates_per_snapshot: int = 500,
    ) -> None:
        self.num_partitions = num_partitions
        self._out = context.outbox
        self._timers = context.timers
        self._limits = limits
        self._updates_per_snapshot = updates_per_snapshot
        self._states: dict[ShareKey, ShareState] = {}
        self._records: dict[int, int] = {}  # the number of records of each partition
        self._loading: set[int] = set()
        self._failed: set[int] = set()
        # Called with a share-partition whose records have become available.
        self.on_available: Callable[[ShareKey, int], None] = lambda key, now_ms: None
        # Called with the number of records whose locks have ended.
        self.on_expired: Callable[[int], None] = lambda records: None
        # They return the end offset of a log, and delete its records before an offset.
        self.log_end: Callable[[int], int] = lambda partition: 0
        self.delete_before: Callable[[int, int], object] = lambda partition, offset: 0

    def __len__(self) -> int:
        return len(self._states)

    def partition_for(self, key: ShareKey) -> int:
        return state_partition(key, self.num_partitions)

    def log_of(self, key: ShareKey) -> int:
        """Return the number of the log with the records of a share-partition."""
        return share_log(self.partition_for(key))

    def get(self, key: ShareKey) -> ShareState | None:
        """Return the state of a share-partition, if it has one.

        Raises:
            ApiError: NOT_LEADER_OR_FOLLOWER: its log is not loaded, or has failed.
        """
        partition = self.partition_for(key)
        if partition in self._loading or partition in self._failed:
            raise ApiError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER, "The share partition is not loaded."
            )
        return self._states.get(key)

    def keys_of(self, group_id: str) -> list[ShareKey]:
        """Return the share-partitions of a group that have a state."""
        return [key for key in self._states if key.group_id == group_id]

    # -- changes -----------------------------------------------------------------------

    def begin(
        self, key: ShareKey, start_offset: int, state_epoch: int, now_ms: int
    ) -> ShareState:
        """Reset the state of a share-partition: the group reads it from an offset on.

        Args:
            start_offset: the first offset; UNINITIALIZED: the first fetch chooses it.
        """
        state = ShareState(state_epoch, now_ms)
        if (old := self._states.get(key)) is not None:
            state.snapshot_epoch = old.snapshot_epoch + 1
        if start_offset != UNINITIALIZED:
            state.share = SharePartition(start_offset)
        self._states[key] = state
        self._timers.cancel(("share locks", key))
        self._write_snapshot(key, state, now_ms)
        return state

    def changed(
        self, key: ShareKey, batches: Iterable[StateBatch], now_ms: int
    ) -> None:
        """Write the changes of a share-partition's state; set the timer of its locks.

        Args:
            batches: the changed states of records.
        """
        state = self._states[key]
        share = state.share
        assert share is not None
        state.updates += 1
        if state.updates > self._updates_per_snapshot:
            state.snapshot_epoch += 1
            self._write_snapshot(key, state, now_ms)
        else:
            value = ShareUpdateValue(
                snapshot_epoch=state.snapshot_epoch,
                leader_epoch=0,
                start_offset=share.start_offset,
                delivery_complete_count=share.finished_count,
                state_batches=rows_of(
                    each for each in batches if each.last >= share.start_offset
                ),
            )
            self._write(key, update_record(key, value), now_ms)
        self.watch_locks(key, now_ms)

    def write(
        self,
        key: ShareKey,
        state_epoch: int,
        start_offset: int,
        batches: Iterable[StateBatch],
        now_ms: int,
    ) -> None:
        """Apply the changes of a WriteShareGroupState request; end acquisition locks.

        Args:
            start_offset: the new start offset; UNINITIALIZED: do not change it.
        """
        state = self._states.get(key)
        if state is None or (state.share is None and start_offset != UNINITIALIZED):
            state = self.begin(key, start_offset, state_epoch, now_ms)
        state.state_epoch = state_epoch
        if state.share is not None:
            least = state.share.start_offset
            state.share.apply(max(least, start_offset), batches)
        state.snapshot_epoch += 1
        self._write_snapshot(key, state, now_ms)
        self.watch_locks(key, now_ms)
        self.on_available(key, now_ms)

    def _write_snapshot(self, key: ShareKey, state: ShareState, now_ms: int) -> None:
        """Write a whole state as one record, however long.

        Records before it are deleted once it is on disk (_prune), so it must have all.
        Several records would not do: after a kill between them there is but a part.
        """
        state.updates, state.written_ms = 0, now_ms
        share = state.share
        batches = [] if share is None else share.state_batches()
        value = ShareSnapshotValue(
            snapshot_epoch=state.snapshot_epoch,
            state_epoch=state.state_epoch,
            leader_epoch=0,
            start_offset=state.start_offset,
            delivery_complete_count=0 if share is None else share.finished_count,
            create_timestamp=state.created_ms,
            write_timestamp=now_ms,
            state_batches=rows_of(batches),
        )
        self._write(key, snapshot_record(key, value), now_ms)

    def _write(self, key: ShareKey, record: KeyValue, now_ms: int) -> None:
        partition = self.partition_for(key)
        self._out.write(share_log(partition), *record)
        self._records[partition] = records = self._records.get(partition, 0) + 1
        if records > _PRUNE_RECORDS:
            self._timers.schedule(
                ("share prune", partition), now_ms, lambda at_ms: self._prune(partition)
            )

    def _prune(self, partition: int) -> None:
        """Shorten a log: write all states in it anew, and delete the records before.

        It is a partition of __share_group_state.
        """
        if partition in self._loading or partition in self._failed:
            return
        keys = [key for key in self._states if self.partition_for(key) == partition]
        if self._records[partition] < _PRUNE_RECORDS_PER_STATE * len(keys):
            return
        self._records[partition] = 0
        # Everything that is not appended yet comes behind this offset: the snapshots
        # that follow here, and the records that are in the outbox now.
        end = self.log_end(partition)
        for key in keys:
            state = self._states[key]
            state.snapshot_epoch += 1
            self._write_snapshot(key, state, state.written_ms)

        def delete(durable: bool) -> None:
            # Only if the snapshots are on disk: otherwise a power cut could take both
            # the old records and the snapshots.
            if durable:
                self.delete_before(partition, end)

        self._out.then((share_log(partition),), delete)

    def delete(self, key: ShareKey) -> None:
        """Delete the state of a share-partition."""
        if self._states.pop(key, None) is not None:
            self._timers.cancel(("share locks", key))
            self._out.write(self.log_of(key), *snapshot_record(key, None))

    def topic_deleted(self, topic_id: bytes) -> None:
        """Delete the share groups' states in a topic that was deleted."""
        for key in [key for key in self._states if key.topic_id == topic_id]:
            self.delete(key)

    # -- locks -------------------------------------------------------------------------

    def watch_locks(self, key: ShareKey, now_ms: int) -> None:
        """Set a timer for the end of a share-partition's first acquisition lock.

        The lock keeps acquired records for one member. If there is no lock, leave a
        timer that is set: it finds nothing when it is due. Mostly, the next fetch
        acquires records before that, and then only the timer's deadline is moved.
        """
        state = self._states.get(key)
        if state is None or state.share is None:
            return
        deadline_ms = state.share.next_deadline_ms
        if deadline_ms != NEVER:
            self._timers.schedule(
                ("share locks", key), deadline_ms, partial(self._expire, key)
            )

    def _expire(self, key: ShareKey, now_ms: int) -> None:
        state = self._states.get(key)
        if state is None or state.share is None:
            return
        released = state.share.expire(self._limits(key.group_id), now_ms)
        if not released:
            self.watch_locks(key, now_ms)
            return
        self.on_expired(sum(each.last - each.first + 1 for each in released))
        self.changed(key, released, now_ms)
        self.on_available(key, now_ms)

    def release(self, member_id: str, key: ShareKey, now_ms: int) -> bool:
        """Release the records that a member has acquired in a share-partition.

        Return whether there were any.
        """
        state = self._states.get(key)
        if state is None or state.share is None or not state.share.holds_of(member_id):
            return False
        released = state.share.release(member_id, self._limits(key.group_id))
        if released:
            self.changed(key, released, now_ms)
            self.on_available(key, now_ms)
        return bool(released)

    # -- the log -----------------------------------------------------------------------

    def begin_loading(self, partitions: Iterable[int]) -> None:
        """Stop serving the share-partitions of these logs until they are loaded."""
        self._loading.update(partitions)
        self._failed.difference_update(self._loading)

    def replay(self, key: Buffer, value: Buffer | None) -> None:
        """Apply a record of __share_group_state; records come in the log's order.

        Raises:
            ProtocolError: the record cannot be read.
        """
        read = read_share_record(key, value)
        if read is None:
            return
        share_key, message = read
        partition = self.partition_for(share_key)
        self._records[partition] = self._records.get(partition, 0) + 1
        if message is None:
            self._states.pop(share_key, None)
        elif isinstance(message, ShareSnapshotValue):
            state = ShareState(message.state_epoch, message.create_timestamp)
            state.snapshot_epoch = message.snapshot_epoch
            if message.start_offset != UNINITIALIZED:
                state.share = SharePartition(
                    message.start_offset, batches_of(message.state_batches)
                )
            self._states[share_key] = state
        else:
            known = self._states.get(share_key)
            if known is None or message.snapshot_epoch != known.snapshot_epoch:
                return  # it belongs to a snapshot that was deleted
            known.updates += 1
            if known.share is None:
                known.share = SharePartition(message.start_offset)
            known.share.apply(message.start_offset, batches_of(message.state_batches))

    def loaded(self, partition: int, now_ms: int) -> None:
        """Serve the share-partitions of a log, after all its records were replayed."""
        self._loading.discard(partition)

    def failed(self, partition: int) -> None:
        """Forget the share-partitions of a log that cannot be loaded or written."""
        self._failed.add(partition)
        for key in [k for k in self._states if self.partition_for(k) == partition]:
            del self._states[key]
            self._timers.cancel(("share locks", key))
        self._out.records.pop(share_log(partition), None)
