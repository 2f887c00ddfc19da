"""Note in a request's slot, its entry in shared memory, what it is about to change.

A handler may die after it wrote a change to the metadata log and before it answered.
The handler that executes the request again finds the topic already created, or already
deleted. The notes show that the request itself made the change, so the client gets the
answer that the first execution would have given.

A note is a 64-bit word. A slot has room for 200 notes, or for one per 64 bytes of a
request of more than 13 KiB. If there was no room for the note of a change, the second
execution does not recognize the change as its own. It answers with Kafka's error, for
example TOPIC_ALREADY_EXISTS.
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
    """Keeps one request's notes about the changes that it is about to make."""

    def earlier(self) -> Sequence[int]:
        """Return the notes of an execution whose handler died before it answered.

        Return an empty sequence if there was no such execution, or it made no notes.
        """
        ...

    def note(self, words: Sequence[int]) -> None:
        """Replace all notes of the request. To be called before the change is made."""
        ...


class SlotIntent:
    """Keeps a request's notes in its slot, which is its entry in shared memory.

    They take the words in which a Produce stores its progress.

    Args:
        channel: the handler's end of the request channel.
        slot: the request's slot, which is its entry in shared memory.
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
        """Do nothing: a request without a slot has no place for notes."""


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
