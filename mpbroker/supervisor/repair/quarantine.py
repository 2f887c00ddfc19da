"""Quarantine: keep and answer a request with which several handlers have died.

Its bytes are kept in a file for inspection, and its client is answered with an error.
A process of its own does both: the request may end that process, too, or make it hang;
then the connection is closed. The files are named by time and hold the frame as it
came, so that it can be sent again. The newest 16 files are kept.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.ipc.arena import ANSWER_AT, ANSWER_BYTES
from mpbroker.ipc.layout import (
    SLOT_CONNECTION,
    SLOT_REQUEST_LENGTH,
    SLOT_REQUEST_OFFSET,
    SLOT_RESPONSE_LENGTH,
    ResponseKind,
    slot_row,
)
from mpbroker.network.connection_rows import connection_name
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.headers import parse_request_header, response_header_version
from mpbroker.server.api_messages import error_answer
from mpbroker.server.request import Request
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.repair.recovery import Repair

if TYPE_CHECKING:
    from pathlib import Path

_LOG = get_logger(__name__)

FOLDER: Final = "quarantine"
MAX_FILES: Final = 16
MAX_FILE_BYTES: Final = 1024 * 1024
_PATIENCE_S: Final = 5


class Owner(Protocol):
    """A supervisor: its repair after deaths, and a way to fork helpers."""

    repair: Repair

    def fork_aside(
        self, run: Callable[[], None], ended: Callable[[int], None]
    ) -> object:
        """Call ``run()`` in a forked process; at its end ``ended(wait status)``."""


class Quarantine:
    """Saves and answers the requests that the repair after a death puts in quarantine.

    Args:
        owner: the supervisor.
        memory: the shared memory that holds the requests.
        directory: a log directory; the saved requests are in its folder "quarantine".
    """

    def __init__(self, owner: Owner, memory: BrokerMemory, directory: str) -> None:
        self._owner = owner
        self._memory = memory
        self._directory = directory

    def begin(self) -> None:
        """Save and answer every request that is put in quarantine from now on."""
        self._owner.repair.on_quarantine = self._take

    def _take(self, slot: int) -> None:
        words = self._memory.control.words
        # 0 until the answer is whole; _ended() goes by it, wherever that process dies.
        words[slot_row(slot) + SLOT_RESPONSE_LENGTH] = 0
        self._owner.fork_aside(partial(self._see_to, slot), partial(self._ended, slot))

    def _see_to(self, slot: int) -> None:
        """Save a request to a file, and write an error response into shared memory.

        This runs in a forked process, which is killed if it takes more than 5 s.
        """
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_PATIENCE_S)
        words, row = self._memory.control.words, slot_row(slot)
        offset = words[row + SLOT_REQUEST_OFFSET]
        frame = self._memory.arena.view[
            offset : offset + words[row + SLOT_REQUEST_LENGTH]
        ]
        self._keep(frame, connection_name(words, words[row + SLOT_CONNECTION]))
        answer = answer_to(frame)
        if answer is None or len(answer) > ANSWER_BYTES:
            return
        at = self._memory.arena_layout.block(slot) + ANSWER_AT
        self._memory.arena.view[at : at + len(answer)] = answer
        words[row + SLOT_RESPONSE_LENGTH] = len(answer)  # last: the answer is whole

    def _keep(self, frame: memoryview, connection: str) -> None:
        try:
            from pathlib import Path

            path = keep_frame(Path(self._directory, FOLDER), frame)
        except OSError as error:
            _LOG.error("the request of %s cannot be kept: %s", connection, error)
        else:
            _LOG.error("the request of %s is kept in %s", connection, path)

    def _ended(self, slot: int, status: int) -> None:
        repair, words = self._owner.repair, self._memory.control.words
        length = words[slot_row(slot) + SLOT_RESPONSE_LENGTH]
        if status or not length:
            repair.close_condemned(slot)
            return
        at = self._memory.arena_layout.block(slot) + ANSWER_AT
        repair.answer_condemned(slot, (ResponseKind.BYTES, at, length))


def keep_frame(folder: Path, frame: memoryview) -> Path:
    """Write a request's frame, with its size before it, to a file; return its path.

    A file is cut at MAX_FILE_BYTES. The newest MAX_FILES files stay.

    Raises:
        OSError: the file cannot be written; no part of it is left.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{time.time_ns():020}.request"
    new = path.with_suffix(".new")
    try:
        with new.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)  # it may hold a client's records
            file.write(len(frame).to_bytes(4, "big"))
            file.write(frame[: MAX_FILE_BYTES - 4])
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    kept = sorted(folder.glob("*.request"))
    for old in (*folder.glob("*.new"), *kept[:-MAX_FILES]):
        old.unlink(missing_ok=True)
    return path


def answer_to(frame: memoryview) -> bytes | None:
    """Return a response with UNKNOWN_SERVER_ERROR, framed, to a request's frame.

    None: the request cannot be parsed, or its response has no place for an error.
    """
    try:
        header = parse_request_header(frame)
        request = Request(
            -1,
            -1,
            0,
            header,
            frame[header.size :],
            flexible_response=response_header_version(
                ApiKey(header.api_key), header.api_version
            )
            == 1,
        )
        body = (
            _refused_produce(request)
            if header.api_key == ApiKey.PRODUCE
            else error_answer(request, ErrorCode.UNKNOWN_SERVER_ERROR)
        )
    except (ProtocolError, ValueError):
        return None
    return None if body is None else request.frame(body)


def _refused_produce(request: Request) -> bytes | None:
    """Return a Produce response with an error for every partition of a request.

    Some of its batches may have been appended all the same. None: with acks=0 the
    client expects no response.
    """
    from mpbroker.protocol.messages.produce import (
        PartitionProduceResponse,
        ProduceRequest,
        ProduceResponse,
        TopicProduceResponse,
    )

    message = ProduceRequest.decode(request.api_version, request.body)
    if message.acks == 0:
        return None
    return ProduceResponse(
        responses=[
            TopicProduceResponse(
                name=topic.name,
                topic_id=topic.topic_id,
                partition_responses=[
                    PartitionProduceResponse(
                        index=partition.index,
                        error_code=ErrorCode.UNKNOWN_SERVER_ERROR,
                        base_offset=-1,
                        error_message="the request has ended several processes",
                    )
                    for partition in topic.partition_data
                ],
            )
            for topic in message.topic_data
        ]
    ).encode(request.api_version)
