"""Hold back the answers to produces that the compiled core (C code) has executed.

The core has appended the records and written the answer into the block of the request's
slot, its place in shared memory. With acks=all this answer is sent only when the
records are on disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from mpbroker.ipc.layout import RowStatus
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.produce import ProduceResponse
from mpbroker.server.produce.produce_handler import refuse
from mpbroker.server.purgatory import Purgatory, sync_key
from mpbroker.server.request import Request, parse_request

if TYPE_CHECKING:
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.server.group_commit import GroupCommit
    from mpbroker.storage.log.partition_log import PartitionLog

# Each sync ends, with success or an error. The deadline is for a lost notice of this.
SYNC_DEADLINE_NS: Final = 120 * 1_000_000_000
NOT_WRITTEN: Final = "the log could not be written to disk"
NO_ANSWER: Final = "the disk has not answered"


class CoreProduces:
    """Answers Produce requests whose records C code (the core) has appended."""

    def __init__(
        self, channel: HandlerEnd, purgatory: Purgatory, group_commit: GroupCommit
    ) -> None:
        self._channel = channel
        self._purgatory = purgatory
        self._group_commit = group_commit

    def park(
        self,
        slot: int,
        needed: Sequence[tuple[PartitionLog, int]],
        answer_bytes: int,
        /,
        *,
        at_once: bool = False,
    ) -> None:
        """Send the answer that the C core has written, once the records are on disk.

        This may be at once. Otherwise the request waits, and its slot says PARKED.

        Args:
            slot: the request's slot, which is its entry in shared memory.
            needed: each partition's log, in the order of the request, and the offset
                below which all records must be on disk.
            answer_bytes: length of the answer.
            at_once: whether the client has no other request under way, so that the
                logs may be synced at once.
        """
        deadline = time.monotonic_ns() + SYNC_DEADLINE_NS
        operation = DelayedCoreProduce(self, slot, needed, answer_bytes, deadline)
        if at_once or len(needed) > 1:  # as ProduceService does
            self._group_commit.sync_at_once([log for log, _ in needed])
        for log, _ in needed:
            if operation.try_complete(log.row.index):
                return
        self._channel.park(slot, deadline)
        self._purgatory.watch(operation)

    def complete(self, slot: int, answer_bytes: int) -> None:
        """Send the answer to a Produce unchanged, as the C core has written it."""
        self._channel.unpark(slot)
        self._channel.send_written(slot, answer_bytes)

    def refuse(self, slot: int, answer_bytes: int, failed: Mapping[int, str]) -> None:
        """Put errors into an answer that the C core has written, and send it.

        They are for the partitions whose records could not be written to disk.

        Args:
            slot: the request's slot, which is its entry in shared memory.
            answer_bytes: length of the answer.
            failed: the reason, by the partition's place in the request.
        """
        request = self.request(slot)
        version = request.api_version
        written = self._channel.written(slot, answer_bytes)
        response = ProduceResponse.decode(version, written[len(request.frame(b"")) :])
        answers = [
            partition
            for topic in response.responses
            for partition in topic.partition_responses
        ]
        for ordinal, why in failed.items():
            refuse(answers[ordinal], ErrorCode.KAFKA_STORAGE_ERROR, why)
        # The new answer goes where the old one is read from: encode before sending.
        body = response.encode(version)
        self._channel.unpark(slot)
        self._channel.send_bytes(slot, request.frame(body))

    def request(self, slot: int) -> Request:
        """Parse and return the request in a slot (its entry in shared memory)."""
        return parse_request(*self._channel.request(slot))

    def want_sync(self, log: PartitionLog) -> None:
        self._group_commit.want(log)


class DelayedCoreProduce:
    """Keeps a Produce that C code has executed, until its records are on disk."""

    may_end_early = False

    def __init__(
        self,
        produces: CoreProduces,
        slot: int,
        needed: Sequence[tuple[PartitionLog, int]],
        answer_bytes: int,
        deadline_ns: int,
    ) -> None:
        self._produces = produces
        self.slot = slot
        # Row -> the partition's place in the request; log, and what must be on disk.
        self._waiting = {
            log.row.index: (ordinal, log, offset)
            for ordinal, (log, offset) in enumerate(needed)
        }
        self._failed: dict[int, str] = {}
        self._answer_bytes = answer_bytes
        self.deadline_ns = deadline_ns
        self.done = False
        self.keys: Iterable[int] = [sync_key(index) for index in self._waiting]

    @property
    def request(self) -> Request:
        return self._produces.request(self.slot)

    def try_complete(self, row: int) -> bool:
        wanted = self._waiting.get(row)
        if wanted is not None:
            ordinal, log, offset = wanted
            if log.row.status != RowStatus.ONLINE:
                self._failed[ordinal] = NOT_WRITTEN
                del self._waiting[row]
            elif log.row.durable_end_offset >= offset:
                del self._waiting[row]
            else:
                self._produces.want_sync(log)  # too late for the last one
        if self._waiting:
            return False
        self._complete()
        return True

    def expire(self) -> None:
        for ordinal, _, _ in self._waiting.values():
            self._failed[ordinal] = NO_ANSWER
        self._complete()

    def _complete(self) -> None:
        if self._failed:
            self._produces.refuse(self.slot, self._answer_bytes, self._failed)
        else:
            self._produces.complete(self.slot, self._answer_bytes)
