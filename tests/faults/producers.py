"""Producers that remember what was acknowledged, and readers that hold a log to it.

Every record carries its producer's name and a number that goes up by one a record, so
that the log can be asked for each of them: once, and in order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from tests.bench import wire
from tests.support.patience import LONGEST_S
from tests.support.promises import promised

RETRY_PAUSE_S: Final = 0.005
RECORDS_A_BATCH: Final = 3


class Producer:
    """Produces batches one after another, in a thread of its own.

    An idempotent one sends an unanswered batch again, under the same sequence, until
    it is acknowledged. Another cannot know what became of it, and goes on to the next.

    Attributes:
        acknowledged: the numbers of acknowledged records, with their offsets.
        in_doubt: the numbers of records whose answer never came.
        losses: how often the connection broke.
        complaint: what else went wrong, or None.
    """

    def __init__(
        self,
        address: tuple[str, int],
        topic: str,
        partition: int,
        name: str,
        *,
        idempotent: bool,
        acks: int = -1,
    ) -> None:
        self.name = name
        self.partition = partition
        self.idempotent = idempotent
        self.acknowledged: dict[int, int] = {}
        self.in_doubt: set[int] = set()
        self.losses = 0
        self.complaint: str | None = None
        self.longest_s = 0.0
        self._address = address
        self._topic = topic
        self._acks = acks
        self._next = 0
        self._sequence = 0
        self._producer_id = (-1, -1)
        self._connection: wire.Connection | None = None
        self._stop = threading.Event()
        self._dead_broker = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, address: tuple[str, int] | None = None) -> None:
        """Produce from now on, at this address if the broker has moved."""
        self._address = address or self._address
        self._stop.clear()
        self._dead_broker.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self, *, broker_is_dead: bool = False) -> None:
        """Stop after the batch under way; give it up if nobody can answer any more."""
        if broker_is_dead:
            self._dead_broker.set()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._disconnect()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._send_batch()
        except (wire.AnswerError, OSError) as error:
            self.complaint = f"{self.name}: {error!r}"

    def _send_batch(self) -> None:
        numbers = range(self._next, self._next + RECORDS_A_BATCH)
        began = time.monotonic()
        while True:
            try:
                offset = self._ask(numbers)
                break
            except OSError:
                self.losses += 1
                self._disconnect()
                if self._dead_broker.is_set():
                    # Sent again after the restart if idempotent: not yet in doubt.
                    if not self.idempotent:
                        self._give_up(numbers)
                    return
                if time.monotonic() - began > LONGEST_S:
                    raise
                if not self.idempotent:
                    self._give_up(numbers)
                    return
                time.sleep(RETRY_PAUSE_S)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self._next = numbers.stop
        self._sequence += RECORDS_A_BATCH
        for index, number in enumerate(numbers):
            self.acknowledged[number] = offset + index

    def _give_up(self, numbers: range) -> None:
        self.in_doubt.update(numbers)
        self._next = numbers.stop

    def _ask(self, numbers: range) -> int:
        if self._connection is None:
            self._connection = self._connect()
        if self.idempotent and self._producer_id[0] < 0:
            self._producer_id = self._connection.init_producer_id()
        values = [wire.RecordSpec(f"{self.name}:{n}".encode()) for n in numbers]
        producer_id, epoch = self._producer_id
        batch = wire.record_batch(
            values,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=self._sequence if self.idempotent else -1,
        )
        request = wire.produce(self._topic, self.partition, batch, self._acks)
        answer = wire.parse_produce(self._connection.ask(request))
        if answer.error_code:
            raise wire.AnswerError(f"produce: error {answer.error_code}")
        return answer.base_offset

    def _connect(self) -> wire.Connection:
        deadline = time.monotonic() + LONGEST_S
        while True:
            try:
                return wire.Connection(self._address, LONGEST_S)
            except OSError:
                if self._dead_broker.is_set() or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_PAUSE_S)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Ledger:
    """Checks what the log holds against what the producers were told."""

    def __init__(self, topic: str, producers: Sequence[Producer]) -> None:
        self._topic = topic
        self._producers = producers
        # Read so far, by partition: where to go on, and the last number by producer.
        self._offsets: dict[int, int] = {}
        self._last: dict[str, int] = {}
        self._seen: dict[str, dict[int, int]] = {p.name: {} for p in producers}

    def check(self, address: tuple[str, int]) -> int:
        """Read what was appended since the last check; return how many records.

        Only between stops of the producers: whatever is acknowledged by then must be
        there, at the offset it was acknowledged with.

        Raises:
            UnforgivableError: a record is lost, doubled, out of order or unknown.
            AssertionError: a producer had to give up.
        """
        count = 0
        with wire.Connection(address, LONGEST_S) as connection:
            for partition in sorted({p.partition for p in self._producers}):
                offset = self._offsets.get(partition, 0)
                records = connection.read_all(self._topic, partition, offset)
                for record in records:
                    self._take(record)
                self._offsets[partition] = offset + len(records)
                count += len(records)
        for producer in self._producers:
            assert producer.complaint is None, producer.complaint
            self._compare(producer)
        return count

    @promised("the log holds each record once, in the order in which it was sent")
    def _take(self, record: wire.StoredRecord) -> None:
        assert record.value is not None, f"offset {record.offset} has no value"
        name, _, text = record.value.decode().rpartition(":")
        number = int(text)
        seen = self._seen[name]
        assert number not in seen, (
            f"{name}:{number} is at offset {seen[number]} and again at {record.offset}"
        )
        last = self._last.get(name, -1)
        assert number > last, f"{name}:{number} at {record.offset} comes after {last}"
        self._last[name] = number
        seen[number] = record.offset

    @promised("every acknowledged record is in the log, where it was said to be")
    def _compare(self, producer: Producer) -> None:
        seen = self._seen[producer.name]
        for number, offset in producer.acknowledged.items():
            assert number in seen, (
                f"{producer.name}:{number}, acknowledged at offset {offset}, is lost"
            )
            assert seen[number] == offset, (
                f"{producer.name}:{number} was acknowledged at offset {offset} and is "
                f"at {seen[number]}"
            )
        unknown = seen.keys() - producer.acknowledged.keys() - producer.in_doubt
        if producer.idempotent:
            # Its last batch may be in the log already and be acknowledged later.
            unknown = {n for n in unknown if n > max(producer.acknowledged, default=-1)}
            assert len(unknown) <= RECORDS_A_BATCH, sorted(unknown)[:10]
        else:
            assert not unknown, f"never sent: {sorted(unknown)[:10]}"
