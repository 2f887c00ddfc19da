"""Count, by handler, how often each API was answered with each error.

Each handler has a table with one word for each API key and error code; its successors
continue with this table. An answer about several partitions counts each error code
once.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpbroker.ipc.layout import API_ROWS, ERROR_CODES, ERROR_TABLES

_TABLE_WORDS = API_ROWS * ERROR_CODES
_FIRST_CODE = -1  # UNKNOWN_SERVER_ERROR


class ErrorCounts:
    """One handler's table. Only this handler writes it."""

    def __init__(self, handler: int, words: memoryview) -> None:
        self._words = words
        self._base = ERROR_TABLES + handler * _TABLE_WORDS

    def count(self, api_key: int, error_code: int) -> None:
        """Count an answer; codes beyond the table are counted in its last column."""
        column = min(error_code - _FIRST_CODE, ERROR_CODES - 1)
        self._words[self._base + api_key % API_ROWS * ERROR_CODES + column] += 1


def read_errors(
    words: memoryview, handlers: Iterable[int]
) -> dict[tuple[int, int], int]:
    """Return answers by API key and error code, of these handlers together."""
    found: dict[tuple[int, int], int] = {}
    for handler in handlers:
        base = ERROR_TABLES + handler * _TABLE_WORDS
        for index, count in enumerate(words[base : base + _TABLE_WORDS].tolist()):
            if count:
                key, column = divmod(index, ERROR_CODES)
                place = (key, column + _FIRST_CODE)
                found[place] = found.get(place, 0) + count
    return found
