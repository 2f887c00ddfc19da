"""The two APIs of client quotas: what is set is in the metadata log."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpbroker.protocol.api_key import ApiKey
from mpbroker.server.request import Request

if TYPE_CHECKING:
    from mpbroker.metadata.topics import TopicRegistry


class QuotaApis:
    """What answers them in one handler process."""

    def __init__(self, registry: TopicRegistry) -> None:
        self._registry = registry

    def handlers(self) -> dict[ApiKey, Callable[[Request], bytes]]:
        """Return what answers each API."""
        return {
            ApiKey.DESCRIBE_CLIENT_QUOTAS: self._describe,
            ApiKey.ALTER_CLIENT_QUOTAS: self._alter,
        }

    def _describe(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.describe_client_quotas import (
            DescribeClientQuotasRequest,
        )
        from mpbroker.server.handlers.describe_client_quotas import (
            handle_describe_client_quotas,
        )

        version = request.api_version
        message = DescribeClientQuotasRequest.decode(version, request.body)
        return handle_describe_client_quotas(
            message, self._registry.client_quotas
        ).encode(version)

    def _alter(self, request: Request) -> bytes:
        from mpbroker.protocol.messages.alter_client_quotas import (
            AlterClientQuotasRequest,
        )
        from mpbroker.server.handlers.alter_client_quotas import (
            handle_alter_client_quotas,
        )

        version = request.api_version
        message = AlterClientQuotasRequest.decode(version, request.body)
        return handle_alter_client_quotas(message, self._registry, _resolves).encode(
            version
        )


def _resolves(host: str) -> bool:
    """Whether a text is an address, or the name of one."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True
