"""librdkafka without a Python call per record.

confluent-kafka's `produce()` costs about a microsecond a record and its consumer two,
more than the broker does. Its wheel carries librdkafka as a plain shared library;
through ctypes, thousands of records go in and out by one call. No compiler needed.

Source: librdkafka's rdkafka.h, `rd_kafka_produce_batch`, `rd_kafka_consume_batch`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

PRODUCER: Final = 0
CONSUMER: Final = 1
CONF_OK: Final = 0
STALL_S: Final = 10.0


class RdKafkaError(Exception):
    """librdkafka refused, or a record did not arrive."""


class Message(ctypes.Structure):
    """rd_kafka_message_t."""

    _fields_ = [
        ("err", ctypes.c_int),
        ("rkt", ctypes.c_void_p),
        ("partition", ctypes.c_int32),
        ("payload", ctypes.c_void_p),
        ("len", ctypes.c_size_t),
        ("key", ctypes.c_void_p),
        ("key_len", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("private", ctypes.c_void_p),
    ]


def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("confluent_kafka")
    if spec is None or spec.origin is None:
        raise RdKafkaError("confluent-kafka is not installed")
    bundled = Path(spec.origin).parents[1] / "confluent_kafka.libs"
    found = sorted(bundled.glob("librdkafka-*.so*"))
    library = ctypes.CDLL(str(found[0]) if found else "librdkafka.so.1")
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("rd_kafka_conf_new", pointer, []),
        (
            "rd_kafka_conf_set",
            ctypes.c_int,
            [pointer, ctypes.c_char_p, ctypes.c_char_p, pointer, ctypes.c_size_t],
        ),
        (
            "rd_kafka_new",
            pointer,
            [ctypes.c_int, pointer, pointer, ctypes.c_size_t],
        ),
        ("rd_kafka_topic_new", pointer, [pointer, ctypes.c_char_p, pointer]),
        ("rd_kafka_topic_destroy", None, [pointer]),
        ("rd_kafka_destroy", None, [pointer]),
        ("rd_kafka_poll", ctypes.c_int, [pointer, ctypes.c_int]),
        ("rd_kafka_flush", ctypes.c_int, [pointer, ctypes.c_int]),
        (
            "rd_kafka_produce_batch",
            ctypes.c_int,
            [pointer, ctypes.c_int32, ctypes.c_int, pointer, ctypes.c_int],
        ),
        (
            "rd_kafka_consume_start",
            ctypes.c_int,
            [pointer, ctypes.c_int32, ctypes.c_int64],
        ),
        ("rd_kafka_consume_stop", ctypes.c_int, [pointer, ctypes.c_int32]),
        (
            "rd_kafka_consume_batch",
            ctypes.c_ssize_t,
            [pointer, ctypes.c_int32, ctypes.c_int, pointer, ctypes.c_size_t],
        ),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


class _Client:
    """A librdkafka handle with one topic, used from one thread."""

    def __init__(self, kind: int, topic: str, settings: Mapping[str, str]) -> None:
        self._lib = _library()
        error = ctypes.create_string_buffer(512)
        conf = self._lib.rd_kafka_conf_new()
        for key, value in settings.items():
            if (
                self._lib.rd_kafka_conf_set(
                    conf, key.encode(), value.encode(), error, len(error)
                )
                != CONF_OK
            ):
                raise RdKafkaError(error.value.decode())
        self._handle = self._lib.rd_kafka_new(kind, conf, error, len(error))
        if not self._handle:
            raise RdKafkaError(error.value.decode())
        self._topic = self._lib.rd_kafka_topic_new(self._handle, topic.encode(), None)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.rd_kafka_topic_destroy(self._topic)
        self._lib.rd_kafka_destroy(self._handle)


class BatchProducer(_Client):
    """Send the same set of values over and over to partition 0."""

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        values: Sequence[bytes],
        settings: Mapping[str, str],
    ) -> None:
        super().__init__(
            PRODUCER, topic, {"bootstrap.servers": bootstrap} | dict(settings)
        )
        # Neither copied nor freed by librdkafka: they live as long as this object.
        self._values = [ctypes.create_string_buffer(v, len(v)) for v in values]
        self._messages = (Message * len(values))()
        for message, buffer in zip(self._messages, self._values, strict=True):
            message.payload = ctypes.addressof(buffer)
            message.len = len(buffer)

    def send(self, rounds: int) -> int:
        """Send all values `rounds` times and wait for every ack; return how many.

        Raises:
            RdKafkaError: not all were acknowledged within a minute.
        """
        count = len(self._messages)
        size = ctypes.sizeof(Message)
        for _ in range(rounds):
            done = 0
            while done < count:
                at = ctypes.addressof(self._messages) + done * size
                taken = self._lib.rd_kafka_produce_batch(
                    self._topic, 0, 0, at, count - done
                )
                # It takes from the front until its queue is full.
                done += taken
                if done < count:
                    self._lib.rd_kafka_poll(self._handle, 5)
        if self._lib.rd_kafka_flush(self._handle, 60_000):
            raise RdKafkaError("records are still unacknowledged after 60 s")
        return rounds * count


class BatchConsumer(_Client):
    """Read partition 0 from its start by assignment."""

    def __init__(self, bootstrap: str, topic: str, settings: Mapping[str, str]) -> None:
        super().__init__(
            CONSUMER, topic, {"bootstrap.servers": bootstrap} | dict(settings)
        )

    def read(self, count: int, at_once: int = 10_000) -> None:
        """Read `count` records, offsets 0 upwards without a gap.

        Raises:
            RdKafkaError: an error, a gap, or nothing for STALL_S.
        """
        pointers = (ctypes.c_void_p * at_once)()
        if self._lib.rd_kafka_consume_start(self._topic, 0, 0):
            raise RdKafkaError("consume_start failed")
        try:
            self._read(count, pointers)
        finally:
            # A handle whose partition is still being read never ends.
            self._lib.rd_kafka_consume_stop(self._topic, 0)

    def _read(self, count: int, pointers: Any) -> None:
        # The one call per record: without letting go of the interpreter's lock for it.
        destroy = ctypes.PyDLL(self._lib._name).rd_kafka_message_destroy
        destroy.restype = None
        destroy.argtypes = [ctypes.c_void_p]
        taken = 0
        deadline = time.monotonic() + STALL_S
        while taken < count:
            # It waits for all it was asked for; what it waits for may be more than
            # its queue takes.
            got = self._lib.rd_kafka_consume_batch(
                self._topic, 0, 2, pointers, min(len(pointers), count - taken)
            )
            if got <= 0:
                if time.monotonic() > deadline:
                    raise RdKafkaError(f"stuck after {taken} of {count} records")
                continue
            deadline = time.monotonic() + STALL_S
            # The first and the last at their places: none is missing between.
            self._check(pointers[0], taken)
            self._check(pointers[got - 1], taken + got - 1)
            for _ in map(destroy, pointers[:got]):
                pass
            taken += got

    @staticmethod
    def _check(pointer: int, expected: int) -> None:
        message = Message.from_address(pointer)
        if message.err:
            raise RdKafkaError(f"error {message.err} at offset {expected}")
        if message.offset != expected:
            raise RdKafkaError(f"offset {message.offset} where {expected} was due")
