"""Count, by handler, how often each API was answered with each error.

Each handler has a table with one word for each API key and error code; its successors
continue with this table. An answer about several partitions counts each error code
once.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpbroker.ipc.layout import (
    API_ROWS,
    ERROR_CODES,
    ERROR_TABLES,
    HANDLER_BUSY_SLOT,
    SLOT_ERROR,
    SLOT_ERROR_OF,
    SLOT_RECEIVED,
    handler_row,
    slot_row,
)

_TABLE_WORDS = API_ROWS * ERROR_CODES
_FIRST_CODE = -1  # UNKNOWN_SERVER_ERROR


class ErrorCounts:
    """One handler's counts of answers by API key and error code.

    Only this handler writes them.
    """

    def __init__(self, handler: int, words: memoryview) -> None:
        self._words = words
        self._base = ERROR_TABLES + handler * _TABLE_WORDS
        self._busy = handler_row(handler) + HANDLER_BUSY_SLOT

    def count(self, api_key: int, error_code: int) -> None:
        """Count an answer of an API with an error code.

        Codes beyond the table are counted in its last column. The code is also stored
        in the slot of the request that is executed, for the request log; of several
        codes the last one stays.
        """
        words, slot = self._words, self._words[self._busy] - 1
        if slot >= 0:
            row = slot_row(slot)
            words[row + SLOT_ERROR] = error_code + 2
            words[row + SLOT_ERROR_OF] = words[row + SLOT_RECEIVED]
        column = min(error_code - _FIRST_CODE, ERROR_CODES - 1)
        self._words[self._base + api_key % API_ROWS * ERROR_CODES + column] += 1


def read_errors(
    words: memoryview, handlers: Iterable[int]
) -> dict[tuple[int, int], int]:
    """Return the number of answers by (API key, error code), of these handlers."""
    found: dict[tuple[int, int], int] = {}
    for handler in handlers:
        base = ERROR_TABLES + handler * _TABLE_WORDS
        for index, count in enumerate(words[base : base + _TABLE_WORDS].tolist()):
            if count:
                key, column = divmod(index, ERROR_CODES)
                place = (key, column + _FIRST_CODE)
                found[place] = found.get(place, 0) + count
    return found


def count_errors(words: memoryview, handlers: Iterable[int]) -> int:
    """Return the number of all answers with errors, of these handlers together."""
    bases = (ERROR_TABLES + handler * _TABLE_WORDS for handler in handlers)
    return sum(sum(words[base : base + _TABLE_WORDS].tolist()) for base in bases)
