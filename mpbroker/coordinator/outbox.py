"""What the coordinator decides: records to be written, and answers to be given.

The state machines write here and do nothing else; the process around them appends
the records, and holds back an answer until the records it rests on are on disk.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from mpbroker.protocol.message import Message

NOW: Final = ()


class Call:
    """One request as the coordinator sees it: who asks, and in which version."""

    __slots__ = ("answered", "client_host", "client_id", "request", "version")

    def __init__(
        self, version: int, client_id: str, client_host: str, request: Any = None
    ) -> None:
        self.version = version
        self.client_id = client_id
        self.client_host = client_host
        self.request = request  # the process's own; nobody here looks at it
        self.answered = False


class Answer(NamedTuple):
    """A response, and what must be durable before it goes."""

    call: Call
    response: Message
    after: tuple[int, ...]  # partitions of __consumer_offsets


class Outbox:
    """Records and answers since the last look."""

    def __init__(self) -> None:
        self.records: dict[int, list[tuple[bytes, bytes | None]]] = {}
        self.answers: list[Answer] = []

    def write(self, partition: int, key: bytes, value: bytes | None) -> None:
        """Append a record to a partition; no value deletes what the key names."""
        records = self.records.get(partition)
        if records is None:
            records = self.records[partition] = []
        records.append((key, value))

    def answer(
        self, call: Call, response: Message, after: tuple[int, ...] = NOW
    ) -> None:
        """Answer a call; once all that was written to these partitions is on disk."""
        if call.answered:
            return  # it met a bug half-way, and was told so
        call.answered = True
        self.answers.append(Answer(call, response, after))

    def take_records(self) -> dict[int, list[tuple[bytes, bytes | None]]]:
        records, self.records = self.records, {}
        return records

    def take_answers(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        return answers
