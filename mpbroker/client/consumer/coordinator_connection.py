"""CoordinatorConnection: finds the coordinator of one group, and sends it requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from mpbroker.client.addresses import Address
from mpbroker.client.cluster import Broker, Cluster
from mpbroker.client.errors import (
    BrokerUnavailableError,
    check_error,
    describe_error,
    error_code_of,
)
from mpbroker.client.settings import ClientSettings
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)

ResponseT = TypeVar("ResponseT", bound=Message)

_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms
_ONE_KEY_MAX_VERSION: Final = 3  # of FindCoordinator; later versions have several keys
_FIND_AGAIN: Final = frozenset(
    {ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE}
)


class CoordinatorConnection:
    """The connection to a group's coordinator; several threads may use it in turn."""

    def __init__(self, client: ClientSettings, group_id: str) -> None:
        """Store the settings; the first request connects.

        Args:
            client: the settings of the connections.
            group_id: the group's id.
        """
        self._timeout_s = client.request_timeout_ms / 1000
        self._cluster = Cluster(client.bootstrap, self._timeout_s, client)
        self._group_id = group_id
        self._found: Broker | None = None
        self._lock = threading.RLock()  # guards the connection and its responses

    def ask_once(self, request: Message, response_type: type[ResponseT]) -> ResponseT:
        """Send a request to the coordinator once, and return the response.

        Raises:
            BrokerUnavailableError: the coordinator is not found, or does not answer.
            ApiError: the broker refused the group, for example by an ACL.
        """
        with self._lock:
            try:
                return self._find().request(request, response_type)
            except BrokerUnavailableError:
                self.find_again()
                raise

    def ask(
        self,
        request: Message,
        response_type: type[ResponseT],
        code_of: Callable[[ResponseT], int],
    ) -> ResponseT:
        """Send a request until a coordinator serves it, and return the response.

        It looks for another coordinator, or waits, for up to request.timeout.ms.

        Args:
            request: the request.
            response_type: the class that decodes the response.
            code_of: returns the error code of a response.

        Raises:
            BrokerUnavailableError: no coordinator answers within request.timeout.ms.
            ApiError: the broker refused the group, for example by an ACL.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                response = self.ask_once(request, response_type)
            except BrokerUnavailableError:
                if time.monotonic() > deadline:
                    raise
            else:
                code = error_code_of(code_of(response))
                self.note(code)
                waits = code in _FIND_AGAIN or (
                    code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
                )
                if not waits or time.monotonic() > deadline:
                    return response
            time.sleep(_RETRY_INTERVAL_S)

    def note(self, code: ErrorCode) -> None:
        """Look for the coordinator again if a response's error code says so."""
        if code in _FIND_AGAIN:
            self.find_again()

    def find_again(self) -> None:
        """Forget the coordinator, so that the next request looks for it again."""
        with self._lock:
            self._found = None

    def _find(self) -> Broker:
        if self._found is not None:
            return self._found
        request = FindCoordinatorRequest(key=self._group_id)
        found = self._cluster.request(
            request, FindCoordinatorResponse, max_version=_ONE_KEY_MAX_VERSION
        )
        what = f"coordinator of group {self._group_id!r}"
        code = error_code_of(found.error_code)
        if code in _FIND_AGAIN or code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
            raise BrokerUnavailableError(f"{what}: {describe_error(code, None)}")
        check_error(found.error_code, what, found.error_message)
        self._found = self._cluster.at(Address(found.host, found.port))
        return self._found

    def end_by(self, end_s: float) -> None:
        """Let no request wait beyond a time, not even one of another thread.

        Args:
            end_s: the time of the monotonic clock, in seconds.
        """
        self._cluster.end_by(end_s)

    def close(self) -> None:
        """Close the connections."""
        self.find_again()
        self._cluster.close()
