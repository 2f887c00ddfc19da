"""Judge the four bytes in front of a frame, and say who sends such a thing.

Source: Kafka protocol guide, "Common Request and Response Structure"; RFC 8446
section 5.1 (a TLS record begins 0x16 0x03); RFC 9112 (an HTTP request line).
"""

from typing import Final

_HTTP_METHODS: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE", b"PATC")


def explain_bad_length(head: bytes, max_request_bytes: int) -> str:
    """Say in one line why the four bytes ``head`` cannot begin a request."""
    length = int.from_bytes(head, "big", signed=True)
    if head[:2] == b"\x16\x03":
        return (
            "the client speaks TLS to a PLAINTEXT listener"
            f" (first bytes {head.hex()}): set its security.protocol to PLAINTEXT"
        )
    if head in _HTTP_METHODS:
        return f"the client speaks HTTP to a Kafka listener (first bytes {head!r})"
    if length < 0:
        return f"a frame of {length} bytes: the client does not speak Kafka's protocol"
    return (
        f"a frame of {length} bytes, larger than socket.request.max.bytes ="
        f" {max_request_bytes}: raise it, or send smaller requests"
    )
