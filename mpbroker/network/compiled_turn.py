"""Make a processor's compiled turn, if the compiled core (the C extension) is there.

A turn is one round of a processor's loop. The compiled one waits, receives, publishes
and answers in one call (native/network/processor_turn.c), and uses the objects of the
Python processor. It leaves to the Python code all events and requests that it does not
handle itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpbroker.ipc.arena import REQUEST_PART_BYTES
from mpbroker.ipc.compiled import core
from mpbroker.ipc.layout import (
    HEADER,
    HEADER_KEEPER,
    HEADER_PHASE,
    PROCESSOR_COUNTERS,
    PROCESSOR_MOVE_ORDER,
    PROCESSOR_READ_ON,
    SLOTS_PER_PROCESSOR,
    ConnectionState,
    processor_row,
)
from mpbroker.network.channel import Channel

if TYPE_CHECKING:
    from mpbroker.ipc.segment import Segment
    from mpbroker.native import _core
    from mpbroker.network.channel_selector import ChannelSelector
    from mpbroker.network.connections import Connections
    from mpbroker.network.request_channel import ProcessorEnd


def compiled_turn(
    processor: int,
    control: Segment,
    arena: Segment,
    selector: ChannelSelector,
    connections: Connections,
    requests: ProcessorEnd,
) -> _core.ProcessorEnd | None:
    """Return the compiled turn of a processor, or None if only Python may serve it.

    None is returned if the C extension is not there. It is also returned if
    max_request_bytes is less than a block can hold (the shared memory for one small
    request), since the C code accepts every request that fits a block.
    """
    if core is None or requests.compiled is None:
        return None
    if connections.max_request_bytes < REQUEST_PART_BYTES:
        return None
    made: _core.ProcessorEnd = core.ProcessorEnd(
        control.view,
        arena.view,
        processor_row(processor) + PROCESSOR_COUNTERS,
        processor * SLOTS_PER_PROCESSOR,
        Channel,
        ConnectionState.READING,
        ConnectionState.IN_FLIGHT,
        connections.in_flight,
        requests.unpublished,
        processor,
    )
    # The words that the processor checks when its doorbell rings, besides answers.
    news = (
        HEADER + HEADER_PHASE,
        HEADER + HEADER_KEEPER,
        processor_row(processor) + PROCESSOR_MOVE_ORDER,
        processor_row(processor) + PROCESSOR_READ_ON,
    )
    made.set_turn(
        selector.fd, *requests.compiled, connections.by_fd, selector.doorbell_fd, news
    )
    return made
