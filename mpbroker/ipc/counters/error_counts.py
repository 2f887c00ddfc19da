"""How often each API was answered with each error, by handler.

A word an API key and error code, written by the handler whose table it is, and gone on
with by its successors. An answer that names several partitions counts each error once.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpbroker.ipc.layout import API_ROWS, ERROR_CODES, ERROR_TABLES

_TABLE_WORDS = API_ROWS * ERROR_CODES
_FIRST_CODE = -1  # UNKNOWN_SERVER_ERROR


class ErrorCounts:
    """One handler's table: its to write."""

    def __init__(self, handler: int, words: memoryview) -> None:
        self._words = words
        self._base = ERROR_TABLES + handler * _TABLE_WORDS

    def count(self, api_key: int, error_code: int) -> None:
        """Count an answer; a code that no table has is the last one of it."""
        column = min(error_code - _FIRST_CODE, ERROR_CODES - 1)
        self._words[self._base + api_key % API_ROWS * ERROR_CODES + column] += 1


def read_errors(
    words: memoryview, handlers: Iterable[int]
) -> dict[tuple[int, int], int]:
    """Answers by API key and error code, of all handlers there ever were."""
    found: dict[tuple[int, int], int] = {}
    for handler in handlers:
        base = ERROR_TABLES + handler * _TABLE_WORDS
        for index, count in enumerate(words[base : base + _TABLE_WORDS].tolist()):
            if count:
                key, column = divmod(index, ERROR_CODES)
                place = (key, column + _FIRST_CODE)
                found[place] = found.get(place, 0) + count
    return found
