"""BrokerView: a broker's figures, read from its shared memory.

The supervisor answers ``ctl`` with it, and ``ctl`` uses it itself when the supervisor
does not answer. It only reads and takes no lock. Every figure is one word, and the
words are read one after another: they may be some microseconds apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from mpbroker.ipc.black_box import BlackBox, box_number
from mpbroker.ipc.layout import (
    CONNECTION_ACTIVE,
    CONNECTION_LISTENER,
    CONNECTION_OPENED,
    CONNECTION_OWNER,
    CONNECTION_STATE,
    CONNECTION_WORDS,
    CONNECTIONS_PER_PROCESSOR,
    COORDINATOR,
    COORDINATOR_RING,
    HANDLER_ACTIVE,
    HANDLER_BUSY_SINCE,
    HANDLER_BUSY_SLOT,
    HANDLER_COUNTERS,
    HANDLER_IDS,
    HANDLER_PID,
    HEADER,
    HEADER_ACTIVE_HANDLERS,
    HEADER_PHASE,
    MAX_PROCESSORS,
    PROCESSOR_COUNTERS,
    PROCESSOR_HANDED,
    PROCESSOR_LISTENER,
    PROCESSOR_PID,
    PROCESSOR_REGISTERED,
    PROCESSOR_ROWS_USED,
    REQUEST_RING,
    RING_HEAD,
    RING_TAIL,
    ROW_COPIES,
    ROW_COPY_WORDS,
    ROW_DURABLE_END,
    ROW_STATUS,
    ROW_VERSION,
    ROW_WORDS,
    STATE_MASK,
    ConnectionState,
    HandlerCounter,
    Phase,
    ProcessorCounter,
    RowStatus,
    connection_row,
    handler_row,
    processor_row,
    response_ring,
)
from mpbroker.ipc.tables.partition_table import rows_made
from mpbroker.network.connection_rows import connection_name, peer_address, progress
from mpbroker.protocol.api_key import ApiKey

# ``status`` names at most this many partitions, the worst first.
MAX_PARTITIONS_NAMED: Final = 20

NameOfRow = Callable[[int], tuple[str, int] | None]


class BrokerView:
    """Reads the figures of one broker from its shared memory.

    Args:
        control: words of the control segment, with the state of processes and
            connections.
        partitions: words of the partition segment, with a row for each partition.
        boxes: words of the black boxes, the processes' logs of last events.
    """

    def __init__(
        self, control: memoryview, partitions: memoryview, boxes: memoryview
    ) -> None:
        self.control = control
        self._partitions = partitions
        self._boxes = boxes

    def box(self, role: str, number: int) -> BlackBox:
        """Return the black box (the log of last events) of a process.

        Args:
            role: the process's role, such as "handler".
            number: its id within the role.
        """
        return BlackBox(self._boxes, box_number(role, number))

    def figures(self) -> dict[str, Any]:
        """Return the figures of all handlers and processors, and of the queues.

        Gauges are as they are now; totals count from the start.
        """
        words = self.control
        return {
            "at_ns": time.monotonic_ns(),
            "phase": _phase_name(words[HEADER + HEADER_PHASE]),
            "active_handlers": words[HEADER + HEADER_ACTIVE_HANDLERS],
            "ring_waiting": _waiting(words, REQUEST_RING),
            "coordinator_waiting": _waiting(words, COORDINATOR_RING),
            "processors": [
                self._processor(number)
                for number in range(MAX_PROCESSORS)
                if words[processor_row(number) + PROCESSOR_LISTENER]
            ],
            "handlers": [
                self._handler(number)
                for number in range(HANDLER_IDS)
                if words[handler_row(number) + HANDLER_ACTIVE]
            ],
        }

    def _processor(self, number: int) -> dict[str, Any]:
        words, row = self.control, processor_row(number)
        counters = row + PROCESSOR_COUNTERS
        return {
            "id": number,
            "pid": words[row + PROCESSOR_PID],
            "listener": words[row + PROCESSOR_LISTENER] - 1,
            "response_queue": _waiting(words, response_ring(number)),
            "on_their_way": max(
                0, words[row + PROCESSOR_HANDED] - words[row + PROCESSOR_REGISTERED]
            ),
        } | {each.name.lower(): words[counters + each] for each in ProcessorCounter}

    def _handler(self, number: int) -> dict[str, Any]:
        words, row = self.control, handler_row(number)
        counters = row + HANDLER_COUNTERS
        role = "coordinator" if number == COORDINATOR else "handler"
        busy_slot, since = (
            words[row + HANDLER_BUSY_SLOT],
            words[row + HANDLER_BUSY_SINCE],
        )
        totals = self.box(role, number if role == "handler" else 0).totals()
        return (
            {
                "role": role,
                "id": number,
                "pid": words[row + HANDLER_PID],
                "busy_ms": (
                    (time.monotonic_ns() - since) / 1e6 if busy_slot and since else 0.0
                ),
            }
            | {each.name.lower(): words[counters + each] for each in HandlerCounter}
            | {
                "apis": {
                    api_name(key): [count, spent]
                    for key, (count, spent) in totals.items()
                }
            }
        )

    # -- connections -------------------------------------------------------------------

    def connections(self, first: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        """Return up to ``limit`` open connections, from a place in their table on.

        Args:
            first: the index of the row to begin with.
            limit: the largest number of connections.

        Returns:
            The connections, and the row to go on from; -1 at the end.
        """
        found: list[dict[str, Any]] = []
        words, now = self.control, time.monotonic_ns()
        for processor in range(MAX_PROCESSORS):
            start = processor * CONNECTIONS_PER_PROCESSOR
            used = words[processor_row(processor) + PROCESSOR_ROWS_USED]
            for row in _open_rows(words, max(first, start), start + used):
                if len(found) >= limit:
                    return found, row
                found.append(self._connection(row, now))
        return found, -1

    def _connection(self, row: int, now: int) -> dict[str, Any]:
        words, word = self.control, connection_row(row)
        host, port = peer_address(words, row)
        base, start, sent = progress(words, row)
        state = words[word + CONNECTION_STATE] & STATE_MASK
        return {
            "row": row,
            "id": connection_name(words, row),
            "peer": host,
            "port": port,
            "processor": words[word + CONNECTION_OWNER] - 1,
            "listener": words[word + CONNECTION_LISTENER],
            "state": _state_name(state),
            "bytes_in": base + start,
            "bytes_out": sent,
            "age_s": _seconds(now - words[word + CONNECTION_OPENED]),
            "idle_s": _seconds(
                now
                - max(words[word + CONNECTION_ACTIVE], words[word + CONNECTION_OPENED])
            ),
        }

    # -- records that are not on disk yet --------------------------------------------

    def rows_in_use(self) -> int:
        """Return how many rows of the partition table were ever used.

        For a reader without a registry.
        """
        return rows_made(self._partitions)

    def unsynced_rows(self, rows: int) -> dict[int, tuple[int, int]]:
        """Return the partitions whose last records are not on disk yet.

        Args:
            rows: how many rows (partitions' entries) of the partition table are in use.

        Returns:
            The offset up to which records are on disk, and the log end offset, by row.
        """
        words, end = self._partitions, rows * ROW_WORDS
        columns = [
            words[first:end:ROW_WORDS].tolist()
            for first in (
                ROW_DURABLE_END,
                ROW_VERSION,
                ROW_COPIES,
                ROW_COPIES + ROW_COPY_WORDS,
            )
        ]
        found = {}
        for row, (durable, version, end0, end1) in enumerate(
            zip(*columns, strict=True)
        ):
            log_end = end1 if version & 1 else end0
            if log_end > durable and words[row * ROW_WORDS + ROW_STATUS] in (
                RowStatus.ONLINE,
                RowStatus.OFFLINE,
            ):
                found[row] = (durable, log_end)
        return found

    def offline_rows(self, rows: int) -> list[int]:
        """Return the partitions whose storage has failed, as table rows.

        A row is the index of a partition's entry in the partition table.
        """
        statuses = self._partitions[ROW_STATUS : rows * ROW_WORDS : ROW_WORDS].tolist()
        return [
            row for row, status in enumerate(statuses) if status == RowStatus.OFFLINE
        ]

    def power_cut(
        self, rows: int, name: NameOfRow, since_ns: dict[int, int] | None
    ) -> dict[str, Any]:
        """Return, by partition, the records that a power cut could destroy now.

        The kernel may have written some of them. No producer with acks=all has been
        answered for any of them.

        Args:
            rows: how many rows (partitions' entries) of the partition table are in use.
            name: returns the topic and partition of a row.
            since_ns: by row, when its records were first seen not to be on disk; None:
                not known.
        """
        now = time.monotonic_ns()
        partitions: list[dict[str, Any]] = []
        for row, (durable, log_end) in self.unsynced_rows(rows).items():
            topic, partition = name(row) or (f"row {row}", -1)
            since = (since_ns or {}).get(row)
            partitions.append(
                {
                    "topic": topic,
                    "partition": partition,
                    "records": log_end - durable,
                    "bytes": self._bytes_above(row, durable, log_end),
                    "age_s": None if since is None else _seconds(now - since),
                }
            )
        partitions.sort(key=lambda each: -each["bytes"])
        ages = [each["age_s"] for each in partitions if each["age_s"] is not None]
        return {
            "records": sum(each["records"] for each in partitions),
            "bytes": sum(each["bytes"] for each in partitions),
            "oldest_s": max(ages, default=None),
            "partitions": len(partitions),
            "worst": partitions[:MAX_PARTITIONS_NAMED],
        }

    def _bytes_above(self, row: int, durable: int, log_end: int) -> int:
        """Estimate the bytes of records from ``durable`` to ``log_end``.

        Each record is assumed to have the average size of the active segment's records.
        """
        word = row * ROW_WORDS
        copy = self._partitions[word + ROW_VERSION] & 1
        start = word + ROW_COPIES + copy * ROW_COPY_WORDS
        _, active_base, active_size = self._partitions[start : start + 3].tolist()
        in_active = max(1, log_end - active_base)
        return int(active_size * (log_end - durable) / in_active)


def api_name(key: int) -> str:
    """Return Kafka's name of an API, as its documentation writes it."""
    try:
        words = ApiKey(key).name.split("_")
    except ValueError:
        return f"API {key}"
    return "".join(word.title() for word in words)


def _waiting(words: memoryview, ring: int) -> int:
    # Head and tail are two words, and the head may have moved on in between.
    return max(0, words[ring + RING_TAIL] - words[ring + RING_HEAD])


def _open_rows(words: memoryview, first: int, end: int) -> list[int]:
    if first >= end:
        return []
    states = words[
        connection_row(first) + CONNECTION_STATE : connection_row(
            end
        ) : CONNECTION_WORDS
    ].tolist()
    return [first + index for index, state in enumerate(states) if state & STATE_MASK]


def _phase_name(phase: int) -> str:
    try:
        return Phase(phase).name
    except ValueError:
        return f"phase {phase}"


def _state_name(state: int) -> str:
    try:
        return ConnectionState(state).name
    except ValueError:
        return f"state {state}"


def _seconds(ns: int) -> float:
    return round(max(0, ns) / 1e9, 3)
