"""Produce requests that were encoded beforehand: what broker and sockets allow.

No producer in Python can be faster than this, since it computes nothing: the bytes of a
usual request, a full batch for each partition, again and again, with as many in flight
as producers have. Only what makes a producer idempotent is left out.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import BinaryIO, Final

from mpbroker.producer.batch import RECORD_OVERHEAD, ProducerBatch
from mpbroker.protocol.records.compression import Codec
from tests.bench import wire

IN_FLIGHT: Final = 5
_TIMEOUT_S: Final = 60.0


class BareSends:
    """A stream of equal requests, and a last one with the records that are left."""

    def __init__(
        self,
        topic: str,
        partitions: int,
        value: bytes,
        count: int,
        codec: Codec,
        batch_size: int,
    ) -> None:
        """Encode everything.

        Args:
            topic: where to.
            partitions: each has a batch in every request.
            value: of every record.
            count: records in all.
            codec: of the batches.
            batch_size: bytes of a batch, compressed.
        """
        fitting = batch_size // (len(value) + RECORD_OVERHEAD)
        if codec:
            fitting = fitting * batch_size // len(_batch(value, fitting, codec))
        batch = _batch(value, fitting, codec)
        self._request = _produce(topic, dict.fromkeys(range(partitions), batch))
        self._times, rest = divmod(count, partitions * fitting)
        self._last = _produce(topic, {0: _batch(value, rest, codec)}) if rest else None

    def run(self, bootstrap: str) -> float:
        """Send all, and return how many seconds passed until the last answer."""
        host, _, port = bootstrap.rpartition(":")
        requests = [self._request] * self._times
        if self._last is not None:
            requests.append(self._last)
        with (
            socket.create_connection((host, int(port)), _TIMEOUT_S) as connection,
            connection.makefile("rb") as answers,
        ):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            began = time.perf_counter()
            for number, request in enumerate(requests):
                if number >= IN_FLIGHT:
                    _skip_answer(answers)
                connection.sendall(request)
            for _ in requests[-IN_FLIGHT:]:
                _skip_answer(answers)
            return time.perf_counter() - began


def _skip_answer(answers: BinaryIO) -> None:
    """Read an answer; what was written is counted afterwards."""
    size = answers.read(4)
    if len(size) < 4 or not answers.read(int.from_bytes(size, "big")):
        raise wire.AnswerError("the broker closed the connection")


def _batch(value: bytes, count: int, codec: Codec) -> bytes:
    batch = ProducerBatch("", 0, 0, 0, 0)
    now_ms = time.time_ns() // 1_000_000
    batch.records = [(now_ms, None, value, ())] * count
    batch.seal(codec, None)
    return batch.encode(codec)


def _produce(topic: str, batches: dict[int, bytes]) -> bytes:
    parts = [
        struct.pack(">i", partition) + wire.compact(records) + wire.NO_TAGS
        for partition, records in batches.items()
    ]
    body = wire.compact(topic.encode()) + wire.array(parts) + wire.NO_TAGS
    head = wire.compact(None) + struct.pack(">hi", -1, 30_000)
    return wire.request(wire.PRODUCE, head + wire.array([body]) + wire.NO_TAGS)
