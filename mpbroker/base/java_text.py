"""Judge texts as Java does: whether one is blank.

Source: Java's String.trim(), by which Kafka finds blank ids in requests of groups.
"""

from __future__ import annotations

from typing import Final

# What Java's String.trim() removes at both ends.
_TRIMMED: Final = "".join(map(chr, range(ord(" ") + 1)))


def is_blank(text: str | None) -> bool:
    """Return whether a text is there and has nothing but blanks and control codes."""
    return text is not None and not text.strip(_TRIMMED)
