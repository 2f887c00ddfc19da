"""RequestDispatcher: which API, which version, and what an exception becomes.

Kafka's KafkaApis.handle. Each API is one line in a table that the composition root
fills: decode, call the handler, encode. What is wrong with a request closes its
connection or becomes an error code; what is wrong with us is logged with its
traceback, answered as UNKNOWN_SERVER_ERROR where the API can say so, and serving
goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.black_box import EventKind, note
from mpbroker.ipc.response_parts import FilePart
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.protocol.headers import (
    RequestHeader,
    parse_request_header,
    response_header_version,
)
from mpbroker.server.handlers.api_versions import unsupported_version
from mpbroker.server.request import CLOSE, Deferred, Request

if TYPE_CHECKING:
    from mpbroker.server.quotas.client_quotas import ClientQuotas

_LOG = get_logger(__name__)

Answer = bytes | list[bytes | FilePart] | Deferred
# Returns the body of the answer, or says that there is none yet.
ApiHandler = Callable[[Request], Answer]
# Makes the body that says an error, for a request that could not be handled.
ErrorAnswer = Callable[[Request, ErrorCode], bytes | None]

_HEAD: Final = Struct(">hhi")
_NO_API: Final = -1
_ASSIGNED: Final = frozenset(map(int, ApiKey))


def _nobody_counts(api_key: int, error_code: int) -> None:
    """Where nobody looks."""


class ServedApi:
    """One API as it is served here."""

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
    """Find the handler of a request, and answer whatever happens.

    Args:
        apis: what is served.
        advertised: what ApiVersions says is served.
        error_answer: makes the answer to a request that met a bug.
        name_connection: for log lines.
        count_error: told of the API key and the code of each error.
        quotas: charge clients for what is executed; None: nothing is charged.
    """

    def __init__(
        self,
        apis: Mapping[int, ServedApi],
        advertised: Mapping[int, tuple[int, int]],
        error_answer: ErrorAnswer,
        name_connection: Callable[[int], str],
        count_error: Callable[[int, int], None] = _nobody_counts,
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
        """Read a request's header.

        Returns:
            The request; or a frame to answer with at once (ApiVersions of a version
            above ours); or None: close the connection, the reason is logged.
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
        """Handle a request and charge its client; every exception ends here."""
        answer: Answer
        try:
            answer = self._apis[request.api_key].handle(request)
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

    def met_bug(self, request: Request) -> Answer:
        """Within ``except``: log a bug of ours with its traceback, and answer."""
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
        """KIP-511: only the first eight bytes of a future ApiVersions are known."""
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
