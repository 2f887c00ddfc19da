"""The coordinator's APIs: decode, hand to the coordinator, park.

An answer comes by the outbox, at once or much later; so every API is "parked" here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.outbox import Call
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.message import Message
from mpbroker.server.api_messages import request_class
from mpbroker.server.apis import SERVED
from mpbroker.server.dispatcher import Answer, Api
from mpbroker.server.request import CLOSE, PARKED, Request

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Authorization
    from mpbroker.server.authorization.authorization_rules import Check

Handle = Callable[[Call, Any, int], None]


class CoordinatorApis:
    """Decodes requests and makes them calls.

    Args:
        client_host: says whose connection it is, as Kafka shows it: "/127.0.0.1".
        began: told of each call before it is handed on.
        others: what serves the APIs that are not of groups.
        authorization: says who may do what; None: everybody everything.
    """

    def __init__(
        self,
        coordinator: GroupCoordinator,
        client_host: Callable[[int], str],
        now_ms: Callable[[], int],
        began: Callable[[Call], None],
        others: Mapping[ApiKey, Handle],
        authorization: Authorization | None = None,
    ) -> None:
        self._authorization = authorization
        if authorization is not None:
            coordinator.be_guarded()
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

    def _api(self, api_key: ApiKey, handle: Handle) -> Callable[[Request], Answer]:
        decode: Callable[[int, Any], Message] | None = None
        check = self._check(api_key)

        def handle_request(request: Request) -> Answer:
            nonlocal decode
            if decode is None:
                decode = request_class(api_key).decode
            message = decode(request.api_version, request.body)
            verdict = access = None
            if check is not None:
                access = self._authorization.access(request)  # type: ignore[union-attr]
                if access is None:
                    return CLOSE  # nobody is there to be answered
                verdict = check(access, message, request.api_version)
                if verdict is not None:
                    if verdict.request is None:
                        assert verdict.answer is not None
                        return verdict.answer.encode(request.api_version)
                    message = verdict.request
            call = Call(
                request.api_version,
                request.client_id or "",
                partial(self._client_host, request.connection),
                request,
                None if verdict is None else verdict.amend,
                access,
            )
            self._began(call)
            handle(call, message, self._now_ms())
            return PARKED

        return handle_request

    def _check(self, api_key: ApiKey) -> Check | None:
        if self._authorization is None:
            return None
        # Imported here: most brokers have no authorizer.
        from mpbroker.server.authorization.authorization_rules import RULES

        return RULES[api_key]
