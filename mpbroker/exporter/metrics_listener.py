"""Open the listening socket for metrics.

The supervisor opens it, so that an unusable address is an error of the start and not a
log line of a child.
"""

from __future__ import annotations

import socket
from typing import Final

from mpbroker.base.config_def import ConfigError
from mpbroker.config import BrokerConfig
from mpbroker.config.metrics_settings import parse_metrics_listener
from mpbroker.ipc.parts import Parts

_PART: Final = "metrics listener"
_BACKLOG: Final = 128


def open_metrics_listener(config: BrokerConfig, parts: Parts) -> socket.socket | None:
    """Return the listening socket; None: metrics.listeners is not set.

    A program that takes over uses the socket of the program before it.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    address = parse_metrics_listener(config.metrics_listeners)
    if address is None:
        return None
    return parts.listening(_PART, lambda: _listen(*address))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            # As bytes: the codec "idna", used for a str, raises its own kind of error.
            host.encode() or None,
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"metrics.listeners=HTTP://{host}:{port}: {error.strerror}; choose another"
            " address or leave it unset"
        ) from error
    return sock


def metrics_url(sock: socket.socket) -> str:
    """Return the address of the status page."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
