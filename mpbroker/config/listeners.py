"""Parse and check listeners: NAME://host:port, NAME://unix:/path.

Source: KIP-103 and KIP-797 say which listeners may be combined.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from mpbroker.base.config_def import ConfigError, ConfigValue, Validator
from mpbroker.base.named_tuple import NamedTuple

SECURITY_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")

_LISTENER_NAME: Final = r"[A-Za-z0-9_.\-]+"
_LISTENER: Final = re.compile(
    r"(?P<name>[A-Za-z0-9_.\-]+)://(?:\[(?P<v6>[^\[\]]*)\]|(?P<host>[^\[\]:/]*))"
    r":(?P<port>[0-9]{1,5})"
)
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]{0,252})")
_UNIX: Final = "unix:"
_MAX_PATH_BYTES: Final = 107  # sun_path of sockaddr_un has 108, with a NUL at its end
_WILDCARDS: Final = ("0.0.0.0", "::", "::0", "0:0:0:0:0:0:0:0")


class EndPoint(NamedTuple):
    """A listener: an address that clients connect to.

    Attributes:
        host: empty: every address of the machine. A Unix socket has ``unix:/path``.
        port: 0: the system chooses one. A Unix socket has 0.
    """

    listener_name: str
    host: str
    port: int
    security_protocol: str

    @property
    def connection_string(self) -> str:
        """The listener as the setting `listeners` spells it."""
        if self.path is not None:
            return f"{self.listener_name}://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.listener_name}://{host}:{self.port}"

    @property
    def path(self) -> str | None:
        """The path of a Unix socket; None: the listener is no Unix socket."""
        is_unix = self.host.startswith(_UNIX)
        return self.host.removeprefix(_UNIX) if is_unix else None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the listener."""
        return (
            self.path is not None
            or self.host in ("localhost", "::1")
            or self.host.startswith("127.")
        )

    @property
    def is_wildcard(self) -> bool:
        """Whether the host stands for every address of the machine."""
        return not self.host or self.host in _WILDCARDS


class AdvertisedEndPoint(NamedTuple):
    """The address that Metadata gives to the clients of a listener.

    An empty host or port 0 stands for the host or port that the client connected to.
    """

    host: str
    port: int


def parse_listeners(
    items: Sequence[str], protocols: Mapping[str, str], *, key: str
) -> list[EndPoint]:
    """Parse the entries of ``key`` (`listeners` or `advertised.listeners`).

    Args:
        items: the entries; blanks around them are ignored.
        protocols: security protocol by listener name.
        key: the setting's name, for errors.

    Raises:
        ConfigError: a malformed entry, or a name without a protocol.
    """
    return [_parse_listener(item.strip(), protocols, key) for item in items]


def _parse_listener(item: str, protocols: Mapping[str, str], key: str) -> EndPoint:
    name, _, address = item.partition("://")
    if address.startswith(_UNIX) and re.fullmatch(_LISTENER_NAME, name):
        _check_path(address.removeprefix(_UNIX), item, key)
        protocol = _protocol_of(name.upper(), protocols, key)
        return EndPoint(name.upper(), address, 0, protocol)
    match = _LISTENER.fullmatch(item)
    if match is None:
        raise ConfigError(
            f"{key}: unable to parse {_shown(item)} to a broker endpoint; it must be"
            " NAME://host:port, an IPv6 address in brackets, or NAME://unix:/path, for"
            " example PLAINTEXT://127.0.0.1:9092"
        )
    port = int(match["port"])
    if port > 65535:
        raise ConfigError(f"{key}: {item}: port {port} is above 65535")
    name = match["name"].upper()
    host = match["host"]
    if host is None:
        host = match["v6"]
        _check_ipv6(host, item, key)
    elif host and not _HOST_NAME.fullmatch(host):
        raise ConfigError(
            f"{key}: {_shown(item)}: {host!r} is neither an IPv4 address nor a host"
            " name; write an IPv6 address in brackets"
        )
    return EndPoint(name, host, port, _protocol_of(name, protocols, key))


def _protocol_of(name: str, protocols: Mapping[str, str], key: str) -> str:
    protocol = protocols.get(name)
    if protocol is None:
        raise ConfigError(
            f"{key}: no security protocol defined for listener {name}; add"
            f" {name}:PLAINTEXT to listener.security.protocol.map"
        )
    return protocol


def _check_path(path: str, item: str, key: str) -> None:
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError(
            f"{key}: {_shown(item)}: a Unix socket needs a whole path, for example"
            " LOCAL://unix:/run/mpbroker/kafka.sock"
        )
    length = len(os.fsencode(path))
    if length > _MAX_PATH_BYTES:
        raise ConfigError(
            f"{key}: {_shown(item)}: the path has {length} bytes, and the path of a"
            f" Unix socket may have {_MAX_PATH_BYTES}; use a shorter path"
        )


def _check_ipv6(host: str, item: str, key: str) -> None:
    address, percent, zone = host.partition("%")
    if not _is_literal(socket.AF_INET6, address) or (percent and not zone):
        raise ConfigError(f"{key}: {_shown(item)}: {host!r} is not an IPv6 address")


def _is_literal(family: socket.AddressFamily, host: str) -> bool:
    try:
        socket.inet_pton(family, host)
    except (OSError, ValueError):  # ValueError: a NUL inside
        return False
    return True


def _shown(item: str) -> str:
    return repr(item if len(item) <= 100 else item[:100] + "...")


def parse_protocol_map(items: Iterable[str]) -> dict[str, str]:
    """Parse listener.security.protocol.map: NAME:PROTOCOL, comma-separated.

    Raises:
        ConfigError: a malformed entry, a name twice, an unknown protocol.
    """
    key = "listener.security.protocol.map"
    protocols: dict[str, str] = {}
    for item in items:
        name, colon, protocol = (part.strip() for part in item.partition(":"))
        name, protocol = name.upper(), protocol.upper()
        if not (name and colon):
            raise ConfigError(f"{key}: {_shown(item)} is not NAME:PROTOCOL")
        if protocol not in SECURITY_PROTOCOLS:
            raise ConfigError(
                f"{key}: {_shown(item)}: unknown security protocol; it must be one of "
                + ", ".join(SECURITY_PROTOCOLS)
            )
        if name in protocols:
            raise ConfigError(f"{key}: listener {name} is given twice")
        protocols[name] = protocol
    return protocols


def parse_connection_overrides(items: Iterable[str]) -> dict[str, int]:
    """Parse max.connections.per.ip.overrides: host:count, comma-separated.

    Raises:
        ConfigError: an entry is not host:count.
    """
    overrides = {}
    for item in items:
        host, _, count = item.strip().rpartition(":")
        if not (host and count.isascii() and count.isdigit() and len(count) < 11):
            raise ConfigError(
                f"max.connections.per.ip.overrides: {_shown(item)} is not host:count,"
                " for example 127.0.0.1:100"
            )
        overrides[host.strip("[]")] = int(count)
    return overrides


def connection_overrides() -> Validator:
    """Return a validator that accepts lists of host:count."""

    def accepts(value: ConfigValue) -> bool:
        assert isinstance(value, tuple)
        try:
            parse_connection_overrides(value)
        except ConfigError:
            return False
        return True

    return Validator("each as host:count, for example 127.0.0.1:100", accepts)


def check_listeners(endpoints: Sequence[EndPoint]) -> None:
    """Check that listeners can be opened together.

    Raises:
        ConfigError: there is no listener, or two have one name, one path or one port
            (an IPv4 and an IPv6 address may share a port).
    """
    if not endpoints:
        raise ConfigError("listeners: name at least one listener")
    names = [endpoint.listener_name for endpoint in endpoints]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"listeners: each needs a name of its own; {name} is there twice"
            )
    _check_ports(endpoints)
    _check_unix(endpoints)


def check_planes(
    endpoints: Sequence[EndPoint], control_plane: str | None, inter_broker: str | None
) -> None:
    """Check the listener of the control plane, and the listener for other brokers.

    Raises:
        ConfigError: one of them is not a listener, both are the same listener, or no
            listener is left for data.
    """
    names = [endpoint.listener_name for endpoint in endpoints]
    for key, name in (
        ("inter.broker.listener.name", inter_broker),
        ("control.plane.listener.name", control_plane),
    ):
        if name is not None and name.upper() not in names:
            raise ConfigError(
                f"{key}={name}: not among the listeners " + ", ".join(sorted(names))
            )
    if control_plane is None:
        return
    if inter_broker is not None and control_plane.upper() == inter_broker.upper():
        raise ConfigError(
            "control.plane.listener.name, when defined, should have a different value"
            " from the inter broker listener name. Currently they both have the value"
            f" {control_plane}"
        )
    if len(names) == 1:
        raise ConfigError(
            f"control.plane.listener.name={control_plane}: there is no other listener,"
            " and this one serves no data; add a listener"
        )


def exposure_warnings(endpoints: Iterable[EndPoint]) -> list[str]:
    """Return warnings about listeners that are open to other machines."""
    warnings = []
    for endpoint in endpoints:
        if endpoint.is_loopback:
            continue
        if endpoint.security_protocol == "PLAINTEXT":
            warnings.append(
                f"{endpoint.connection_string} is open to other machines: any client"
                " that reaches it may read and write everything, unencrypted and"
                " without a password; bind it to 127.0.0.1, or use SSL, SASL_SSL or"
                " ACLs"
            )
        elif endpoint.security_protocol == "SASL_PLAINTEXT":
            warnings.append(
                f"{endpoint.connection_string} is open to other machines, and nothing"
                " that is sent there is encrypted; use SASL_SSL"
            )
    return warnings


def _check_ports(endpoints: Sequence[EndPoint]) -> None:
    by_port: dict[int, list[EndPoint]] = {}
    for endpoint in endpoints:
        if endpoint.port:
            by_port.setdefault(endpoint.port, []).append(endpoint)
    for port, sharing in by_port.items():
        if len(sharing) == 1:
            continue
        families = {_literal_family(endpoint.host) for endpoint in sharing}
        if len(sharing) > 2 or families != {4, 6}:
            raise ConfigError(
                f"listeners: each needs its own port; {port} is used by "
                + ", ".join(endpoint.connection_string for endpoint in sharing)
                + "; only one IPv4 and one IPv6 address may share a port"
            )


def _check_unix(endpoints: Sequence[EndPoint]) -> None:
    paths = [each.path for each in endpoints]
    for each in endpoints:
        if each.path is None:
            continue
        if paths.count(each.path) > 1:
            raise ConfigError(
                f"listeners: each needs a path of its own; {each.path} is there twice"
            )
        if each.security_protocol != "PLAINTEXT":
            raise ConfigError(
                f"listeners: {each.connection_string}: {each.security_protocol} is not"
                " served on a Unix socket, where the file's owner and mode say which"
                f" clients may connect; add {each.listener_name}:PLAINTEXT to"
                " listener.security.protocol.map"
            )


def _literal_family(host: str) -> int:
    if ":" in host:
        return 6
    return 4 if _is_literal(socket.AF_INET, host) else 0


def advertised_by_listener(
    advertised: Sequence[EndPoint], listeners: Sequence[EndPoint]
) -> dict[str, AdvertisedEndPoint]:
    """Return the addresses that clients are told, by listener name.

    A client of a listener that is not advertised is told the address that it connected
    to; for a Unix socket that is ``unix:/path`` and port 0.

    Raises:
        ConfigError: a wildcard address, a name twice, or a name without a listener.
    """
    known = {endpoint.listener_name for endpoint in listeners}
    result = {
        each.listener_name: AdvertisedEndPoint(each.host if each.path else "", 0)
        for each in listeners
    }
    seen = set()
    for endpoint in advertised:
        name = endpoint.listener_name
        if endpoint.host in _WILDCARDS:
            raise ConfigError(
                f"advertised.listeners: {endpoint.connection_string}: clients cannot"
                f" connect to {endpoint.host}; name an address that they can reach, or"
                " leave the host empty for the address that they connect to"
            )
        if name not in known:
            raise ConfigError(
                f"advertised.listeners: {name} is not among the listeners "
                + ", ".join(sorted(known))
            )
        if name in seen:
            raise ConfigError(f"advertised.listeners: {name} is given twice")
        seen.add(name)
        result[name] = AdvertisedEndPoint(endpoint.host, endpoint.port)
    return result
