"""Addresses of brokers, and bootstrap.servers: `host:port,[::1]:9092`."""

from __future__ import annotations

from typing import Final, NamedTuple

from mpbroker.client.errors import AddressError

DEFAULT_PORT: Final = 9092


class Address(NamedTuple):
    """The address of a broker: a host name or numeric address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_addresses(text: str) -> list[Address]:
    """Parse a comma-separated list of addresses; the port is 9092 unless given.

    `PLAINTEXT://` before an address is ignored, because listeners are spelled with it.

    Raises:
        AddressError: an address cannot be read; the text says which, and why.
    """
    addresses = [
        _parse_address(part.strip()) for part in text.split(",") if part.strip()
    ]
    if not addresses:
        raise AddressError(f"bootstrap {text!r} names no address; give HOST:PORT")
    return addresses


def _parse_address(text: str) -> Address:
    rest = text.removeprefix("PLAINTEXT://")
    if "://" in rest:
        scheme = rest.partition("://")[0]
        raise AddressError(
            f"bootstrap {text!r}: give HOST:PORT, and {scheme} as security.protocol"
        )
    if rest.startswith("["):
        host, bracket, port = rest[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise _unreadable(text)
        port = port[1:]
    elif rest.count(":") > 1:
        host, port = rest, ""  # a bare IPv6 address
    else:
        host, _, port = rest.partition(":")
    if not port:
        port = "" if rest.endswith(":") else str(DEFAULT_PORT)
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise _unreadable(text)
    if not 1 <= int(port) <= 65535:
        raise AddressError(f"bootstrap {text!r}: port {port} is not in 1..65535")
    return Address(host, int(port))


def _unreadable(text: str) -> AddressError:
    return AddressError(f"bootstrap {text!r} is not HOST:PORT (or [IPV6]:PORT)")
