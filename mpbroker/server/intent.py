"""What a request is about to change, in its slot, noted before it is changed.

A handler may die between a change's record in the metadata log and the answer. Whoever
executes the request again finds the topic there already, or gone; what was noted tells
it that this was the request's own doing, and the client gets the one answer that it
would have got.

Words of 64 bits, as many as the slot has room for (200, or one for every 64 bytes of a
request of more than 13 KiB); of what is beyond, Kafka's error is told.
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
    """One request's."""

    def earlier(self) -> Sequence[int]:
        """What an execution that did not get to its answer has noted."""
        ...

    def note(self, words: Sequence[int]) -> None:
        """Note what is to be changed now, what was noted before included."""
        ...


class SlotIntent:
    """Where a request's progress is kept, if it appends records.

    Args:
        channel: the handler's.
        slot: the request's.
    """

    def __init__(self, channel: HandlerEnd, slot: int) -> None:
        self._channel = channel
        self._slot = slot

    def earlier(self) -> Sequence[int]:
        return self._channel.progress(self._slot)

    def note(self, words: Sequence[int]) -> None:
        self._channel.note_intent(self._slot, words)


class _NoIntent:
    """Of a request that is in no slot."""

    def earlier(self) -> Sequence[int]:
        return ()

    def note(self, words: Sequence[int]) -> None:
        """Nobody would execute it again."""


NO_INTENT: Final[Intent] = _NoIntent()


def no_intent(request: Request) -> Intent:
    """Where no request is executed again."""
    return NO_INTENT


def id_words(topic_ids: Iterable[bytes]) -> list[int]:
    """Two words an id of 16 bytes."""
    return [word for topic_id in topic_ids for word in _ID.unpack(topic_id)]


def noted_ids(words: Sequence[int]) -> list[bytes]:
    """The ids that were noted; NO_ID where there was none to note."""
    pairs = zip(words[::2], words[1::2], strict=False)
    return [_ID.pack(*pair) for pair in pairs]
