"""The end of a producer that nobody closes: it is dropped, or forked, or all ends.

None of this may take a lock: garbage is collected in any thread between any two steps,
while that thread holds a producer's lock; and a fork copies locks as they happen to be.
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

# Of a live process; a forked child's copies are marked, so that none of them waits for
# a thread that was not forked with it, or sends in its parent's name.
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
    """Watch over a producer whose thread runs; return what to detach when it is closed.

    Args:
        producer: to be watched; no reference is kept.
        disown: called with it in a forked child.
        sender: told to end, when all is sent, if the producer is dropped.
        accumulator: knows what was not acknowledged then.
        name: what to call the producer.
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
    """Say so as of files; what can still be sent is sent."""
    if os.getpid() != made_by:
        return  # a forked child's copy: there is nothing of it to end
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
