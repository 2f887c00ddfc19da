"""Cut standard input or files into the messages that `produce` sends."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from typing import Final, NamedTuple

from mpbroker.cli.records.json_input import JsonRecord, parse_record

_READ_BYTES: Final = 1 << 20


class MessageSplitter:
    """Cuts a byte stream at a delimiter, even if the delimiter lies in two chunks."""

    def __init__(self, delimiter: bytes) -> None:
        self._delimiter = delimiter
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next chunk of the stream; return the messages that end in it."""
        # Search from here only: a message of megabytes comes in many chunks.
        start = max(len(self._buffer) - len(self._delimiter) + 1, 0)
        self._buffer += data
        if self._buffer.find(self._delimiter, start) < 0:
            return []
        messages = bytes(self._buffer).split(self._delimiter)
        self._buffer = bytearray(messages.pop())
        return messages

    def finish(self) -> list[bytes]:
        """Return the last message, if no delimiter follows it."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return [rest] if rest else []


def read_messages(fd: int, delimiter: bytes, told: int) -> Iterator[list[bytes]]:
    """Yield the messages of a file: for each read(), a list of those that end in it.

    Args:
        fd: the file.
        delimiter: stands between messages.
        told: a descriptor; when it is readable, no more is read, and a message that
            has not ended is left out.
    """
    splitter = MessageSplitter(delimiter)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.register(told, select.POLLIN)
    while not any(ready == told for ready, _ in poll.poll()):
        chunk = os.read(fd, _READ_BYTES)
        if not chunk:
            yield splitter.finish()
            return
        yield splitter.feed(chunk)


def has_more(fd: int, wait_ms: int) -> bool:
    """Wait for input or the end of the file; return False if neither comes in time."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(wait_ms))


class MessageRules(NamedTuple):
    """The rules by which a message becomes a record.

    Attributes:
        key_delimiter: stands between key and value; None: messages have no key.
        fixed_key: the key of a message that has none.
        empty_is_null: whether empty keys and values are null.
        is_json: whether a message is a JSON object with all parts of the record.
    """

    key_delimiter: bytes | None
    fixed_key: bytes | None
    empty_is_null: bool
    is_json: bool = False

    def record(self, message: bytes) -> JsonRecord:
        """Return the parts of a message's record.

        Raises:
            ValueError: the message is not the JSON that it has to be.
        """
        if self.is_json:
            return parse_record(message)
        return JsonRecord(*self.split(message), (), None)

    def split(self, message: bytes) -> tuple[bytes | None, bytes | None]:
        """Return the key and the value of a message."""
        key = self.fixed_key
        value: bytes | None = message
        if self.key_delimiter is not None:
            before, delimiter, after = message.partition(self.key_delimiter)
            if delimiter:
                key, value = before, after
        if self.empty_is_null:
            return key or None, value or None
        return key, value
