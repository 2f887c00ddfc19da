"""One connection to a broker, without the socket.

Bytes from the broker go in, and responses come out. Requests go in, and bytes for the
broker come out. A broker answers the requests of one connection in their order. So the
requests in flight are a queue, and a response must have the correlation id of the
oldest one.

    connection = Connection("me")
    connection.negotiate()                      # ApiVersions; must come first
    socket.sendall(connection.data_to_send())
    while not connection.is_ready:
        connection.receive_data(socket.recv(65536))
        socket.sendall(connection.data_to_send())
    sent = connection.send(MetadataRequest(...), MetadataResponse)

Source: Kafka protocol guide, "Network" and "API Versions"; KIP-35, KIP-511.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from mpbroker import __version__
from mpbroker.client.errors import (
    ClientError,
    UnsupportedVersionError,
    check_error,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.framing import (
    DEFAULT_MAX_FRAME_BYTES,
    FrameDecoder,
    encode_frame_parts,
)
from mpbroker.protocol.headers import encode_request_header, parse_response_header
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
)
from mpbroker.protocol.messages.sasl_authenticate import SaslAuthenticateResponse
from mpbroker.protocol.messages.sasl_handshake import SaslHandshakeResponse
from mpbroker.protocol.primitives import Buffer

if TYPE_CHECKING:
    from mpbroker.client.sasl import SaslAuthenticator

SOFTWARE_NAME: Final = "mpbroker"
_SASL: Final = (ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)


class Answer(NamedTuple):
    """A response, its version, and the id that `Connection.send` gave its request."""

    correlation_id: int
    response: Message
    version: int


class _InFlight(NamedTuple):
    correlation_id: int
    version: int
    response_type: type[Message]


class Connection:
    """Encodes requests for a broker and decodes its responses; does no I/O.

    Attributes:
        features: the levels of the cluster's finalized features, by name, when the
            versions were agreed.
        features_epoch: the epoch of these levels, which rises with each change; -1: the
            broker does not tell it.
    """

    def __init__(
        self,
        client_id: str | None = SOFTWARE_NAME,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        authenticator: SaslAuthenticator | None = None,
    ) -> None:
        """Start without any request sent.

        Args:
            client_id: the name by which the broker logs the client and applies quotas.
            max_frame_bytes: a longer response is refused before it is read.
            authenticator: makes the login when the versions are agreed; None: no login.
        """
        self._client_id = client_id
        self._decoder = FrameDecoder(max_frame_bytes)
        self._out: list[Buffer] = []
        self._in_flight: deque[_InFlight] = deque()
        self._next_correlation_id = 0
        self._broker_versions: dict[int, tuple[int, int]] | None = None
        self.features: dict[str, int] = {}
        self.features_epoch = -1
        self._authenticator = authenticator
        self._is_authenticated = authenticator is None

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent: versions are agreed, and the login is done."""
        return self._broker_versions is not None and self._is_authenticated

    @property
    def session_lifetime_ms(self) -> int:
        """The time for which the login is valid, in ms from the broker's response.

        0 means for ever.
        """
        found = self._authenticator
        return 0 if found is None else found.session_lifetime_ms

    def authenticate(self) -> None:
        """Log in, for the first time or again.

        Requests that were sent before are answered first. No request can be sent until
        the login is done.
        """
        assert self._authenticator is not None
        self._is_authenticated = False
        self._send_own(self._authenticator.begin(), SaslHandshakeResponse, 1)

    def _send_own(
        self, request: Message, response_type: type[Message], lowest: int
    ) -> None:
        version = self.version_for(type(request))
        if version < lowest:
            raise UnsupportedVersionError(
                f"the broker serves {ApiKey(request.api_key).name} only up to"
                f" {version}, this client from {lowest} on"
            )
        self._put(request, version, response_type)

    @property
    def in_flight(self) -> int:
        """The number of requests that wait for their responses."""
        return len(self._in_flight)

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes that have come of an incomplete response."""
        return self._decoder.buffered_bytes

    def negotiate(self) -> None:
        """Ask the broker for its APIs, with the newest version of ApiVersions."""
        self._ask_versions(ApiVersionsRequest.valid_versions[-1])

    def _ask_versions(self, version: int) -> None:
        request = ApiVersionsRequest(
            client_software_name=SOFTWARE_NAME, client_software_version=__version__
        )
        self._put(request, version, ApiVersionsResponse)

    def version_for(
        self, request: type[Message], max_version: int | None = None
    ) -> int:
        """Return the highest version of a request that both sides know.

        Args:
            request: the request's class.
            max_version: the highest version to return, for callers that rely on the
                behaviour of an older one.

        Raises:
            ClientError: versions were not negotiated yet.
            UnsupportedVersionError: there is no such version.
        """
        if self._broker_versions is None:
            raise ClientError("no request can be sent before negotiate() is answered")
        ours = request.valid_versions
        top = ours[-1] if max_version is None else min(ours[-1], max_version)
        api = ApiKey(request.api_key).name
        if request.api_key not in self._broker_versions:
            raise UnsupportedVersionError(f"the broker does not serve {api}")
        low, high = self._broker_versions[request.api_key]
        version = min(top, high)
        if version < max(low, ours[0]):
            raise UnsupportedVersionError(
                f"the broker serves {api} {low}-{high}, this client {ours[0]}-{top}"
            )
        return version

    def send(
        self,
        request: Message,
        response_type: type[Message],
        *,
        max_version: int | None = None,
        expect_answer: bool = True,
    ) -> int:
        """Queue a request for `data_to_send`; return its correlation id.

        Args:
            request: the request, sent in the version that `version_for` returns.
            response_type: the class that decodes the response.
            max_version: see `version_for`.
            expect_answer: False for a Produce with acks=0, which brokers do not answer.

        Raises:
            ClientError, UnsupportedVersionError: see `version_for`.
            ProtocolError: the request has a value that this version cannot carry.
        """
        version = self.version_for(type(request), max_version)
        return self._put(request, version, response_type, expect_answer)

    def _put(
        self,
        request: Message,
        version: int,
        response_type: type[Message],
        expect_answer: bool = True,
    ) -> int:
        correlation_id = self._next_correlation_id
        api_key = request.api_key
        header = encode_request_header(
            api_key, version, correlation_id, self._client_id
        )
        self._out += encode_frame_parts(
            [header, *type(request).encoders[version](request)]
        )
        if expect_answer:
            self._in_flight.append(_InFlight(correlation_id, version, response_type))
        self._next_correlation_id = (correlation_id + 1) & 0x7FFFFFFF
        return correlation_id

    def data_to_send(self) -> bytes:
        """Remove and return the bytes to send to the broker now; b"" if none are."""
        return b"".join(self.parts_to_send())

    def parts_to_send(self) -> list[Buffer]:
        """Remove and return the bytes to send to the broker now, in parts.

        Records are not copied into these parts, so they must not change until they are
        sent.
        """
        out, self._out = self._out, []
        return out

    def receive_data(self, data: Buffer) -> list[Answer]:
        """Take bytes from the broker, however they were cut; return complete responses.

        Responses to `negotiate` and `authenticate` are not returned. They may need
        further requests, which `data_to_send` returns afterwards.

        Raises:
            SaslAuthenticationError: the broker refused the login.
            UnsupportedVersionError: the broker knows no common version for the login.
            ProtocolError: the bytes are not the responses of a broker.
            ApiError: the broker refused to tell its versions.

        After any of these errors, close the connection.
        """
        self._decoder.feed(data)
        answers = []
        while (frame := self._decoder.next_frame()) is not None:
            answer = self._read_frame(frame)
            if answer.response.api_key in _SASL and self._authenticator is not None:
                self._take_proof(self._authenticator, answer.response)
            elif (
                answer.response.api_key == ApiKey.API_VERSIONS
                and self._broker_versions is None
            ):
                assert isinstance(answer.response, ApiVersionsResponse)
                self._learn_versions(answer.response)
            else:
                answers.append(answer)
        return answers

    def _read_frame(self, frame: bytes) -> Answer:
        if not self._in_flight:
            raise ProtocolError(f"an answer of {len(frame)} bytes, but no request")
        correlation_id, version, response_type = self._in_flight[0]
        got, body = parse_response_header(frame, response_type.api_key, version)
        if got != correlation_id:
            raise ProtocolError(
                f"an answer to request {got}, but the oldest is {correlation_id}"
            )
        if response_type is ApiVersionsResponse and self._broker_versions is None:
            version = _versions_answer_version(frame, body, version)
        response = response_type.decode(version, frame, body)
        self._in_flight.popleft()
        return Answer(correlation_id, response, version)

    def _take_proof(self, authenticator: SaslAuthenticator, response: Message) -> None:
        request = authenticator.take(response)
        if request is None:
            self._is_authenticated = True
        else:
            self._send_own(request, SaslAuthenticateResponse, 0)

    def _learn_versions(self, response: ApiVersionsResponse) -> None:
        if response.error_code == ErrorCode.NONE:
            self._broker_versions = {
                entry.api_key: (entry.min_version, entry.max_version)
                for entry in response.api_keys
            }
            self.features = {
                entry.name: entry.max_version_level
                for entry in response.finalized_features
            }
            self.features_epoch = response.finalized_features_epoch
            if self._authenticator is not None:
                self.authenticate()
        elif response.error_code == ErrorCode.UNSUPPORTED_VERSION:
            if self._next_correlation_id > 1:
                raise ProtocolError("the broker knows no version of ApiVersions")
            self._ask_versions(_version_to_ask(response))
        else:
            check_error(response.error_code, "ApiVersions refused")


def _version_to_ask(response: ApiVersionsResponse) -> int:
    # With their refusal, newer brokers tell which versions of ApiVersions they know.
    for entry in response.api_keys:
        if entry.api_key == ApiKey.API_VERSIONS:
            return max(0, min(entry.max_version, ApiVersionsRequest.valid_versions[-1]))
    return 0


def _versions_answer_version(frame: bytes, body: int, asked: int) -> int:
    # A broker that does not know the version asked for answers in version 0.
    code = int.from_bytes(frame[body : body + 2], "big", signed=True)
    return 0 if code == ErrorCode.UNSUPPORTED_VERSION else asked
