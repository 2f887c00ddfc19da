"""A request as handlers see it, and the framing of its answer."""

from struct import Struct
from typing import Final

from mpbroker.ipc.response_parts import FilePart
from mpbroker.protocol.headers import (
    RequestHeader,
    parse_request_header,
    response_header_version,
)

_SIZE_AND_ID: Final = Struct(">ii")
_SIZE_ID_AND_TAGS: Final = Struct(">iib")


class Request:
    """One claimed request: its header, and the bytes of its body where they lie."""

    __slots__ = (
        "api_key",
        "api_version",
        "body",
        "client_id",
        "connection",
        "correlation_id",
        "flexible_response",
        "received_ns",
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
        self.throttle_ms = 0  # for so long its client is not heard after the answer

    def frame(self, body: bytes) -> bytes:
        """Put size and response header in front of an answer's body."""
        if self.flexible_response:
            return _SIZE_ID_AND_TAGS.pack(len(body) + 5, self.correlation_id, 0) + body
        return _SIZE_AND_ID.pack(len(body) + 4, self.correlation_id) + body

    def frame_parts(self, parts: list[bytes | FilePart]) -> list[bytes | FilePart]:
        """The same for a body in parts; empty parts are left out."""
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
    """Make a Request of a frame whose header and version are known to be good."""
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
    """What a handler returns when the answer comes later, or never."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


PARKED: Final = Deferred("parked")  # the purgatory has it
FORWARDED: Final = Deferred("forwarded")  # the coordinator has it
NO_RESPONSE: Final = Deferred("no response")  # acks=0
CLOSE: Final = Deferred("close")  # close the connection
