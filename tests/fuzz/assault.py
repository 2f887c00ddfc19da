"""Play volleys of bent requests against a broker, and read what it answers.

What a broker makes up (ids of topics, members, producers, sessions; generations and
epochs) is learned from its answers and written in the place of what was recorded,
before a request is bent: so the requests of a conversation reach as far as they did.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any, Final

import crc32c

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.headers import RequestHeader, parse_response_header
from mpbroker.protocol.message import Message
from tests.fuzz.attack import GLANCE_S, STUCK_S, BrokenPromiseError
from tests.fuzz.bent import Shot, Stream, decode, encoded, framed, sites
from tests.fuzz.recorder import Corpus
from tests.network.security.sasl.conversation import authenticate, handshake
from tests.support.message_cases import MESSAGES

USER, PASSWORD = "alice", "wonder,=land"

_RESPONSES: Final = {each.api_key: each for each in MESSAGES if not each.is_request()}
_SASL: Final = (ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)

# By API: what its answer tells, and the fields of requests that say it again.
_LEARNED: Final[dict[int, dict[str, tuple[str, ...]]]] = {
    ApiKey.JOIN_GROUP: {
        "member_id": ("member_id",),
        "generation_id": ("generation_id", "generation_id_or_member_epoch"),
    },
    ApiKey.CONSUMER_GROUP_HEARTBEAT: {
        "member_id": ("member_id",),
        "member_epoch": ("member_epoch", "generation_id_or_member_epoch"),
    },
    ApiKey.INIT_PRODUCER_ID: {
        "producer_id": ("producer_id", "v3_and_below_producer_id"),
        "producer_epoch": ("producer_epoch", "v3_and_below_producer_epoch"),
    },
    ApiKey.FETCH: {"session_id": ("session_id",)},
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: {
        "client_instance_id": ("client_instance_id",),
        "subscription_id": ("subscription_id",),
    },
}
# Where the fields of a magic-2 batch lie.
_CRC: Final = 17
_CRC_FROM: Final = 21
_PRODUCER_ID: Final = 43
_RECORDS: Final = 61


class _Peer:
    """One hostile connection.

    Attributes:
        waits: as ``Stream.waits``.
        served: the APIs of which a request was answered without an error.
        ended: whether the broker has closed the connection.
    """

    def __init__(
        self, address: tuple[str, int], stream: Stream, topic_ids: dict[bytes, bytes]
    ) -> None:
        self.waits = stream.waits
        self.served: set[ApiKey] = set()
        self._shots = list(stream.shots)
        self._topic_ids = topic_ids
        self._learned: dict[str, Any] = {}
        self._asked: list[tuple[int, RequestHeader | None]] = []
        self._received = bytearray()
        self._correlation_id = 0
        self._strict = stream.listener == "PLAINTEXT"  # else a token may be an answer
        self.ended = False
        self._socket = socket.create_connection(address, STUCK_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begins = [int.from_bytes(each.payload[:2], "big") for each in self._shots[:2]]
        if not self._strict and not set(begins) & set(_SASL):
            token = f"\0{USER}\0{PASSWORD}".encode()
            login = [Shot(handshake("PLAIN"), None), Shot(authenticate(token), None)]
            self._shots[:0] = login

    @property
    def left(self) -> bool:
        """Whether there is something to send, and a connection to send it over."""
        return bool(self._shots) and not self.ended

    def send_next(self, corpus: Corpus) -> bytes:
        """Send the next request; return it."""
        shot = self._shots.pop(0)
        payload = shot.payload
        for stand_in, topic_id in self._topic_ids.items():
            payload = payload.replace(stand_in, topic_id)
        payload = self._with_what_was_learned(payload)
        data = framed(corpus, Shot(payload, shot.seed))
        if not data:
            return b""
        if int.from_bytes(data[:4], "big", signed=True) != len(data) - 4:
            self._strict = False  # what follows may be read as anything
        if self._strict and len(data) >= 12:
            # Their own: those of a connection must differ.
            self._correlation_id += 1
            data = data[:8] + struct.pack(">i", self._correlation_id) + data[12:]
            read = decode(data[4:])
            self._asked.append((self._correlation_id, read[0] if read else None))
        try:
            self._socket.settimeout(STUCK_S)
            self._socket.sendall(data)
        except TimeoutError:
            raise BrokenPromiseError(f"takes no bytes for {STUCK_S} s") from None
        except ConnectionError:
            self.ended = True
        return data

    def _with_what_was_learned(self, payload: bytes) -> bytes:
        if not self._learned or (read := decode(payload)) is None:
            return payload
        header, message = read
        for owner, row in sites(message, header.api_version):
            value = getattr(owner, row.name)
            if row.name == "records" and value and "producer_id" in self._learned:
                setattr(owner, row.name, self._of_this_producer(bytes(value)))
            elif row.name in self._learned and value not in ("", -1, 0, None):
                setattr(owner, row.name, self._learned[row.name])
        return encoded(payload, header, message) or payload

    def _of_this_producer(self, batch: bytes) -> bytes:
        if len(batch) < _RECORDS or batch[_PRODUCER_ID] & 0x80:
            return batch
        made = bytearray(batch)
        producer = self._learned["producer_id"], self._learned["producer_epoch"]
        struct.pack_into(">qh", made, _PRODUCER_ID, *producer)
        struct.pack_into(">I", made, _CRC, crc32c.crc32c(bytes(made[_CRC_FROM:])))
        return bytes(made)

    def glance(self, glance_s: float) -> None:
        """Read what comes soon.

        Raises:
            BrokenPromiseError: what came is no answer to what was asked.
        """
        while not self.ended and (self._asked or not self._strict):
            self._socket.settimeout(glance_s)
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError:
                return
            except ConnectionError:
                data = b""
            self.ended = not data
            self._received += data
            if self._strict:
                self._take_answers()
            else:
                return

    def _take_answers(self) -> None:
        while len(self._received) >= 4:
            (size,) = struct.unpack_from(">i", self._received)
            if not 4 <= size < 1 << 26:
                raise BrokenPromiseError(f"an answer of {size} bytes")
            if len(self._received) < 4 + size:
                return
            answer = bytes(self._received[4 : 4 + size])
            del self._received[: 4 + size]
            self._take(answer)

    def _take(self, answer: bytes) -> None:
        correlation_id = int.from_bytes(answer[:4], "big", signed=True)
        # Before it may be requests that have no answer: acks=0.
        ids = [asked for asked, _ in self._asked]
        if correlation_id not in ids:
            raise BrokenPromiseError(f"an answer to {correlation_id}, asked {ids}")
        at = ids.index(correlation_id)
        header = self._asked[at][1]
        del self._asked[: at + 1]
        if header is None or header.api_key in (ApiKey.API_VERSIONS, *_SASL):
            return  # which may be refused in another version
        kind = _RESPONSES[ApiKey(header.api_key)]
        _, size = parse_response_header(answer, header.api_key, header.api_version)
        try:
            response = kind.decode(header.api_version, answer, size)
        except ProtocolError as error:
            raise BrokenPromiseError(
                f"{kind.__name__} {header.api_version} cannot be read: {error}"
            ) from error
        self._learn(response)
        if not _has_error(response, header.api_version):
            self.served.add(ApiKey(header.api_key))

    def _learn(self, response: Message) -> None:
        for told, fields in _LEARNED.get(response.api_key, {}).items():
            value = getattr(response, told, None)
            if value not in (None, "", -1, 0):
                self._learned |= dict.fromkeys(fields, value)
                if told == "producer_id":
                    self._learned["producer_epoch"] = response.producer_epoch

    def close(self, *, reset: bool) -> None:
        if reset:
            linger = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        with contextlib.suppress(OSError):
            self._socket.close()


def _has_error(response: Message, version: int) -> bool:
    return any(
        row.name == "error_code" and getattr(owner, row.name)
        for owner, row in sites(response, version)
    )


class Assault:
    """Plays volleys one after another.

    Attributes:
        sent: all requests of all volleys; the caller may empty it.
        served: the APIs of which a request was answered without an error.
        topic_ids: the id of each topic of the corpus, by its stand-in.

    Args:
        listeners: the broker's addresses by name.
        corpus: what volleys are made of.
        glance_s: how long an answer is waited for, which may not come.
    """

    def __init__(
        self, listeners: dict[str, str], corpus: Corpus, glance_s: float = GLANCE_S
    ) -> None:
        self._glance_s = glance_s
        self.topic_ids: dict[bytes, bytes] = {}
        self.served: set[ApiKey] = set()
        self.sent: list[bytes] = []
        self._listeners = listeners
        self._corpus = corpus

    def play(self, streams: list[Stream], *, reset: bool) -> None:
        """Play a volley over connections of its own.

        Raises:
            BrokenPromiseError: the broker answered what nothing has asked for, or so
                that it cannot be read.
            OSError: the broker takes no connections any more.
        """
        with contextlib.ExitStack() as stack:
            peers = []
            for stream in streams:
                host, _, port = self._listeners[stream.listener].rpartition(":")
                peers.append(_Peer((host, int(port)), stream, self.topic_ids))
                stack.callback(peers[-1].close, reset=reset)
            while shots := [
                each.send_next(self._corpus) for each in peers if each.left
            ]:
                self.sent += [shot for shot in shots if shot]
                for peer in peers:
                    if peer.waits:
                        peer.glance(self._glance_s)
            for peer in peers:
                peer.glance(self._glance_s)
                self.served |= peer.served
