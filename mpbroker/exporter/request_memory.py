"""Measure the memory for requests: Kafka's MemoryPoolUsed and MemoryPoolAvailable.

A small request lies in its slot. A larger one takes an extent of its processor's region
as soon as its size is known; the connection's row says which. A request whose client
has disconnected meanwhile is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mpbroker.exporter.exposition import Family, gauge
from mpbroker.ipc.arena import REQUEST_PAGE_BYTES, ArenaLayout, extent_bytes
from mpbroker.ipc.layout import (
    CONNECTION_EXTENT,
    CONNECTION_EXTENT_LENGTH,
    CONNECTION_STATE,
    CONNECTION_WORDS,
    CONNECTIONS_PER_PROCESSOR,
    MAX_PROCESSORS,
    PROCESSOR_LISTENER,
    PROCESSOR_ROWS_USED,
    STATE_MASK,
    connection_row,
    processor_row,
)

NAME: Final = "mpbroker_request_memory_bytes"


def request_memory(words: memoryview, layout: ArenaLayout) -> Family:
    """Return the bytes in use by requests, and those left to serving processors."""
    used = sum(_lengths(words))
    serving = sum(
        bool(words[processor_row(number) + PROCESSOR_LISTENER])
        for number in range(MAX_PROCESSORS)
    )
    family = gauge(NAME, "Memory for requests that do not fit a slot, by use.")
    family.add(used, state="used")
    family.add(max(0, serving * layout.extents_bytes - used), state="available")
    return family


def _lengths(words: memoryview) -> Iterable[int]:
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
