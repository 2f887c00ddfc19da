"""Explain invalid first bytes of a frame: which protocol the client probably speaks.

Source: Kafka protocol guide, "Common Request and Response Structure"; RFC 8446
section 5.1 (a TLS record begins 0x16 0x03); RFC 9112 (an HTTP request line); HAProxy's
"The PROXY protocol", sections 2.1 and 2.2.
"""

from typing import Final

_HTTP_METHODS: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE", b"PATC")
_PROXY_PROTOCOL: Final = (b"PROX", b"\r\n\r\n")  # versions 1 and 2
_PROXY: Final = (
    "a load balancer sends the PROXY protocol, which the broker does not support:"
    " switch it off there"
)


def explain_bad_length(
    head: bytes,
    max_request_bytes: int,
    limit_name: str = "socket.request.max.bytes",
    protocol: str = "PLAINTEXT",
) -> str:
    """Say in one line why the four bytes ``head`` cannot begin a request.

    Args:
        head: the first bytes of the frame, which should be its length.
        max_request_bytes: the largest length that is allowed.
        limit_name: the name of the setting for this length.
        protocol: the listener's security protocol.
    """
    length = int.from_bytes(head, "big", signed=True)
    if head[:2] == b"\x16\x03":
        return (
            f"the client speaks TLS to a {protocol} listener"
            f" (first bytes {head.hex()}): set its security.protocol to {protocol}"
        )
    if head in _HTTP_METHODS:
        return f"the client speaks HTTP to a Kafka listener (first bytes {head!r})"
    if head in _PROXY_PROTOCOL:
        return f"{_PROXY} (first bytes {head!r})"
    if length < 0:
        return f"a frame of {length} bytes: the client does not speak Kafka's protocol"
    return (
        f"a frame of {length} bytes, larger than {limit_name} ="
        f" {max_request_bytes}: raise it, or send smaller requests"
    )


def explain_no_tls(head: bytes, protocol: str) -> str:
    """Say in one line which protocol a client speaks instead of TLS.

    Args:
        head: the first bytes that the client has sent.
        protocol: the listener's security protocol, SSL or SASL_SSL.
    """
    if head[:4] in _HTTP_METHODS:
        return f"the client speaks HTTP to a {protocol} listener (first bytes {head!r})"
    if head[:4] in _PROXY_PROTOCOL:
        return f"{_PROXY} (first bytes {head!r})"
    without = "SASL_PLAINTEXT" if protocol == "SASL_SSL" else "PLAINTEXT"
    return (
        f"the client does not speak TLS (first bytes {head.hex()}), and this is a"
        f" {protocol} listener: if its security.protocol is {without}, set it to"
        f" {protocol}"
    )
