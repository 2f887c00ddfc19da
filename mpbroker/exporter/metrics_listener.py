"""Open the listening sockets for metrics and for the console.

The supervisor opens them, so that an unusable address is an error of the start and not
a log line of a child.
"""

from __future__ import annotations

import socket
from typing import Final

from mpbroker.base.config_def import ConfigError
from mpbroker.config import BrokerConfig
from mpbroker.config.metrics_settings import HttpListener, parse_http_listener
from mpbroker.ipc.parts import Parts

_PART: Final = "metrics listener"
_CONSOLE_PART: Final = "console listener"
_BACKLOG: Final = 128


def open_metrics_listener(config: BrokerConfig, parts: Parts) -> socket.socket | None:
    """Return the listening socket for metrics; None: metrics.listeners is not set.

    A program that takes over from another one uses that program's socket.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    address = parse_http_listener("metrics.listeners", config.metrics_listeners)
    if address is None:
        return None
    return parts.listening(_PART, lambda: _listen("metrics.listeners", address))


def open_console_listener(config: BrokerConfig, parts: Parts) -> socket.socket | None:
    """Return the console's listening socket; None: console.listeners is not set.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    if not config.console_listeners:
        return None
    # Imported here: most brokers have no console.
    from mpbroker.config.console_settings import console_address

    address = console_address(config)
    assert address is not None
    return parts.listening(_CONSOLE_PART, lambda: _listen("console.listeners", address))


def _listen(key: str, wanted: HttpListener) -> socket.socket:
    host, port, is_secure = wanted
    shown = f"{'HTTPS' if is_secure else 'HTTP'}://{host}:{port}"
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
            f"{key}={shown}: {error.strerror}; choose another address or leave it unset"
        ) from error
    return sock


def url_of(sock: socket.socket, *, is_secure: bool = False) -> str:
    """Return the URL of the start page that a listening socket serves."""
    host, port = sock.getsockname()[:2]
    named = f"[{host}]" if ":" in host else host
    return f"{'https' if is_secure else 'http'}://{named}:{port}/"
