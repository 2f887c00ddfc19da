"""Move connections between processors: the supervisor's side.

An order is three words in the giving processor's row (its entry in shared memory), and
a ring of its doorbell (an eventfd that wakes it). The row says at any time what is
still to be moved, so no process waits for another. If a processor dies with an order,
its successor carries it out. To retire a processor:

    stop_accepting(memory, 3)                acceptors pass it over
    move_connections(memory, 3, [0, 1])      all it has; its process ends when all have
                                             moved and every request is answered
    ... its process ends with status 0; if it is killed instead while
    owned_connections(memory, 3) is not 0, start it again: it goes on moving
    rescue_connections(memory, [0, 1])       connections that were given to it meanwhile
"""

from collections.abc import Iterable

from mpbroker.ipc.layout import (
    CONNECTION_LISTENER,
    CONNECTION_OWNER,
    CONNECTION_STATE,
    HEADER,
    HEADER_DEATH_EPOCH,
    PROCESSOR_COUNTERS,
    PROCESSOR_LISTENER,
    PROCESSOR_MOVE_COUNT,
    PROCESSOR_MOVE_DONE,
    PROCESSOR_MOVE_ORDER,
    PROCESSOR_MOVE_TARGETS,
    PROCESSOR_PID,
    STATE_MASK,
    ConnectionState,
    ProcessorCounter,
    connection_row,
    processor_row,
)
from mpbroker.ipc.masks import write_mask
from mpbroker.network.connection_rows import live_rows
from mpbroker.network.moves.departures import ALL
from mpbroker.supervisor.memory import BrokerMemory


def move_connections(
    memory: BrokerMemory, source: int, targets: Iterable[int], count: int = ALL
) -> None:
    """Order a processor to give idle connections to other processors, in turn.

    A processor is a process that serves connections. A new order replaces the last one.
    ``is_moved`` says whether it was carried out.

    Args:
        memory: the broker's shared memory.
        source: the id of the giving processor; it lives, or is restarted soon.
        targets: the ids of the processors that may receive connections, if they serve
            the same listener.
        count: how many connections are moved; ALL: every one, also those that the
            processor still receives, and then its process ends.
    """
    words, row = memory.control.words, processor_row(source)
    mask = sum(1 << target for target in set(targets))
    write_mask(words, row + PROCESSOR_MOVE_TARGETS, mask)
    words[row + PROCESSOR_MOVE_COUNT] = count
    # The commit, after the targets and the count: the processor reads those when it
    # finds a new number here.
    words[row + PROCESSOR_MOVE_ORDER] += 1
    memory.processor_bells[source].ring()


def is_moved(memory: BrokerMemory, source: int) -> bool:
    """Whether a processor has given away the connections that it was told to."""
    words, row = memory.control.words, processor_row(source)
    done: bool = words[row + PROCESSOR_MOVE_DONE] == words[row + PROCESSOR_MOVE_ORDER]
    return done


def forget_orders(memory: BrokerMemory, processor: int) -> None:
    """Drop a processor's order to give connections away, as its id is used again."""
    words, row = memory.control.words, processor_row(processor)
    words[row + PROCESSOR_MOVE_DONE] = words[row + PROCESSOR_MOVE_ORDER]


def stop_accepting(memory: BrokerMemory, processor: int) -> None:
    """Stop acceptors and other processors from giving connections to a processor."""
    memory.control.words[processor_row(processor) + PROCESSOR_LISTENER] = 0


def connection_counts(memory: BrokerMemory, processors: Iterable[int]) -> list[int]:
    """Return how many connections each processor counts as its own."""
    words, word = (
        memory.control.words,
        PROCESSOR_COUNTERS + ProcessorCounter.CONNECTIONS,
    )
    return [words[processor_row(processor) + word] for processor in processors]


def owned_connections(memory: BrokerMemory, processor: int) -> int:
    """Return how many connections belong to a processor, which may be dead.

    They are counted by their entries in shared memory, which name the owner.
    """
    words = memory.control.words
    return sum(
        words[connection_row(row) + CONNECTION_OWNER] == processor + 1
        for row in live_rows(words)
    )


def rebalance(memory: BrokerMemory, processors: Iterable[int]) -> int:
    """Even out the connections of one listener's processors; return how many move."""
    numbers = list(processors)
    counts = connection_counts(memory, numbers)
    share, moved = -(-sum(counts) // len(numbers)) if numbers else 0, 0
    poor = [
        number for number, count in zip(numbers, counts, strict=True) if count < share
    ]
    for number, count in zip(numbers, counts, strict=True):
        if count > share and poor:
            move_connections(memory, number, poor, count - share)
            moved += count - share
    return moved


def rescue_connections(memory: BrokerMemory, processors: Iterable[int]) -> int:
    """Give connections left with retired processors to processors that serve.

    Call it when a processor has retired: another one may have given it connections
    meanwhile. Such connections are waiting for a request.

    Returns:
        How many connections were given away. The keeper, a process that has a duplicate
        of every socket, sends their sockets.
    """
    words, targets = memory.control.words, list(processors)
    rescued = 0
    for row in live_rows(words):
        word = connection_row(row)
        owner = processor_row(words[word + CONNECTION_OWNER] - 1)
        if words[owner + PROCESSOR_PID] or words[owner + PROCESSOR_LISTENER]:
            continue
        serving = [
            target
            for target in targets
            if words[processor_row(target) + PROCESSOR_LISTENER]
            == words[word + CONNECTION_LISTENER] + 1
        ]
        state = words[word + CONNECTION_STATE] & STATE_MASK
        if serving and state == ConnectionState.READING:
            # One store gives the row away; the socket follows from the keeper.
            words[word + CONNECTION_OWNER] = serving[rescued % len(serving)] + 1
            rescued += 1
    if rescued:
        # After the last row: the keeper looks at them once for each such change.
        words[HEADER + HEADER_DEATH_EPOCH] += 1  # the keeper looks at all rows
        memory.keeper_bell.ring()
    return rescued
