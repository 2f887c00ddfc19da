"""Execute requests as messages: decode, authorize, handle, encode.

Each of these steps is done once for a request. The authorization rule of the API's row
removes from the request message the parts that are denied, before the handler gets it.
The rule may return a function that adds the refusals to the response. So handlers
contain no authorization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpbroker.base.logger import get_logger
from mpbroker.ipc.layout import HEADER, HEADER_OFFLINE_CHANGES
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.message import Message
from mpbroker.server.api_messages import request_class
from mpbroker.server.apis import OPEN, Api, Forwarded
from mpbroker.server.dispatcher import ApiHandler, ServedApi
from mpbroker.server.handler_context import Broker, HandlerContext
from mpbroker.server.repeated.repeatable import Repeatable
from mpbroker.server.request import CLOSE, FORWARDED, Answer, Deferred, Request

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Access, Authorization
    from mpbroker.server.authorization.rulings import Amend, Rule

# Executes a decoded request whose denied parts the rule has removed.
Run = Callable[[Request, Any, "Access | None", "Amend | None"], Answer]
Handler = Callable[[Any, HandlerContext], Message | Deferred]

_LOG = get_logger(__name__)


class MessageApi:
    """Executes the requests of one API in this process.

    Args:
        api: the API's row in apis.py: its versions, its authorization rule.
        authorization: asks the authorizer. None: there is none, and all is allowed.
        run: takes the decoded request and returns the answer.
    """

    __slots__ = ("_api", "_authorization", "_decode", "_rule", "_run")

    def __init__(self, api: Api, authorization: Authorization | None, run: Run) -> None:
        self._api = api
        self._authorization = None if api.rule is OPEN else authorization
        self._run = run
        self._decode: Callable[[int, memoryview], Any] | None = None
        self._rule: Rule | None = None

    def execute(self, request: Request) -> Answer:
        """Execute a request of this API: decode, authorize, handle, encode.

        Returns:
            The encoded body of the response, or a Deferred. CLOSE if the client has
            disconnected, so that its permissions are unknown.

        Raises:
            ProtocolError: the request is malformed; the caller closes the connection.
            ApiError: the request is refused as a whole, with this error code.
        """
        decode = self._decode or self._import()
        authorization = self._authorization
        if authorization is None:
            message = decode(request.api_version, request.body)
            return self._run(request, message, None, None)
        access = authorization.access(request)
        if access is None:
            return CLOSE  # the client has disconnected
        message = decode(request.api_version, request.body)
        assert self._rule is not None
        ruling = self._rule(access, message, request.api_version)
        if isinstance(ruling, Message):
            return ruling.encode(request.api_version)
        return self._run(request, message, access, ruling)

    def _import(self) -> Callable[[int, memoryview], Any]:
        """Import an API's rule and request class; return the function that decodes."""
        if self._authorization is not None:
            self._rule = rule_of(self._api)
        self._decode = request_class(self._api.key).decode
        return self._decode


def rule_of(api: Api) -> Rule:
    """Import and return the authorization rule of an API that needs a permission."""
    rule: Rule
    if isinstance(api.rule, AclOperation):
        from mpbroker.server.authorization.rulings import cluster_rule

        rule = cluster_rule(api.rule)
    else:
        assert api.rule is not None
        module, _, function = api.rule.partition(":")
        found = import_module(f"mpbroker.server.authorization.{module}")
        rule = getattr(found, function)
    return rule


def served_apis(
    rows: Iterable[Api],
    broker: Broker,
    services: Mapping[ApiKey, ApiHandler],
    forward: Callable[[int], None],
    authorization: Authorization | None = None,
) -> dict[int, ServedApi]:
    """Return how a handler process serves each API, by API key.

    Args:
        rows: the APIs to serve.
        broker: the broker as the handlers see it.
        services: the functions that execute the APIs with ``in_bytes``.
        forward: forwards the request in a slot to the coordinator.
        authorization: asks the authorizer. None: there is none, and all is allowed.
    """

    def forward_unread(request: Request) -> Deferred:
        forward(request.slot)
        return FORWARDED

    catch_up = broker.registry.catch_up

    def caught_up(execute: ApiHandler) -> ApiHandler:
        """Return a function that first reads the metadata log, and then executes.

        It reads the log's new records. If that fails, it raises ApiError
        KAFKA_STORAGE_ERROR.
        """

        def execute_caught_up(request: Request) -> Answer:
            try:
                catch_up()
            except OSError as error:
                _LOG.error("the metadata log cannot be read: %s", error)
                raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, str(error)) from error
            return execute(request)

        return execute_caught_up

    def execution(row: Api) -> ApiHandler:
        if row.forwarded is Forwarded.ALWAYS:
            return forward_unread
        if row.in_bytes:
            return caught_up(services[row.key])
        run = _handling(row, broker, forward)
        return caught_up(MessageApi(row, authorization, run).execute)

    return {
        int(row.key): ServedApi(row.key, row.versions, execution(row)) for row in rows
    }


def _handling(row: Api, broker: Broker, forward: Callable[[int], None]) -> Run:
    """Return the function that calls an API's handler and encodes its response."""
    handler: Handler | None = None

    def run(
        request: Request, message: Any, access: Access | None, amend: Amend | None
    ) -> Answer:
        nonlocal handler
        if handler is None:
            handler = row.handler()
        context = HandlerContext(broker, request, access, amend)
        metadata_version = broker.registry.version
        offline_changes = broker.words[HEADER + HEADER_OFFLINE_CHANGES]
        response = handler(message, context)
        if isinstance(response, Deferred):
            if response is FORWARDED:
                forward(request.slot)
            return response
        if amend is not None:
            amend(response)
        answer = response.encode(request.api_version)
        if amend is None and context.repeatable is not None:
            rules = None if access is None else access.version
            request.repeatable = Repeatable(
                response, context.repeatable, metadata_version, offline_changes, rules
            )
        return answer

    return run
