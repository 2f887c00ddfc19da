"""Report how much of the resources that clients share is used.

The limits are in docs/operations.md, "Limits".

Memory for requests is Kafka's MemoryPoolUsed and MemoryPoolAvailable. A small request
is in the block of its slot (the entry of one request in flight). A larger one takes an
extent, a run of pages of its processor's shared memory, as soon as its size is known;
the connection's record says which extent. A request whose client has disconnected
meanwhile is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from mpbroker.exporter.exposition import Family, counter, gauge
from mpbroker.ipc.arena import REQUEST_PAGE_BYTES, ArenaLayout, extent_bytes
from mpbroker.ipc.layout import (
    CONNECTION_EXTENT,
    CONNECTION_EXTENT_LENGTH,
    CONNECTION_STATE,
    CONNECTION_WORDS,
    CONNECTIONS_PER_PROCESSOR,
    HANDLER_COUNTERS,
    MAX_PROCESSORS,
    PROCESSOR_LISTENER,
    PROCESSOR_ROWS_USED,
    PROCESSOR_SLOTS_USED,
    SLOT_STATE,
    SLOT_WORDS,
    SLOTS_PER_PROCESSOR,
    STATE_MASK,
    HandlerCounter,
    connection_row,
    handler_row,
    processor_row,
    slot_row,
)
from mpbroker.ipc.tables.principals import MAX_PRINCIPALS
from mpbroker.ipc.tables.transaction_table import MAX_ENTRIES, TransactionTable
from mpbroker.metadata.metadata_budget import MAX_METADATA_BYTES

if TYPE_CHECKING:
    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.supervisor.memory import BrokerMemory

REQUEST_MEMORY: Final = "mpbroker_request_memory_bytes"
LIMIT: Final = "mpbroker_limit"
USED: Final = "mpbroker_limit_used"
NO_SESSION: Final = "mpbroker_fetch_sessions_refused_total"


def limit_families(
    memory: BrokerMemory, registry: TopicRegistry, handlers: Iterable[int]
) -> Iterable[Family]:
    """Return metrics of shared resources: how much there can be, and how much is used.

    One more metric counts the fetch sessions that were refused.

    Args:
        handlers: the ids of all handlers since the start.
    """
    words = memory.control.words
    limit = gauge(LIMIT, "How much there can be of what clients share.")
    used = gauge(USED, "How much of it is used; of processors, by the fullest.")
    for name, most, now in (
        ("partitions", registry.capacity, registry.partition_count),
        ("metadata_bytes", MAX_METADATA_BYTES, registry.metadata_bytes),
        ("principals", MAX_PRINCIPALS, len(memory.principals) - 1),
        (
            "partitions_in_transactions",
            MAX_ENTRIES,
            len(TransactionTable(memory.transactions)),
        ),
        (
            "connections_of_a_processor",
            CONNECTIONS_PER_PROCESSOR,
            max(map(_connections, [words] * MAX_PROCESSORS, range(MAX_PROCESSORS))),
        ),
        (
            "requests_of_a_processor",
            SLOTS_PER_PROCESSOR,
            max(map(_slots, [words] * MAX_PROCESSORS, range(MAX_PROCESSORS))),
        ),
    ):
        limit.add(most, limit=name)
        used.add(now, limit=name)
    refused = counter(
        NO_SESSION, "Fetches that got no session: too many partitions, or sessions."
    )
    word = HANDLER_COUNTERS + HandlerCounter.SESSIONS_REFUSED
    refused.add(sum(words[handler_row(handler) + word] for handler in handlers))
    return limit, used, refused


def _connections(words: memoryview, processor: int) -> int:
    used = words[processor_row(processor) + PROCESSOR_ROWS_USED]
    first = connection_row(processor * CONNECTIONS_PER_PROCESSOR)
    return _busy(words, first + CONNECTION_STATE, used, CONNECTION_WORDS)


def _slots(words: memoryview, processor: int) -> int:
    used = words[processor_row(processor) + PROCESSOR_SLOTS_USED]
    first = slot_row(processor * SLOTS_PER_PROCESSOR)
    return _busy(words, first + SLOT_STATE, used, SLOT_WORDS)


def _busy(words: memoryview, first: int, rows: int, step: int) -> int:
    """Return how many entries of a table in shared memory are in use.

    These are the entries whose state is not FREE (0).

    Args:
        words: the control segment, the shared memory of all processes.
        first: the word with the state of the first entry.
        rows: the number of entries.
        step: the number of words in an entry.
    """
    states = words[first : first + rows * step : step].tolist() if rows else ()
    return sum(state & STATE_MASK != 0 for state in states)


def request_memory(words: memoryview, layout: ArenaLayout) -> Family:
    """Return a gauge of the bytes of memory for large requests: used, and available."""
    used = sum(_extent_lengths(words))
    serving = sum(
        bool(words[processor_row(number) + PROCESSOR_LISTENER])
        for number in range(MAX_PROCESSORS)
    )
    family = gauge(
        REQUEST_MEMORY, "Memory for requests that do not fit a slot, by use."
    )
    family.add(used, state="used")
    family.add(max(0, serving * layout.extents_bytes - used), state="available")
    return family


def _extent_lengths(words: memoryview) -> Iterable[int]:
    for processor in range(MAX_PROCESSORS):
        used = words[processor_row(processor) + PROCESSOR_ROWS_USED]
        if not used:
            continue
        first = connection_row(processor * CONNECTIONS_PER_PROCESSOR)
        end = first + used * CONNECTION_WORDS
        # A column at a time: a row at a time takes a hundred times as long.
        columns = (
            words[first + word : end : CONNECTION_WORDS].tolist()
            for word in (CONNECTION_STATE, CONNECTION_EXTENT, CONNECTION_EXTENT_LENGTH)
        )
        for state, extent, length in zip(*columns, strict=True):
            if state & STATE_MASK and extent:
                pages = -(-extent_bytes(length) // REQUEST_PAGE_BYTES)
                yield pages * REQUEST_PAGE_BYTES
