"""RequestDispatcher: find the handler of a request, and turn exceptions into answers.

The composition root gives it a ServedApi for each API (message_apis.served_apis). A
malformed request closes its connection. A refused request gets an error code. A bug of
the broker is logged with its traceback and answered with UNKNOWN_SERVER_ERROR, or, if
the API has no field for an error code, by closing the connection. Then the next request
is served.

Source: Kafka's KafkaApis.handle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.black_box import EventKind, note
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError, TooManyElementsError
from mpbroker.protocol.headers import (
    RequestHeader,
    parse_request_header,
    response_header_version,
)
from mpbroker.server.api_messages import refusal
from mpbroker.server.handlers.api_versions import unsupported_version
from mpbroker.server.request import CLOSE, Answer, Request

if TYPE_CHECKING:
    from mpbroker.server.quotas.client_quotas import ClientQuotas

_LOG = get_logger(__name__)

# Returns the body of the answer, or a Deferred: no answer now.
ApiHandler = Callable[[Request], Answer]
# Returns the body of an answer with an error code; None: the API has no such field.
ErrorAnswer = Callable[[Request, ErrorCode], bytes | None]

_HEAD: Final = Struct(">hhi")
_NO_API: Final = -1
_ASSIGNED: Final = frozenset(map(int, ApiKey))


def _count_nothing(api_key: int, error_code: int) -> None:
    """Do nothing: for a dispatcher whose errors nobody counts."""


class ServedApi:
    """Holds the served versions of one API, and the function that executes it.

    Attributes:
        oldest, newest: versions, both included.
        flexible: for each version from 0 on, whether the response header has tagged
            fields (version 1 of the header).
    """

    __slots__ = ("flexible", "handle", "newest", "oldest")

    def __init__(
        self, api_key: ApiKey, versions: tuple[int, int], handle: ApiHandler
    ) -> None:
        self.oldest, self.newest = versions
        self.handle = handle
        self.flexible = [
            response_header_version(api_key, version) == 1
            for version in range(self.newest + 1)
        ]


class RequestDispatcher:
    """Finds the handler of a request, and returns an answer whatever it raises.

    Args:
        apis: the served APIs, by API key.
        advertised: the oldest and newest version that ApiVersions advertises, by API
            key.
        error_answer: makes the body of an answer that has an error code only.
        name_connection: returns a connection's id for log lines.
        count_error: called with the API key (-1: unknown) and the code of each error.
        quotas: charge clients for their requests; None: nothing is charged.

    Attributes:
        errors: how many requests met a bug of the broker.
    """

    def __init__(
        self,
        apis: Mapping[int, ServedApi],
        advertised: Mapping[int, tuple[int, int]],
        error_answer: ErrorAnswer,
        name_connection: Callable[[int], str],
        count_error: Callable[[int, int], None] = _count_nothing,
        quotas: ClientQuotas | None = None,
    ) -> None:
        self._apis = apis
        self._advertised = advertised
        self._error_answer = error_answer
        self._name_connection = name_connection
        self._count_error = count_error
        self._quotas = quotas
        self.errors = 0

    def parse(
        self, slot: int, connection: int, frame: memoryview, received_ns: int
    ) -> Request | bytes | None:
        """Parse a request's header, and check that its API and version are served.

        Args:
            slot: the request's slot, which is its entry in shared memory.
            connection: the row of the request's connection.
            frame: the request header and body, without the size in front of it.
            received_ns: when the request was received (CLOCK_MONOTONIC).

        Returns:
            The request, if it can be executed. For an ApiVersions request of a newer
            version than is served: the frame of the answer, as bytes. None: the
            connection must be closed; the reason has been logged.
        """
        try:
            header = parse_request_header(frame)
        except ProtocolError as error:
            early = self._unreadable_api_versions(frame)
            if early is None:
                self._count_error(_NO_API, ErrorCode.INVALID_REQUEST)
                self._refuse(connection, f"unreadable request header: {error}")
            return early
        api = self._apis.get(header.api_key)
        if api is None:
            key = header.api_key if header.api_key in _ASSIGNED else _NO_API
            self._count_error(key, ErrorCode.UNSUPPORTED_VERSION)
            self._refuse(connection, f"API key {header.api_key} is not served")
            return None
        if not api.oldest <= header.api_version <= api.newest:
            if header.api_key == ApiKey.API_VERSIONS:
                return self._unsupported_api_versions(header.correlation_id)
            self._count_error(header.api_key, ErrorCode.UNSUPPORTED_VERSION)
            self._refuse(
                connection,
                f"{ApiKey(header.api_key).name} version {header.api_version} is not"
                f" served (versions {api.oldest} to {api.newest} are)",
            )
            return None
        return Request(
            slot,
            connection,
            received_ns,
            header,
            frame[header.size :],
            flexible_response=api.flexible[header.api_version],
        )

    def dispatch(self, request: Request) -> Answer:
        """Execute a request, charge its client and return the answer.

        No exception leaves this method. A malformed request gets the answer CLOSE, one
        with more elements than its API allows INVALID_REQUEST. Any other exception
        becomes an answer with an error code, or CLOSE if the API has no field for one.
        """
        answer: Answer
        try:
            answer = self._apis[request.api_key].handle(request)
        except TooManyElementsError as error:
            answer = self._too_many(request, error)
        except ProtocolError as error:
            self._count_error(request.api_key, ErrorCode.INVALID_REQUEST)
            self._refuse(
                request.connection,
                f"malformed {ApiKey(request.api_key).name}"
                f" v{request.api_version}: {error}",
            )
            answer = CLOSE
        except ApiError as error:
            code = error.error_code
            self._count_error(request.api_key, code)
            answer = self._error_answer(request, code) or CLOSE
        except Exception:  # noqa: BLE001 - whatever it is, serving goes on
            answer = self.met_bug(request)
        if self._quotas is not None:
            answer = self._quotas.settle(request, answer)
        return answer

    def _too_many(self, request: Request, error: TooManyElementsError) -> Answer:
        """Refuse a request that Kafka would execute, and keep its connection."""
        code = ErrorCode.INVALID_REQUEST
        self._count_error(request.api_key, code)
        _LOG.info("%s: refused: %s", self._name_connection(request.connection), error)
        return refusal(request, code) or CLOSE

    def out_of_turn(self, request: Request) -> Answer:
        """Return the answer to a request that was not executed: its turn did not come.

        It is REQUEST_TIMED_OUT, upon which clients try again, or CLOSE if the API has
        no field for it.
        """
        code = ErrorCode.REQUEST_TIMED_OUT
        self._count_error(request.api_key, code)
        return self._error_answer(request, code) or CLOSE

    def met_bug(self, request: Request) -> Answer:
        """Log the current exception as a bug of the broker, and return an answer.

        The answer is UNKNOWN_SERVER_ERROR, or CLOSE if the API has no field for it. To
        be called within an ``except`` clause, since it logs the traceback.
        """
        self.errors += 1
        self._count_error(request.api_key, ErrorCode.UNKNOWN_SERVER_ERROR)
        note(EventKind.BUG, request.api_key, request.connection)
        _LOG.exception(
            "%s v%d of %s failed; this is a bug",
            ApiKey(request.api_key).name,
            request.api_version,
            self._name_connection(request.connection),
        )
        return self._error_answer(request, ErrorCode.UNKNOWN_SERVER_ERROR) or CLOSE

    def _unreadable_api_versions(self, frame: memoryview) -> bytes | None:
        """Return the answer to an ApiVersions request that is too new to be parsed.

        Only the first 8 bytes of such a request can be read: API key, version and
        correlation id.

        Returns:
            The frame of the answer; None: the frame is no such request.

        Source: KIP-511.
        """
        if len(frame) < _HEAD.size:
            return None
        api_key, version, correlation_id = _HEAD.unpack_from(frame)
        api = self._apis.get(api_key)
        if api_key != ApiKey.API_VERSIONS or api is None or version <= api.newest:
            return None
        return self._unsupported_api_versions(correlation_id)

    def _unsupported_api_versions(self, correlation_id: int) -> bytes:
        self._count_error(ApiKey.API_VERSIONS, ErrorCode.UNSUPPORTED_VERSION)
        header = RequestHeader(ApiKey.API_VERSIONS, 0, correlation_id, None, 0)
        request = Request(-1, -1, 0, header, memoryview(b""), flexible_response=False)
        return request.frame(unsupported_version(self._advertised).encode(0))

    def _refuse(self, connection: int, reason: str) -> None:
        _LOG.info("%s: closed: %s", self._name_connection(connection), reason)
