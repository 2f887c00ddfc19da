"""The client software of each connection, as its ApiVersions request says (KIP-511).

A handler has a table of the names it has received. It only adds to this table, and its
successors continue with it. Each connection has a word with the number of an entry, and
the cookie of the socket, because the next connection in the same row has another
cookie. Only the handler that has a connection's request writes its word, and a
connection has one request at a time.
"""

from __future__ import annotations

from typing import Final

from mpbroker.ipc.layout import (
    CONNECTION_COOKIE,
    CONNECTION_SOFTWARE,
    HANDLER_IDS,
    SOFTWARE_ENTRIES,
    SOFTWARE_ENTRY_WORDS,
    SOFTWARE_SHIFT,
    SOFTWARE_TABLES,
    connection_row,
)

_MAX_BYTES: Final = (SOFTWARE_ENTRY_WORDS - 1) * 8
_ENTRY_MASK: Final = (1 << SOFTWARE_SHIFT) - 1
_SEPARATOR: Final = " "
UNKNOWN: Final = ("", "")
# There are few kinds of clients. Names beyond the table's capacity are counted as this.
OTHER: Final = ("other", "")


class ClientSoftware:
    """Notes the client software of the connections that one handler serves.

    Each name and version has an entry in the handler's table; the word of a connection
    has the number of its entry.
    """

    def __init__(self, handler: int, words: memoryview) -> None:
        self._words = words
        self._handler = handler
        self._entries: dict[tuple[str, str], int] = {}
        for entry in range(SOFTWARE_ENTRIES):
            text = _text(words, handler, entry)
            if text is not None:
                self._entries.setdefault(text, entry)

    def note(self, connection: int, name: str, version: str) -> None:
        """Store the software name and version that a client has sent.

        Args:
            connection: the number of the client's connection.
            name: the name; "": the client sent none.
            version: the version; "": the client sent none.
        """
        words = self._words
        cookie = words[connection_row(connection) + CONNECTION_COOKIE]
        entry = self._entry((name, version))
        word = cookie << SOFTWARE_SHIFT | self._handler * SOFTWARE_ENTRIES + entry + 1
        if words[CONNECTION_SOFTWARE + connection] != word:
            words[CONNECTION_SOFTWARE + connection] = word

    def _entry(self, software: tuple[str, str]) -> int:
        entry = self._entries.get(software)
        if entry is not None:
            return entry
        entry = len(self._entries)
        text = _SEPARATOR.join(software).encode()
        if entry >= SOFTWARE_ENTRIES - 1 or len(text) > _MAX_BYTES:
            if software == OTHER:
                return SOFTWARE_ENTRIES - 1
            return self._entry(OTHER)
        at = _at(self._handler, entry)
        view = self._words.cast("B")
        view[(at + 1) * 8 : (at + 1) * 8 + len(text)] = text
        self._words[at] = len(text)  # last: from here on the entry exists
        self._entries[software] = entry
        return entry


def software_of(words: memoryview, connection: int) -> tuple[str, str]:
    """Return name and version of a connection's client software; UNKNOWN: none sent."""
    word = words[CONNECTION_SOFTWARE + connection]
    cookie = words[connection_row(connection) + CONNECTION_COOKIE]
    number = (word & _ENTRY_MASK) - 1
    if word >> SOFTWARE_SHIFT != cookie or not 0 <= number < (
        HANDLER_IDS * SOFTWARE_ENTRIES
    ):
        return UNKNOWN
    handler, entry = divmod(number, SOFTWARE_ENTRIES)
    return _text(words, handler, entry) or OTHER


def _at(handler: int, entry: int) -> int:
    return SOFTWARE_TABLES + (handler * SOFTWARE_ENTRIES + entry) * SOFTWARE_ENTRY_WORDS


def _text(words: memoryview, handler: int, entry: int) -> tuple[str, str] | None:
    at = _at(handler, entry)
    length = words[at]
    if not 0 < length <= _MAX_BYTES:
        return None
    data = bytes(words.cast("B")[(at + 1) * 8 : (at + 1) * 8 + length])
    name, _, version = data.decode(errors="replace").partition(_SEPARATOR)
    return name, version
