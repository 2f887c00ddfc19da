"""Note in a request's slot what the request is about to change.

A handler may die after it wrote a change to the metadata log and before it answered.
The handler that executes the request again finds the topic already created, or already
deleted. The notes show that the request itself made the change, so the client gets the
answer that the first execution would have given.

A note is a 64-bit word. A slot has room for 200 notes, or for one per 64 bytes of a
request of more than 13 KiB. A change that found no room is not recognized: the second
execution answers with Kafka's error, for example TOPIC_ALREADY_EXISTS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.server.request import Request

NO_ID: Final = bytes(16)
_ID: Final = Struct("=qq")


class Intent(Protocol):
    """The notes of one request."""

    def earlier(self) -> Sequence[int]:
        """Return the notes of an execution that ended before its answer, or none."""
        ...

    def note(self, words: Sequence[int]) -> None:
        """Replace all notes; call it before the change is made."""
        ...


class SlotIntent:
    """The notes in a request's slot; a Produce keeps its progress in the same words.

    Args:
        channel: the handler's end of the request channel.
        slot: the request's slot.
    """

    def __init__(self, channel: HandlerEnd, slot: int) -> None:
        self._channel = channel
        self._slot = slot

    def earlier(self) -> Sequence[int]:
        return self._channel.progress(self._slot)

    def note(self, words: Sequence[int]) -> None:
        self._channel.note_intent(self._slot, words)


class _NoIntent:
    """Keeps no notes: for a request without a slot, which is executed only once."""

    def earlier(self) -> Sequence[int]:
        return ()

    def note(self, words: Sequence[int]) -> None:
        """Do nothing."""


NO_INTENT: Final[Intent] = _NoIntent()


def no_intent(request: Request) -> Intent:
    """Return an Intent that keeps no notes."""
    return NO_INTENT


def id_words(topic_ids: Iterable[bytes]) -> list[int]:
    """Return ids of 16 bytes as notes, two words for each id."""
    return [word for topic_id in topic_ids for word in _ID.unpack(topic_id)]


def noted_ids(words: Sequence[int]) -> list[bytes]:
    """Return the ids in notes that `id_words` made; NO_ID stands for no id."""
    pairs = zip(words[::2], words[1::2], strict=False)
    return [_ID.pack(*pair) for pair in pairs]
