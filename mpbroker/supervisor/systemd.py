"""Tell systemd, or whoever started us, how things stand.

Source: sd_notify(3).
"""

import contextlib
import os
import socket
from collections.abc import Mapping


def notify(message: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send a state such as ``READY=1`` to $NOTIFY_SOCKET; False if there is none."""
    address = environ.get("NOTIFY_SOCKET")
    if not address or address[0] not in "/@":
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        contextlib.suppress(OSError),
    ):
        sock.sendto(message.encode(), address)
        return True
    return False
