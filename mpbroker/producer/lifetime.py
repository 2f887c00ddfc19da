"""The end of a producer that was not closed: it is dropped, or forked, or Python ends.

None of this code may take a lock. Garbage is collected in any thread at any moment,
even while that thread holds a producer's lock. And a fork copies locks as they are.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable
from typing import TypeVar

from mpbroker.producer.accumulator import RecordAccumulator
from mpbroker.producer.sender import Sender

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

# The producers of this process. In a forked child the copies are marked, so that none
# waits for a thread that was not forked, or sends in its parent's name.
_disown: weakref.WeakKeyDictionary[object, Callable[[object], None]] = (
    weakref.WeakKeyDictionary()
)


def _mark_forked() -> None:
    for producer, disown in list(_disown.items()):
        disown(producer)


os.register_at_fork(after_in_child=_mark_forked)


def watch(
    producer: _T,
    disown: Callable[[_T], None],
    sender: Sender,
    accumulator: RecordAccumulator,
    name: str,
) -> weakref.finalize[[weakref.ref[_T], int, Sender, RecordAccumulator, str], _T]:
    """Watch over a producer; return the finalizer to detach when it is closed.

    Args:
        producer: the producer; no reference to it is kept.
        disown: called with the producer in a forked child.
        sender: closed when the producer is dropped; it sends all records before.
        accumulator: tells how many records were not acknowledged.
        name: what to call the producer in warnings.
    """
    _disown[producer] = disown  # type: ignore[assignment]
    return weakref.finalize(
        producer,
        _unclosed,
        weakref.ref(producer),
        os.getpid(),
        sender,
        accumulator,
        name,
    )


def _unclosed(
    producer: weakref.ref[_T],
    made_by: int,
    sender: Sender,
    accumulator: RecordAccumulator,
    name: str,
) -> None:
    """Warn of a producer that was not closed; send its records unless Python ends."""
    if os.getpid() != made_by:
        return  # a forked child's copy has nothing to end
    count = accumulator.unacknowledged
    how = "close() it, or use it in a with block"
    if producer() is None:
        sender.close()
        text = f"its thread sends {count} record(s) and ends"
    else:  # the program ends
        text = f"{count} record(s) that were not acknowledged may be lost"
        if count:
            _log.warning("unclosed producer %s: %s; %s", name, text, how)
    warnings.warn(f"unclosed producer {name}: {text}; {how}", ResourceWarning, 1)
