"""Match the addresses of clients with the hosts that ACLs name.

A host is "*", an address in any spelling, or a network in CIDR notation, as in Kafka
from 4.4 on. An IPv4 address that is written as IPv6 (::ffff:10.0.0.1) is the same
address. Any other text is compared with a client's address as it is, and so matches
nobody.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

from mpbroker.protocol.acl import WILDCARD

Network = IPv4Network | IPv6Network

# Entries and clients of which the parsed form is kept.
_KEPT: Final = 8192
_MAPPED_BITS: Final = 96  # of an IPv6 address before the IPv4 address in it


def parse_host(text: str) -> Network | None:
    """Return the addresses that an entry's host stands for.

    Return None if the host is neither an address nor a network. Bits behind a network's
    prefix are ignored.

    Raises:
        ValueError: the host has a slash, and is not a network in CIDR notation.
    """
    address, slash, prefix = text.partition("/")
    try:
        if slash and not (prefix.isascii() and prefix.isdigit()):
            raise ValueError(prefix)
        found = ip_network((address, int(prefix)) if slash else address, strict=False)
    except ValueError:
        if not slash:
            return None
        says = f"`{text:.100}` is not a network, for example 10.0.0.0/8"
        raise ValueError(says) from None
    if isinstance(found, IPv6Network) and found.prefixlen >= _MAPPED_BITS:
        inner = found.network_address.ipv4_mapped
        if inner is not None:
            return IPv4Network((inner, found.prefixlen - _MAPPED_BITS))
    return found


def matches_host(wanted: str, host: str) -> bool:
    """Return whether an entry's host includes a client's address."""
    if wanted in (WILDCARD, host):
        return True
    network = _network(wanted)
    return network is not None and _is_in(host, network)


@lru_cache(maxsize=_KEPT)
def _network(text: str) -> Network | None:
    try:
        return parse_host(text)
    except ValueError:  # from a log that did not check it
        return None


@lru_cache(maxsize=_KEPT)
def _is_in(host: str, network: Network) -> bool:
    try:
        address = ip_address(host)
    except ValueError:  # no address: a Unix socket
        return False
    if not isinstance(address, IPv4Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address in network
