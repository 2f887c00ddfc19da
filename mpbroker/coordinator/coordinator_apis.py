"""Execute the coordinator's APIs: decode, authorize, and call the API's method.

The method has the API's name: offset_commit() executes OFFSET_COMMIT. It takes a Call,
the request message and the time in ms, and puts its answer into the outbox, at once or
much later. So this module returns PARKED for each request. The rows of the APIs are in
server/apis.py.
"""

from __future__ import annotations

import time
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
    """Calls the methods of the coordinator's parts for requests.

    Attributes:
        apis: the APIs that the coordinator executes, by API key.

    Args:
        parts: the objects that have the methods.
        client_host: returns the address of a connection's client, as Kafka shows it:
            "/127.0.0.1".
        now_ms: returns the time of the wall clock in ms.
        began: called with each Call before its method is.
        authorization: asks the authorizer; None: there is none, all is allowed.
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
        self._began_ns = time.monotonic_ns()
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
        call.waited_ms = (time.monotonic_ns() - request.received_ns) // 1_000_000
        call.is_older = request.received_ns < self._began_ns
        self._began(call)
        handle(call, message, self._now_ms())
        return PARKED


def method_of(api_key: ApiKey, parts: Sequence[object]) -> Handle:
    """Return the method that executes an API, from the first part that has one.

    Raises:
        LookupError: no part has one; the API's row or the method is missing.
    """
    for part in parts:
        found: Handle | None = getattr(part, api_key.name.lower(), None)
        if found is not None:
            return found
    raise LookupError(f"no part of the coordinator has a method for {api_key.name}")
