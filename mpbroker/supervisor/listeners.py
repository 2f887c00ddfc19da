"""Open the listen sockets: the supervisor's, so that a backlog outlives an acceptor."""

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from mpbroker.config.listeners import EndPoint
from mpbroker.config_def import ConfigError


class Listener(NamedTuple):
    """One open listener."""

    number: int
    endpoint: EndPoint
    sock: socket.socket
    port: int  # the real one, where the setting said 0

    @property
    def address(self) -> str:
        """What a client on this machine may dial."""
        host = self.endpoint.host
        if self.endpoint.is_wildcard:
            host = "::1" if self.sock.family == socket.AF_INET6 else "127.0.0.1"
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def open_listeners(
    endpoints: Sequence[EndPoint], backlog: int, receive_buffer_bytes: int
) -> list[Listener]:
    """Bind and listen on all of them, or on none.

    Raises:
        ConfigError: one cannot be bound; it says which, why and what to do.
    """
    opened: list[Listener] = []
    try:
        for endpoint in endpoints:
            sock = _bind(endpoint, receive_buffer_bytes)
            sock.listen(backlog)
            port = sock.getsockname()[1]
            opened.append(Listener(len(opened), endpoint, sock, port))
    except BaseException:
        for listener in opened:
            listener.sock.close()
        raise
    return opened


def _bind(endpoint: EndPoint, receive_buffer_bytes: int) -> socket.socket:
    host = endpoint.host
    try:
        found = socket.getaddrinfo(
            host or None,
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
        raise ConfigError(
            f"listeners={endpoint.connection_string}: cannot listen there: {reason};"
            " stop what uses the address, or name another host or port"
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
