"""Define a request as handlers see it, and frame its answer.

A framed answer is an int32 size, the response header (int32 correlation id; in version
1 an empty tag section of 1 byte) and the body.

Source: Kafka protocol guide, "Common Request and Response Structure".
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from mpbroker.ipc.response_parts import FilePart
from mpbroker.protocol.headers import (
    RequestHeader,
    parse_request_header,
    response_header_version,
)

if TYPE_CHECKING:
    from mpbroker.server.repeated.repeatable import Repeatable

_SIZE_AND_ID: Final = Struct(">ii")
_SIZE_ID_AND_TAGS: Final = Struct(">iib")


class Request:
    """Holds one request that this process executes: its header and undecoded body.

    Attributes:
        slot: the index of the request's entry in shared memory (control segment); -1:
            none.
        connection: the index of the connection's entry there; -1: none.
        received_ns: when the processor received it (CLOCK_MONOTONIC).
        body: a view of shared memory; it is valid until the request is answered.
        flexible_response: whether the response header has tagged fields (version 1).
        throttle_ms: how long the client's connection stays muted after the answer.
        repeatable: says that the answer holds for equal requests, too; None: it may
            not.
    """

    __slots__ = (
        "api_key",
        "api_version",
        "body",
        "client_id",
        "connection",
        "correlation_id",
        "flexible_response",
        "received_ns",
        "repeatable",
        "slot",
        "throttle_ms",
    )

    def __init__(
        self,
        slot: int,
        connection: int,
        received_ns: int,
        header: RequestHeader,
        body: memoryview,
        *,
        flexible_response: bool,
    ) -> None:
        self.slot = slot
        self.connection = connection
        self.received_ns = received_ns
        self.api_key = header.api_key
        self.api_version = header.api_version
        self.correlation_id = header.correlation_id
        self.client_id = header.client_id
        self.body = body
        self.flexible_response = flexible_response
        self.throttle_ms = 0
        self.repeatable: Repeatable | None = None

    def frame(self, body: bytes) -> bytes:
        """Return an answer as it is sent: size, response header and body."""
        if self.flexible_response:
            return _SIZE_ID_AND_TAGS.pack(len(body) + 5, self.correlation_id, 0) + body
        return _SIZE_AND_ID.pack(len(body) + 4, self.correlation_id) + body

    def frame_parts(self, parts: list[bytes | FilePart]) -> list[bytes | FilePart]:
        """Return an answer in parts as it is sent: size and header before the body.

        Empty parts are left out; adjacent byte strings are joined.
        """
        length = sum(
            part.length if isinstance(part, FilePart) else len(part) for part in parts
        )
        if self.flexible_response:
            head = _SIZE_ID_AND_TAGS.pack(length + 5, self.correlation_id, 0)
        else:
            head = _SIZE_AND_ID.pack(length + 4, self.correlation_id)
        framed: list[bytes | FilePart] = [head]
        for part in parts:
            last = framed[-1]
            if isinstance(part, FilePart):
                if part.length:
                    framed.append(part)
            elif isinstance(last, bytes):
                framed[-1] = last + part
            elif part:
                framed.append(part)
        return framed


def parse_request(
    slot: int, connection: int, frame: memoryview, received_ns: int
) -> Request:
    """Parse a frame whose header, API and version have been checked before."""
    header = parse_request_header(frame)
    version = response_header_version(header.api_key, header.api_version)
    return Request(
        slot,
        connection,
        received_ns,
        header,
        frame[header.size :],
        flexible_response=version == 1,
    )


class Deferred:
    """Says why a handler process sends no answer now to a request that it was given.

    Another process sends it, or it is sent later, or never.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


# The body of an answer, in parts if it has ranges of files; a Deferred: none now.
Answer = bytes | list[bytes | FilePart] | Deferred

PARKED: Final = Deferred("parked")  # it waits in the purgatory
FORWARDED: Final = Deferred("forwarded")  # the coordinator answers
NO_RESPONSE: Final = Deferred("no response")  # Produce with acks=0
CLOSE: Final = Deferred("close")  # close the connection
