"""The coordinator's APIs: decode, authorize, hand to the coordinator, park.

An API is handled by the method that has its name: OFFSET_COMMIT by offset_commit(). Its
answer comes by the outbox, at once or much later; so every request is parked here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.api_key import ApiKey
from mpbroker.server.apis import APIS, Forwarded
from mpbroker.server.dispatcher import Answer, ServedApi
from mpbroker.server.message_apis import MessageApi
from mpbroker.server.request import PARKED, Request

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Access, Authorization
    from mpbroker.server.authorization.rulings import Amend

Handle = Callable[[Call, Any, int], None]


class CoordinatorApis:
    """Makes requests the calls of the coordinator's parts.

    Attributes:
        apis: by API key.

    Args:
        parts: whose methods handle the APIs.
        client_host: says whose connection it is, as Kafka shows it: "/127.0.0.1".
        now_ms: the time.
        began: told of each call before it is handed on.
        authorization: says who may do what; None: everybody everything.
    """

    def __init__(
        self,
        parts: Sequence[object],
        client_host: Callable[[int], str],
        now_ms: Callable[[], int],
        began: Callable[[Call], None],
        authorization: Authorization | None = None,
    ) -> None:
        self._client_host = client_host
        self._now_ms = now_ms
        self._began = began
        self.apis = {
            int(api.key): ServedApi(
                api.key,
                api.versions,
                MessageApi(
                    api, authorization, partial(self._call, method_of(api.key, parts))
                ).execute,
            )
            for api in APIS.values()
            if api.forwarded is not Forwarded.NEVER
        }

    def _call(
        self,
        handle: Handle,
        request: Request,
        message: Any,
        access: Access | None,
        amend: Amend | None,
    ) -> Answer:
        call = Call(
            request.api_version,
            request.client_id or "",
            partial(self._client_host, request.connection),
            request,
            amend,
            access,
        )
        self._began(call)
        handle(call, message, self._now_ms())
        return PARKED


def method_of(api_key: ApiKey, parts: Sequence[object]) -> Handle:
    """Return the method that handles an API.

    Raises:
        LookupError: no part has one.
    """
    for part in parts:
        found: Handle | None = getattr(part, api_key.name.lower(), None)
        if found is not None:
            return found
    raise LookupError(f"no part of the coordinator handles {api_key.name}")
