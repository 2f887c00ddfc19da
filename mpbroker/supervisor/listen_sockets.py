"""Open the listen sockets.

The supervisor owns them, so that a backlog outlives an acceptor. A socket that the
service manager (systemd) passed is used in place of a new one. Either a socket unit
made it, which chooses its name; or the previous broker left it in the manager's store,
under the name that STORED_PREFIX begins. In the latter case clients that connected in
between wait in its backlog, and none was refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

from mpbroker.base.config_def import ConfigError
from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.config.listeners import EndPoint

if TYPE_CHECKING:
    from mpbroker.supervisor.systemd import InheritedSocket

_LOG = get_logger(__name__)

# Listener names have no colon, and neither may the names of stored descriptors.
STORED_PREFIX: Final = "stored-"
_SOCKET_MODE: Final = 0o660  # a Unix socket admits its user and group


class AddressError(MpbrokerError):
    """A listener's address cannot be bound now; the settings need not be wrong."""


class Origin(Enum):
    """Who made a listener's socket: this broker, systemd, or the broker before."""

    BOUND = auto()  # this broker
    PASSED = auto()  # a socket unit of the service manager
    STORED = auto()  # the previous broker, by way of the manager's store


class Listener(NamedTuple):
    """One open listener: its endpoint, its socket, and who made the socket."""

    number: int
    endpoint: EndPoint
    sock: socket.socket
    port: int  # the real one, if the setting is 0; a Unix socket has 0
    origin: Origin = Origin.BOUND

    @property
    def stored_name(self) -> str:
        """The name by which systemd keeps this socket for the next broker."""
        return STORED_PREFIX + self.endpoint.listener_name

    @property
    def path(self) -> str | None:
        """The path of the listener's Unix socket; None: it is a TCP socket."""
        return self.endpoint.path

    @property
    def address(self) -> str:
        """An address that a client on this machine can connect to."""
        if self.path is not None:
            return self.endpoint.host
        host = self.endpoint.host
        if self.endpoint.is_wildcard:
            host = "::1" if self.sock.family == socket.AF_INET6 else "127.0.0.1"
        return _with_port(host, self.port)

    @property
    def told(self) -> str:
        """The listener's name and address as text for people: "NAME on 0.0.0.0:9092".

        A listener on all addresses is shown with the wildcard address.
        """
        address = self.address
        if self.endpoint.is_wildcard and self.path is None:
            is_ipv6 = self.sock.family == socket.AF_INET6
            address = _with_port("::" if is_ipv6 else "0.0.0.0", self.port)
        return f"{self.endpoint.listener_name} on {address}"

    @staticmethod
    def state_of(those: Sequence[Listener]) -> dict[str, Any]:
        """Return the part of the broker's published state that describes listeners.

        "listeners" has by name the address for clients; "serving" has texts for people.
        """
        return {
            "listeners": {each.endpoint.listener_name: each.address for each in those},
            "serving": [each.told for each in those],
        }


def _with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_listeners(
    endpoints: Sequence[EndPoint],
    backlog: int,
    receive_buffer_bytes: int,
    inherited: Sequence[InheritedSocket] = (),
) -> list[Listener]:
    """Listen on all endpoints, or on none.

    Args:
        endpoints: the configured endpoints.
        backlog: socket.listen.backlog.size; a socket unit has its own Backlog=.
        receive_buffer_bytes: socket.receive.buffer.bytes; -1 leaves it to the system.
        inherited: sockets from the service manager, used where one fits an endpoint;
            unused ones from the manager's store are closed.

    Raises:
        AddressError: an endpoint cannot be bound; the text says which one, why and what
            to do.
        ConfigError: a socket unit passed a socket that no listener asks for.
    """
    opened: list[Listener] = []
    spare = list(inherited)
    try:
        for endpoint in endpoints:
            found = _choose(endpoint, spare)
            if found is None:
                sock, origin = _bind(endpoint, receive_buffer_bytes), Origin.BOUND
            else:
                spare.remove(found)
                sock, origin = found.sock, _origin_of(found)
                if origin is Origin.PASSED:
                    endpoint = _as_passed(endpoint, sock)
                if receive_buffer_bytes >= 0:
                    sock.setsockopt(
                        socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes
                    )
            port = 0 if endpoint.path is not None else sock.getsockname()[1]
            opened.append(Listener(len(opened), endpoint, sock, port, origin))
            if origin is not Origin.PASSED:
                sock.listen(backlog)
        _refuse_unasked(spare, endpoints)
    except BaseException:
        close_listeners(opened)
        raise
    finally:
        for each in spare:
            each.sock.close()
    return opened


def _origin_of(found: InheritedSocket) -> Origin:
    stored = found.name.startswith(STORED_PREFIX)
    return Origin.STORED if stored else Origin.PASSED


def _choose(
    endpoint: EndPoint, inherited: Sequence[InheritedSocket]
) -> InheritedSocket | None:
    """Return the inherited socket for a listener; None: there is none that fits.

    It is a socket unit's with the listener's name, else a socket unit's with its
    address, else one that the previous broker stored under its name.
    """
    passed = [each for each in inherited if _origin_of(each) is Origin.PASSED]
    for each in passed:
        if each.name.upper() == endpoint.listener_name:
            return each
    for each in passed:
        is_known = endpoint.port or endpoint.path is not None
        if is_known and _is_at(each.sock, endpoint):
            return each
    for each in inherited:
        # Its address is compared: the settings may have changed since it was stored.
        if each.name == STORED_PREFIX + endpoint.listener_name and _is_at(
            each.sock, endpoint
        ):
            return each
    return None


def _is_at(sock: socket.socket, endpoint: EndPoint) -> bool:
    """Whether a socket listens on the address that is configured for a listener."""
    if sock.family == socket.AF_UNIX or endpoint.path is not None:
        return bool(sock.getsockname() == endpoint.path)
    host, port = sock.getsockname()[:2]
    if endpoint.port not in (0, port):
        return False
    if not endpoint.host:
        return host in ("::", "0.0.0.0")
    try:
        found = socket.getaddrinfo(
            endpoint.host.encode(),
            port,
            sock.family,
            socket.SOCK_STREAM,
            0,
            socket.AI_PASSIVE,
        )
    except OSError:
        return False  # the attempt to bind reports the reason
    return any(address[0] == host for *_, address in found)


def _as_passed(endpoint: EndPoint, sock: socket.socket) -> EndPoint:
    """Return an endpoint with the address on which its socket unit listens."""
    host, port = _where(sock)
    if host.startswith("unix:") and endpoint.security_protocol != "PLAINTEXT":
        raise ConfigError(
            f"socket activation: {endpoint.listener_name} is {host}, where"
            f" {endpoint.security_protocol} is not served, only PLAINTEXT"
        )
    if not _is_at(sock, endpoint):
        _LOG.warning(
            "listeners=%s: the service manager passed a socket named %s that listens on"
            " %s port %d, which is used; set listeners alike",
            endpoint.connection_string,
            endpoint.listener_name,
            host,
            port,
        )
    return endpoint._replace(host=host, port=port)


def _refuse_unasked(
    spare: Sequence[InheritedSocket], endpoints: Sequence[EndPoint]
) -> None:
    """Raise ConfigError if a socket unit passed a socket that no listener uses.

    Its clients would wait for ever.
    """
    for each in spare:
        if _origin_of(each) is Origin.PASSED:
            host, port = _where(each.sock)
            raise ConfigError(
                f"socket activation: no listener for the socket {each.name or '?'} on"
                f" {host} port {port}; listeners are "
                + ", ".join(endpoint.connection_string for endpoint in endpoints)
                + "; add it there, name it after one of them (FileDescriptorName=), or"
                " take it out of the socket unit"
            )


def _where(sock: socket.socket) -> tuple[str, int]:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}", 0
    host, port = sock.getsockname()[:2]
    return str(host), int(port)


def close_listeners(listeners: Sequence[Listener]) -> None:
    """Close the listeners; remove their Unix sockets' files if a broker made them.

    A file stays if another process listens there by now.
    """
    for each in listeners:
        each.sock.close()
        if each.path is not None and each.origin is not Origin.PASSED:
            with contextlib.suppress(OSError):
                if not _somebody_listens(each.path):
                    os.unlink(each.path)


def _bind_unix(endpoint: EndPoint, path: str) -> socket.socket:
    """Bind a Unix socket at a path; replace a dead process's socket if it is there.

    Raises:
        AddressError: another process listens there, or the file is not a socket.
    """
    told = f"listeners={endpoint.connection_string}"
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise AddressError(
                f"{told}: {path} is there and is no socket; remove it, or name another"
                " path"
            )
        if _somebody_listens(path):
            raise AddressError(
                f"{told}: another process listens there; stop it, or name another path"
            )
        os.unlink(path)
        _LOG.info("%s: removed the socket that a dead process left", told)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise AddressError(f"{told}: cannot listen there: {error.strerror}") from None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    # By umask and not by chmod afterwards: at no time may other users connect.
    before = os.umask(0o777 & ~_SOCKET_MODE)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise AddressError(
            f"{told}: cannot listen there: {error.strerror}; the directory must be"
            " there, and this user must be allowed to write in it"
        ) from None
    finally:
        os.umask(before)
    return sock


def _somebody_listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        error = sock.connect_ex(path)
    if error in (errno.ECONNREFUSED, errno.ENOENT):
        return False
    if error in (0, errno.EAGAIN):  # EAGAIN: its backlog is full
        return True
    raise OSError(error, os.strerror(error))


def _bind(endpoint: EndPoint, receive_buffer_bytes: int) -> socket.socket:
    if endpoint.path is not None:
        return _bind_unix(endpoint, endpoint.path)
    host = endpoint.host
    try:
        found = socket.getaddrinfo(
            # As bytes where possible: for a str the codec "idna" is imported (2.5 ms).
            host.encode() if host.isascii() and host else host or None,
            endpoint.port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
        # The wildcard as IPv6 serves IPv4 too; a name prefers IPv4, as clients do.
        found.sort(key=lambda each: (each[0] == socket.AF_INET6) != (not host))
        family, _, _, _, address = found[0]
        try:
            return _listening(family, address, receive_buffer_bytes)
        except OSError:
            if host or len(found) == 1:
                raise
            family, _, _, _, address = found[1]  # a machine without IPv6
            return _listening(family, address, receive_buffer_bytes)
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "stop what uses the address, or name another host or port"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            fix = "name an address of this host, or none for all of them"
        raise AddressError(
            f"listeners={endpoint.connection_string}: cannot listen there: {reason};"
            f" {fix}"
        ) from None


def _listening(
    family: int, address: object, receive_buffer_bytes: int
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            wildcard = isinstance(address, tuple) and address[0] == "::"
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not wildcard)
        if receive_buffer_bytes >= 0:
            # Before bind, so that accepted sockets inherit the window's scale.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        sock.bind(address)  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise
    return sock
