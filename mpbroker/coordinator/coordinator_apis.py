"""Execute the coordinator's APIs: decode, authorize, and call the API's method.

The method has the API's name: offset_commit() executes OFFSET_COMMIT. It takes a Call,
the request message and the time in ms, and puts its answer into the outbox (the list of
what is to be sent), at once or much later. So this module returns PARKED for each
request. The table of all APIs is in server/apis.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.server.apis import APIS, Api, Forwarded
from mpbroker.server.dispatcher import ApiHandler, ServedApi
from mpbroker.server.message_apis import MessageApi
from mpbroker.server.request import PARKED, Answer, Request

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Access, Authorization
    from mpbroker.server.authorization.rulings import Amend

Handle = Callable[[Call, Any, int], None]


class CoordinatorApis:
    """Executes each request by calling a method of one of the coordinator's parts.

    Attributes:
        apis: the APIs that the coordinator executes, by API key.

    Args:
        parts: the objects that have the methods, for example the GroupCoordinator.
        client_host: returns the address of a connection's client, as Kafka shows it:
            "/127.0.0.1".
        now_ms: returns the time of the wall clock in ms.
        began: called with each Call before the method that executes it.
        levels: returns the levels of the finalized features.
        authorization: asks the authorizer; None: there is none, all is allowed.
    """

    def __init__(
        self,
        parts: Sequence[object],
        client_host: Callable[[int], str],
        now_ms: Callable[[], int],
        began: Callable[[Call], None],
        levels: Callable[[], Mapping[str, int]],
        authorization: Authorization | None = None,
    ) -> None:
        self._client_host = client_host
        self._now_ms = now_ms
        self._began = began
        self._levels = levels
        self._began_ns = time.monotonic_ns()
        self.apis = {
            int(api.key): ServedApi(
                api.key,
                api.versions,
                self._execution(
                    api,
                    MessageApi(
                        api,
                        authorization,
                        partial(self._call, method_of(api.key, parts)),
                    ).execute,
                ),
            )
            for api in APIS.values()
            if api.forwarded is not Forwarded.NEVER
        }

    def _execution(self, api: Api, execute: ApiHandler) -> ApiHandler:
        """Return a function that executes the requests of an API.

        If the API needs a feature, the function first checks that the feature is on.
        """
        if api.feature is None:
            return execute
        feature = api.feature

        def execute_with_feature(request: Request) -> Answer:
            if feature not in self._levels():
                raise ApiError(ErrorCode.UNSUPPORTED_VERSION, f"{feature} is 0")
            return execute(request)

        return execute_with_feature

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
    """Return the method that executes an API, from the first part that has it.

    Raises:
        LookupError: no part has a method with the API's name in lower case.
    """
    for part in parts:
        found: Handle | None = getattr(part, api_key.name.lower(), None)
        if found is not None:
            return found
    raise LookupError(f"no part of the coordinator has a method for {api_key.name}")
