"""What must be true of what readers of committed data were shown.

In the manner of Jepsen's Kafka workload: aborted reads, torn transactions, lost
writes, duplicates, order; and of the log itself, that each marker is there once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from mpbroker.protocol.records.batch_header import iter_batches
from tests.faults.transaction_writers import Outcome, Written

Place = tuple[str, int]
Seen = dict[Place, dict[int, bytes]]  # value by offset


def _consumer(bootstrap: str, isolation: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "log_level": 0,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
        }
    )


class Reader(threading.Thread):
    """Reads committed data while it is written, through all faults."""

    def __init__(self, bootstrap: str, places: Sequence[Place]) -> None:
        super().__init__(daemon=True)
        self.seen: Seen = {place: {} for place in places}
        self.complaints: list[str] = []
        self._address = bootstrap
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def run(self) -> None:
        consumer = _consumer(self._address, "read_committed")
        consumer.assign(
            [TopicPartition(*place, OFFSET_BEGINNING) for place in self.seen]
        )
        last = dict.fromkeys(self.seen, -1)
        while not self._stopping.is_set():
            message = consumer.poll(0.1)
            if message is None or message.error():
                continue
            place = (message.topic(), message.partition())
            offset = message.offset()
            if offset <= last[place]:
                self.complaints.append(f"{place}: {offset} after {last[place]}")
            last[place] = offset
            self.seen[place][offset] = message.value()
        consumer.close()


def read_all(
    bootstrap: str, places: Sequence[Place], isolation: str = "read_committed"
) -> tuple[Seen, dict[Place, int]]:
    """Return all that there is, and the offset where each partition ends."""
    seen: Seen = {place: {} for place in places}
    ends: dict[Place, int] = {}
    consumer = _consumer(bootstrap, isolation)
    consumer.assign([TopicPartition(*place, OFFSET_BEGINNING) for place in places])
    while len(ends) < len(places):
        message = consumer.poll(30)
        assert message is not None, f"ends reached: {ends}"
        place = (message.topic(), message.partition())
        if message.error() is None:
            seen[place][message.offset()] = message.value()
        elif message.error().name() == "_PARTITION_EOF":
            ends[place] = message.offset()
    consumer.close()
    return seen, ends


def complaints_about(history: Sequence[Written], seen: Seen) -> list[str]:
    """Hold what was seen against what the writers know."""
    found: list[str] = []
    counts = Counter(value for values in seen.values() for value in values.values())
    found += [f"seen {count} times: {v!r}" for v, count in counts.items() if count > 1]
    known = set()
    for transaction in history:
        known.update(transaction.values)
        shown = sum(value in counts for value in transaction.values)
        total = len(transaction.values)
        name = transaction.values[0]
        if transaction.outcome is Outcome.ABORTED and shown:
            found.append(f"aborted, and {shown} of {total} seen: {name!r}")
        elif transaction.outcome is Outcome.COMMITTED and shown < total:
            found.append(f"committed, and {shown} of {total} seen: {name!r}")
        elif 0 < shown < total:
            found.append(f"torn, {shown} of {total} seen: {name!r}")
    found += [f"seen, and never written: {v!r}" for v in counts.keys() - known]
    for place, values in seen.items():
        by_writer: dict[bytes, list[bytes]] = {}
        for offset in sorted(values):
            writer = values[offset].split(b"/")[0]
            by_writer.setdefault(writer, []).append(values[offset])
        found += [
            f"{place}: not in the order in which {writer!r} wrote"
            for writer, order in by_writer.items()
            if order != sorted(order)
        ]
    return found


def count_records(history: Sequence[Written], seen: Seen) -> Counter[str]:
    """Count what was acknowledged, aborted, in doubt, and read in the end."""
    names = {
        Outcome.COMMITTED: "acknowledged",
        Outcome.ABORTED: "aborted",
        Outcome.UNKNOWN: "in doubt",
    }
    counts: Counter[str] = Counter()
    for transaction in history:
        counts[names[transaction.outcome]] += len(transaction.values)
    counts["read"] = sum(map(len, seen.values()))
    return counts


def complaints_about_early(early: Seen, final: Seen) -> list[str]:
    """Whoever read while it was written saw what is there at the end, without holes."""
    found = []
    for place, values in early.items():
        for offset, value in values.items():
            if final[place].get(offset) != value:
                found.append(f"{place}: {offset} was {value!r}, and is no more")
        if values:
            expected = [o for o in sorted(final[place]) if o <= max(values)]
            missed = set(expected) - values.keys()
            found += [f"{place}: {offset} was passed over" for offset in missed]
    return found


def complaints_about_markers(data_dir: Path, places: Sequence[Place]) -> list[str]:
    """In the files: one marker a transaction, and none of nothing."""
    found = []
    for topic, partition in places:
        open_since: dict[int, int] = {}
        marked: dict[int, int] = {}
        for path in sorted((data_dir / f"{topic}-{partition}").glob("*.log")):
            for header, _ in iter_batches(path.read_bytes()):
                producer, epoch = header.producer_id, header.producer_epoch
                if not header.is_transactional:
                    continue
                if not header.is_control:
                    open_since.setdefault(producer, header.base_offset)
                elif producer in open_since:
                    del open_since[producer]
                    marked[producer] = epoch
                elif marked.get(producer) == epoch:
                    found.append(
                        f"{topic}-{partition}: marker {header.base_offset} ends nothing"
                    )
                else:
                    marked[producer] = epoch
        found += [
            f"{topic}-{partition}: producer {producer} has been open since {offset}"
            for producer, offset in open_since.items()
        ]
    return found
