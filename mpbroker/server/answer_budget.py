"""AnswerBudget: bound the bytes of an answer, whatever a short request asks for.

A name of a few bytes asks for the description of a group, whose members may have sent
megabytes, or for all configs of a resource with their documentation. So a request that
names much gets an error for what is beyond the budget. Its client can ask again, with
fewer names. Kafka has no such limit.
"""

from __future__ import annotations

from typing import Final

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.fields import Struct

# Half of what a handler has for all answers that were not taken yet (ipc/arena.py).
MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024
_NUMBER_BYTES: Final = 8


class AnswerBudget:
    """Counts the bytes of those rows of an answer that may be large.

    Args:
        most: how many bytes the rows may have together.
    """

    def __init__(self, most: int = MAX_ANSWER_BYTES) -> None:
        self._most = most
        self._spent = 0
        self._is_full = False
        # Counted when there is a second one, as few answers have.
        self._first: Struct | None = None

    def check(self) -> None:
        """Check that no row was refused yet, before the next one is made.

        Raises:
            ApiError: POLICY_VIOLATION.
        """
        if self._is_full:
            raise ApiError(
                ErrorCode.POLICY_VIOLATION,
                f"The answer would have more than {self._most} bytes: ask for less in"
                " one request.",
            )

    def spend(self, row: Struct) -> None:
        """Count a row of the answer. The first row may have any size.

        Raises:
            ApiError: POLICY_VIOLATION: the row does not fit. All later ones are refused
                as well.
        """
        if self._first is None:
            self._first = row
            return
        if not self._spent:
            self._spent = about_bytes(self._first)
        self.spend_bytes(about_bytes(row))

    def spend_bytes(self, size: int) -> None:
        """Count a row of the answer by its size; raise as `spend` does."""
        self._is_full = bool(self._spent) and self._spent + size > self._most
        self.check()
        self._spent += size


def about_bytes(value: object) -> int:
    """Return about how many bytes a part of a message has when it is encoded."""
    if isinstance(value, (str, bytes, memoryview)):
        return len(value) + 2
    if isinstance(value, list):
        if value and isinstance(value[0], int):
            return _NUMBER_BYTES * len(value)
        return sum(map(about_bytes, value))
    if isinstance(value, Struct):
        return sum(about_bytes(getattr(value, row.name)) for row in value.__fields__)
    return _NUMBER_BYTES
