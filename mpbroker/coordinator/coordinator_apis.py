"""The coordinator's APIs: decode, hand to the coordinator, park.

An answer comes by the outbox, at once or much later; so every API is "parked" here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

from mpbroker.coordinator.group_coordinator import GroupCoordinator
from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.message import Message
from mpbroker.server.apis import SERVED
from mpbroker.server.dispatcher import Api
from mpbroker.server.request import PARKED, Deferred, Request

Handle = Callable[[Call, Any, int], None]


def camel_case(api_key: ApiKey) -> str:
    return "".join(word.title() for word in api_key.name.split("_"))


def request_class(api_key: ApiKey) -> type[Message]:
    module = import_module(f"mpbroker.protocol.messages.{api_key.name.lower()}")
    found: type[Message] = getattr(module, f"{camel_case(api_key)}Request")
    return found


class CoordinatorApis:
    """Decodes requests and makes them calls.

    Args:
        client_host: says whose connection it is, as Kafka shows it: "/127.0.0.1".
        began: told of each call before it is handed on.
        others: what serves the APIs that are not of groups.
    """

    def __init__(
        self,
        coordinator: GroupCoordinator,
        client_host: Callable[[int], str],
        now_ms: Callable[[], int],
        began: Callable[[Call], None],
        others: Mapping[ApiKey, Handle],
    ) -> None:
        self._client_host = client_host
        self._now_ms = now_ms
        self._began = began
        handlers: Final[dict[ApiKey, Handle]] = {
            ApiKey.OFFSET_COMMIT: coordinator.offset_commit,
            ApiKey.OFFSET_FETCH: coordinator.offset_fetch,
            ApiKey.JOIN_GROUP: coordinator.join_group,
            ApiKey.HEARTBEAT: coordinator.heartbeat,
            ApiKey.LEAVE_GROUP: coordinator.leave_group,
            ApiKey.SYNC_GROUP: coordinator.sync_group,
            ApiKey.DESCRIBE_GROUPS: coordinator.describe_groups,
            ApiKey.LIST_GROUPS: coordinator.list_groups,
            ApiKey.DELETE_GROUPS: coordinator.delete_groups,
            ApiKey.OFFSET_DELETE: coordinator.offset_delete,
            ApiKey.CONSUMER_GROUP_HEARTBEAT: coordinator.consumer_group_heartbeat,
            ApiKey.CONSUMER_GROUP_DESCRIBE: coordinator.consumer_group_describe,
        }
        self.apis = {
            int(key): Api(key, SERVED[key], self._api(key, handle))
            for key, handle in (*handlers.items(), *others.items())
        }

    def _api(self, api_key: ApiKey, handle: Handle) -> Callable[[Request], Deferred]:
        decode: Callable[[int, Any], Message] | None = None

        def handle_request(request: Request) -> Deferred:
            nonlocal decode
            if decode is None:
                decode = request_class(api_key).decode
            message = decode(request.api_version, request.body)
            call = Call(
                request.api_version,
                request.client_id or "",
                partial(self._client_host, request.connection),
                request,
            )
            self._began(call)
            handle(call, message, self._now_ms())
            return PARKED

        return handle_request
