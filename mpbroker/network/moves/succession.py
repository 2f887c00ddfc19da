"""Succession: continue a connection that another process has served before.

That process gave the connection away, or died. The row, the connection's record in
shared memory, says where the current request begins. The state of its slot, the
request's entry there, says which process has the request, and the kernel says how many
bytes of both streams have passed. At whatever line the last processor stopped, one of
these cases holds:

    row        slot                       what is known, and what is done
    READING    HELD, or none              bytes may have been received: read on
    READING    RESPONDING                 the answer is sent, and noted: read on
    IN_FLIGHT  HELD                       muted, and died before it published: read on
    IN_FLIGHT  READY, CLAIMED, PARKED     the answer will come: wait
    IN_FLIGHT  on the response ring       no byte of the answer is sent: wait
    IN_FLIGHT  RESPONDING                 the answer is sent in part, or whole: send on

The supervisor has changed READY slots that are not on the request ring to HELD. A
connection that ends with its processor (``is_private``) is closed instead.
"""

from collections.abc import Collection
from enum import IntEnum

from mpbroker.ipc.arena import REQUEST_PART_BYTES
from mpbroker.ipc.layout import (
    CONNECTION_EXTENT,
    CONNECTION_EXTENT_LENGTH,
    CONNECTION_SLOT,
    CONNECTION_STATE,
    SLOT_BLOCK,
    SLOT_CONNECTION,
    SLOT_REQUEST_LENGTH,
    SLOT_REQUEST_OFFSET,
    SLOT_RESPONSE_LENGTH,
    SLOT_STATE,
    STATE_MASK,
    ConnectionState,
    SlotState,
    slot_row,
)
from mpbroker.network.channel import Channel
from mpbroker.network.connection_rows import progress
from mpbroker.network.moves.tcp_counters import StreamCounts
from mpbroker.network.request_reader import request_extent


class Resumption(IntEnum):
    """Names the next actions for a connection that was taken over."""

    READ = 0
    AWAIT = 1  # wait for its answer
    SEND = 2  # send the rest of its answer
    IMPOSSIBLE = 3  # row and kernel do not agree: close it


def restore(
    channel: Channel,
    words: memoryview,
    counts: StreamCounts,
    answered: Collection[int],
) -> tuple[Resumption, int]:
    """Set up a channel from its record in shared memory; find out how to continue.

    Args:
        channel: a new object for the connection, with its socket.
        words: the control segment.
        counts: the bytes received and sent, by the kernel, while no process uses the
            socket.
        answered: slots whose answers are still on the response ring.

    Returns:
        The next action, and how many bytes of the answer are sent already.
    """
    row = channel.row
    channel.base, channel.start, channel.sent = progress(words, channel.connection)
    channel.closing = counts.peer_has_ended
    channel.extent = words[row + CONNECTION_EXTENT]
    channel.extent_length = words[row + CONNECTION_EXTENT_LENGTH]
    slot = channel.slot = max(0, words[row + CONNECTION_SLOT]) - 1
    have = counts.received - channel.base - channel.start
    already = counts.sent - channel.sent
    channel.end = channel.start
    if slot < 0:
        # A part of a frame without a slot was in the dead processor's private memory.
        return _judge(have == already == 0, Resumption.READ)
    slot_word = slot_row(slot)
    channel.block = words[slot_word + SLOT_BLOCK]
    state = words[slot_word + SLOT_STATE] & STATE_MASK
    if words[slot_word + SLOT_CONNECTION] != channel.connection:
        channel.slot = -1  # the slot belongs to another connection
        return Resumption.IMPOSSIBLE, 0
    if words[row + CONNECTION_STATE] & STATE_MASK == ConnectionState.READING:
        return _judge(_place(channel, have) and already == 0, Resumption.READ)
    if state == SlotState.HELD:
        return _judge(_place(channel, have) and already == 0, Resumption.READ)
    channel.state = ConnectionState.IN_FLIGHT
    extent = request_extent(words, slot)
    if extent is not None:
        channel.extent, channel.extent_length = extent
        whole = have == channel.extent_length
        _place(channel, have)
    else:
        channel.extent = 0
        offset = words[slot_word + SLOT_REQUEST_OFFSET] - channel.block
        channel.frame_end = offset + words[slot_word + SLOT_REQUEST_LENGTH]
        whole = _place(channel, have) and channel.frame_end <= channel.end
    if state != SlotState.RESPONDING or slot in answered:
        return _judge(whole and already == 0, Resumption.AWAIT)
    channel.state = ConnectionState.SENDING
    length = words[slot_word + SLOT_RESPONSE_LENGTH]
    result, _ = _judge(whole and 0 <= already <= length, Resumption.SEND)
    return result, already


def _place(channel: Channel, have: int) -> bool:
    """Note in a channel where the bytes of its current request are in shared memory.

    Return False if the connection's record and the kernel's counts disagree.

    Args:
        channel: the channel.
        have: how many bytes of the request have been received, by the kernel's counts.
    """
    if channel.extent:
        channel.extent_have = have
        return 0 <= have <= channel.extent_length
    channel.end = channel.start + have
    return have >= 0 and channel.end <= REQUEST_PART_BYTES


def _judge(agreed: bool, then: Resumption) -> tuple[Resumption, int]:
    return (then if agreed else Resumption.IMPOSSIBLE), 0
