"""Encode a connection's version of TLS and its cipher suite as one 64-bit word.

The word is in the connection's row, its record in shared memory, for other processes to
display. It consists of the two numbers that TLS defines: version << 16 | suite. The
names of both come from the OpenSSL that negotiated them.

Source: RFC 8446 B.4 and the IANA registry "TLS Cipher Suites"; ciphers(1) for OpenSSL's
names; Kafka's metrics have the registry's, as Java does.
"""

from __future__ import annotations

import functools
import socket
from typing import Final

_VERSION_SHIFT: Final = 16
_SUITE_MASK: Final = (1 << _VERSION_SHIFT) - 1
_VERSIONS: Final = {
    "TLSv1": 0x301,
    "TLSv1.1": 0x302,
    "TLSv1.2": 0x303,
    "TLSv1.3": 0x304,
}
_VERSION_NAMES: Final = {number: name for name, number in _VERSIONS.items()}
_KEY_EXCHANGES: Final = frozenset(
    {"ADH", "AECDH", "DHE", "DSS", "ECDHE", "ECDSA", "PSK", "RSA", "SRP"}
)
_MODES: Final = ("GCM", "CCM", "CBC", "CHACHA20", "RC4", "NULL")


def encryption_word(sock: socket.socket) -> int:
    """Return TLS version and cipher suite of a connection, as one number.

    Its handshake is over. Return 0 if it has no TLS.
    """
    import ssl  # imported here: not needed without TLS

    agreed = sock.cipher() if isinstance(sock, ssl.SSLSocket) else None
    if agreed is None:
        return 0
    assert isinstance(sock, ssl.SSLSocket)
    suite = _suites().get(agreed[0])
    if suite is None:  # the listener's settings have more suites than the default
        suite = {each["name"]: each["id"] for each in sock.context.get_ciphers()}.get(
            agreed[0], 0
        )
    version = _VERSIONS.get(sock.version() or "", 0)
    return version << _VERSION_SHIFT | suite & _SUITE_MASK


def encryption_names(word: int) -> tuple[str, str]:
    """Return the names of cipher suite and TLS version, from the number for both.

    The suite has the name of IANA's registry, the version Java's. An unknown number is
    returned in hexadecimal form.
    """
    version, suite = word >> _VERSION_SHIFT, word & _SUITE_MASK
    return (
        _suite_names().get(suite, f"0x{suite:04X}"),
        _VERSION_NAMES.get(version, f"0x{version:04X}"),
    )


@functools.cache
def _suites() -> dict[str, int]:
    """Return the numbers of all cipher suites, by OpenSSL's names."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:COMPLEMENTOFALL:@SECLEVEL=0")
    return {each["name"]: each["id"] for each in context.get_ciphers()}


@functools.cache
def _suite_names() -> dict[int, str]:
    return {
        number & _SUITE_MASK: registered_name(name)
        for name, number in _suites().items()
    }


def registered_name(name: str) -> str:
    """Return the name of a cipher suite in IANA's registry, from OpenSSL's name.

    ECDHE-RSA-AES128-GCM-SHA256 is TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256.
    """
    if name.startswith("TLS_"):
        return name
    parts = name.split("-")
    exchange = []
    while parts and parts[0] in _KEY_EXCHANGES:
        exchange.append(parts.pop(0))
    cipher = "_".join(parts)
    for size in ("128", "256"):
        for kind in ("AES", "ARIA", "CAMELLIA"):
            cipher = cipher.replace(kind + size, f"{kind}_{size}")
    if not any(mode in cipher for mode in _MODES):
        cipher = "_CBC_".join(cipher.rsplit("_", 1))
    if cipher.endswith("POLY1305"):
        cipher += "_SHA256"
    cipher = cipher.replace("CCM8", "CCM_8")
    return f"TLS_{'_'.join(exchange) or 'RSA'}_WITH_{cipher}"
