"""A proxy between clients and a broker that keeps the requests that pass through it.

It reads requests as frames, and of the answers only those that tell a topic's id. What
it keeps is a corpus: conversations, each a connection's frames in order, without those
that are long, and those of which each client has sent enough of the same kind.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.headers import (
    RequestHeader,
    parse_request_header,
    parse_response_header,
)
from mpbroker.protocol.messages.api_versions import ApiVersionsRequest
from mpbroker.protocol.messages.metadata import MetadataResponse

CORPUS: Final = Path(__file__).with_name("corpus.jsonl")

# Longer frames are records, of which a short one has the same fields.
_LONGEST_FRAME: Final = 2048
# Of each API and version, from each client.
_OF_A_KIND: Final = 4
# The names of tests' topics differ in each run; these few stand for them.
_TEST_NAME: Final = re.compile(rb"test-[0-9a-f]{12}")
_NAMES: Final = 3
_ZERO_ID: Final = bytes(16)


class Conversation(NamedTuple):
    """What one connection has sent.

    Attributes:
        client: the software at the other end, or what it called itself.
        listener: the listener that it was connected to.
        frames: requests in order, without their lengths.
    """

    client: str
    listener: str
    frames: list[bytes]


class Corpus(NamedTuple):
    """Recorded conversations.

    Attributes:
        topics: the id that stands for each topic, by its name.
        conversations: in the order in which their connections were made.
    """

    topics: dict[str, bytes]
    conversations: list[Conversation]


def load(path: Path = CORPUS) -> Corpus:
    """Read a corpus from a file."""
    with path.open() as file:
        topics = {
            name: bytes.fromhex(text)
            for name, text in json.loads(file.readline()).items()
        }
        conversations = []
        for line in file:
            client, listener, *frames = json.loads(line)
            conversations.append(
                Conversation(client, listener, [base64.b64decode(f) for f in frames])
            )
    return Corpus(topics, conversations)


def save(corpus: Corpus, path: Path = CORPUS) -> None:
    """Write a corpus to a file: a line for all topics, and one a conversation."""
    lines = [json.dumps({name: value.hex() for name, value in corpus.topics.items()})]
    for client, listener, frames in corpus.conversations:
        encoded = [base64.b64encode(frame).decode() for frame in frames]
        lines.append(json.dumps([client, listener, *encoded], separators=(",", ":")))
    path.write_text("\n".join(lines) + "\n")


class Recorder:
    """Listens in the place of a broker, and passes on what comes.

    Args:
        listener: the name of the broker's listener.
        port: where to listen on loopback; the broker advertises it.
        broker_port: where the broker listens.
    """

    def __init__(self, listener: str, port: int, broker_port: int) -> None:
        self._listener = listener
        self._broker_port = broker_port
        self._lock = threading.Lock()
        self.conversations: list[Conversation] = []
        self.topic_ids: dict[bytes, str] = {}
        self._server = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                _Connection(self, client, self._broker_port)
            except OSError:  # the broker does not run just now
                client.close()

    def begin(self) -> list[bytes]:
        """Return the list for the frames of a new conversation."""
        frames: list[bytes] = []
        with self._lock:
            self.conversations.append(Conversation("", self._listener, frames))
        return frames


class _Connection:
    """A client's connection and one of its own to the broker."""

    def __init__(self, recorder: Recorder, client: socket.socket, port: int) -> None:
        self._recorder = recorder
        self._asked: dict[int, RequestHeader] = {}
        broker = socket.create_connection(("127.0.0.1", port))
        self._frames = recorder.begin()
        for end in (client, broker):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ends = client, broker
        back = threading.Thread(
            target=_pass_on, args=(broker, client, self._response), daemon=True
        )
        back.start()
        threading.Thread(target=self._run, args=(back,), daemon=True).start()

    def _run(self, back: threading.Thread) -> None:
        client, broker = self._ends
        _pass_on(client, broker, self._request)
        back.join()
        client.close()
        broker.close()

    def _request(self, frame: bytes) -> None:
        self._frames.append(frame)
        with contextlib.suppress(ProtocolError):
            header = parse_request_header(frame)
            if header.api_key == ApiKey.METADATA:
                self._asked[header.correlation_id] = header

    def _response(self, frame: bytes) -> None:
        header = self._asked.pop(int.from_bytes(frame[:4], "big", signed=True), None)
        if header is None:
            return
        version = header.api_version
        _, size = parse_response_header(frame, header.api_key, version)
        for topic in MetadataResponse.decode(version, frame, size).topics:
            if topic.name and topic.topic_id != _ZERO_ID:
                self._recorder.topic_ids[bytes(topic.topic_id)] = topic.name


def _pass_on(
    source: socket.socket, target: socket.socket, keep: Callable[[bytes], None]
) -> None:
    """Copy bytes until the end, and hand each whole frame to ``keep``."""
    data = bytearray()
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            data += chunk
            # Before it is passed on: a request is known when its answer comes.
            for frame in _take_frames(data):
                keep(frame)
            target.sendall(chunk)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _take_frames(data: bytearray) -> Iterator[bytes]:
    while len(data) >= 4:
        (size,) = struct.unpack_from(">i", data)
        if size < 0 or len(data) < 4 + size:
            return
        yield bytes(data[4 : 4 + size])
        del data[: 4 + size]


def condense(recorders: list[Recorder]) -> Corpus:
    """Return what recorders have seen, without repetitions and under lasting names."""
    ids = {key: name for each in recorders for key, name in each.topic_ids.items()}
    names: dict[bytes, bytes] = {}
    topics: dict[str, bytes] = {}
    stand_ins: dict[bytes, bytes] = {}

    def rename(found: re.Match[bytes]) -> bytes:
        number = len(names) % _NAMES
        return names.setdefault(found[0], b"test-%012d" % number)

    seen: Counter[tuple[str, int, int]] = Counter()
    same: set[bytes] = set()
    conversations = []
    for conversation in (c for each in recorders for c in each.conversations):
        client = _client_of(conversation.frames)
        frames = []
        for frame in conversation.frames:
            if len(frame) > _LONGEST_FRAME or len(frame) < 4:
                continue
            kind = (client, *struct.unpack_from(">hh", frame))
            frame = _TEST_NAME.sub(rename, frame)
            essence = frame[:4] + frame[8:]  # without its correlation id
            if seen[kind] < _OF_A_KIND and essence not in same:
                seen[kind] += 1
                same.add(essence)
                frames.append(frame)
        if frames:
            conversations.append(Conversation(client, conversation.listener, frames))
    for topic_id, name in ids.items():
        lasting = _TEST_NAME.sub(rename, name.encode()).decode()
        if any(topic_id in f for c in conversations for f in c.frames):
            stand_ins[topic_id] = topics.setdefault(
                lasting, b"topic-id-%07d" % len(topics)
            )
        elif any(lasting.encode() in f for c in conversations for f in c.frames):
            topics.setdefault(lasting, b"topic-id-%07d" % len(topics))
    for conversation in conversations:
        for topic_id, stand_in in stand_ins.items():
            conversation.frames[:] = [
                frame.replace(topic_id, stand_in) for frame in conversation.frames
            ]
    return Corpus(topics, conversations)


def _client_of(frames: list[bytes]) -> str:
    """Return the name of the software that has sent frames, or its client id."""
    name = ""
    for frame in frames:
        with contextlib.suppress(ProtocolError):
            header = parse_request_header(frame)
            name = name or re.sub(r"[-_]?[0-9a-f-]*$", "", header.client_id or "")
            if header.api_key == ApiKey.API_VERSIONS and header.api_version >= 3:
                asked = ApiVersionsRequest.decode(
                    header.api_version, frame, header.size
                )
                return f"{asked.client_software_name} {asked.client_software_version}"
    return name
