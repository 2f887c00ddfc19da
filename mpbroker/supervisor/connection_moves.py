"""Move connections between processors: the supervisor's side.

An order is three words in the giver's row and a ring of its bell; what is still to be
moved can be read there at any time, so nobody waits for anybody. A processor that dies
over an order leaves it to its successor. To retire one:

    stop_accepting(memory, 3)                no new connections for it
    move_connections(memory, 3, [0, 1])      all it has; its process ends when all are
                                             gone and every request is answered
    ... its process ends with status 0; if it is killed instead while
    owned_connections(memory, 3) is not 0, start it again: it goes on moving
    rescue_connections(memory, [0, 1])       those that were given to it meanwhile
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
from mpbroker.network.connection_rows import live_rows
from mpbroker.network.moves.departures import ALL
from mpbroker.supervisor.memory import BrokerMemory


def move_connections(
    memory: BrokerMemory, source: int, targets: Iterable[int], count: int = ALL
) -> None:
    """Tell a processor to give connections to others, in turn, as they fall idle.

    Args:
        memory: the broker's.
        source: who gives; alive, or started again soon.
        targets: who may get some; those that serve the same listener do.
        count: how many; ALL: every one, those that still come too, and then its
            process ends.

    The last order counts. ``is_moved`` says when it has been carried out.
    """
    words, row = memory.control.words, processor_row(source)
    words[row + PROCESSOR_MOVE_TARGETS] = sum(1 << target for target in set(targets))
    words[row + PROCESSOR_MOVE_COUNT] = count
    words[row + PROCESSOR_MOVE_ORDER] += 1  # the commit
    memory.processor_bells[source].ring()


def is_moved(memory: BrokerMemory, source: int) -> bool:
    """Whether a processor has carried its last order out."""
    words, row = memory.control.words, processor_row(source)
    done: bool = words[row + PROCESSOR_MOVE_DONE] == words[row + PROCESSOR_MOVE_ORDER]
    return done


def forget_orders(memory: BrokerMemory, processor: int) -> None:
    """Before an id is used again: its last owner's orders are no concern of it."""
    words, row = memory.control.words, processor_row(processor)
    words[row + PROCESSOR_MOVE_DONE] = words[row + PROCESSOR_MOVE_ORDER]


def stop_accepting(memory: BrokerMemory, processor: int) -> None:
    """Let acceptors, and processors that give connections away, pass it over."""
    memory.control.words[processor_row(processor) + PROCESSOR_LISTENER] = 0


def connection_counts(memory: BrokerMemory, processors: Iterable[int]) -> list[int]:
    """How many connections each of them says it has."""
    words, word = (
        memory.control.words,
        PROCESSOR_COUNTERS + ProcessorCounter.CONNECTIONS,
    )
    return [words[processor_row(processor) + word] for processor in processors]


def owned_connections(memory: BrokerMemory, processor: int) -> int:
    """How many connections are a processor's, whether it lives and has them or not."""
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
    """Give the connections of processors that are no more to those that are.

    Call it when a process has retired: another may have given it connections while it
    went. Only such as wait for a request can be meant.

    Returns:
        How many; the keeper sends their sockets.
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
