"""ProducerRecord, and the serializers and interceptors of a producer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mpbroker.client.serialization import Serializer, arguments_hint
from mpbroker.producer.batch import (
    NO_OFFSET,
    Callback,
    InterceptedCallback,
    RecordMetadata,
)
from mpbroker.producer.errors import SerializationError
from mpbroker.protocol.records.batch_header import NO_TIMESTAMP
from mpbroker.protocol.records.record_encode import RawHeaders

_log = logging.getLogger(__name__)

Headers = Iterable[tuple[str, bytes | None]]


class ProducerRecord(NamedTuple):
    """A record before it is serialized."""

    topic: str
    value: Any = None
    key: Any = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    partition: int | None = None
    timestamp_ms: int | None = None


class ProducerInterceptor:
    """The base class of interceptors, which see every record and its outcome.

    Override the methods you need.

    An exception of a method is logged; the record is sent as it was before.
    """

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """Return the record to send instead; called by the thread that calls send()."""
        return record

    def on_acknowledgement(
        self, metadata: RecordMetadata, error: Exception | None
    ) -> None:
        """Note that a record is acknowledged or has failed.

        The thread that calls the record's callback calls this before it.

        Args:
            metadata: the place of the record. If it has failed, its offset and
                timestamp are -1, and so is its partition if none was chosen yet.
            error: the error that the record failed with, or None.
        """

    def close(self) -> None:
        """Free resources at the producer's close, after all records are done."""


class Interceptors:
    """The interceptors of a producer, in their order; their exceptions are logged."""

    def __init__(self, interceptors: Sequence[ProducerInterceptor]) -> None:
        self._interceptors = tuple(interceptors)

    def __bool__(self) -> bool:
        return bool(self._interceptors)

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """Return a record as all interceptors have changed it."""
        for interceptor in self._interceptors:
            try:
                record = interceptor.on_send(record)
            except Exception:  # noqa: BLE001 - see ProducerInterceptor
                _log.exception("%s.on_send", type(interceptor).__name__)
        return record

    def before(self, callback: Callback | None) -> Acknowledgement:
        """Return a callback that calls the interceptors, and then ``callback``."""
        return Acknowledgement(self._interceptors, callback)

    def close(self) -> None:
        """Tell all interceptors that the producer has ended."""
        for interceptor in self._interceptors:
            try:
                interceptor.close()
            except Exception:  # noqa: BLE001 - see ProducerInterceptor
                _log.exception("%s.close", type(interceptor).__name__)


class Acknowledgement(InterceptedCallback):
    """Tells a record's outcome to the interceptors, and then to the user's callback."""

    __slots__ = ("_callback", "_interceptors")

    def __init__(
        self, interceptors: Sequence[ProducerInterceptor], callback: Callback | None
    ) -> None:
        self._interceptors = interceptors
        self._callback = callback

    def __call__(
        self, metadata: RecordMetadata | None, error: Exception | None
    ) -> None:
        assert metadata is not None
        for interceptor in self._interceptors:
            try:
                interceptor.on_acknowledgement(metadata, error)
            except Exception:  # noqa: BLE001 - see ProducerInterceptor
                _log.exception("%s.on_acknowledgement", type(interceptor).__name__)
        if self._callback is not None:
            self._callback(None if error is not None else metadata, error)

    def not_sent(self, topic: str, partition: int | None, error: Exception) -> None:
        """Tell the interceptors and the callback that send() refuses a record."""
        number = -1 if partition is None else partition
        self(RecordMetadata(topic, number, NO_OFFSET, NO_TIMESTAMP), error)


def to_bytes(serializer: Serializer | None, topic: str, what: str, value: Any) -> Any:
    """Return a key or value as bytes or None.

    Args:
        serializer: the function that returns the bytes; None if the value is bytes
            already.
        topic: the record's topic.
        what: "key" or "value", for errors.
        value: the key or value that the user gave.

    Raises:
        SerializationError: the value is not bytes, or the serializer raised an error.
    """
    if serializer is not None:
        try:
            value = serializer(topic, value)
        except Exception as error:
            raise SerializationError(
                f"the serializer refused the {what} of a record for {topic!r}:"
                f" {error}{arguments_hint(error, 'value')}"
            ) from error
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)  # a copy: the user may change the buffer
    # There are no serializers of headers.
    other = "" if what == "header" else f", or give the producer a {what}_serializer"
    raise SerializationError(
        f"the {what} of a record for {topic!r} is {type(value).__name__}, not bytes;"
        f" encode it{other}"
    )


def to_raw_headers(topic: str, headers: Headers) -> RawHeaders:
    """Return headers with encoded names.

    Raises:
        SerializationError: the headers are not pairs of a string and bytes (or None).
    """
    raw = []
    try:
        for name, value in headers:
            raw.append(
                (
                    name.encode("utf-8", "surrogateescape"),
                    to_bytes(None, topic, "header", value),
                )
            )
    except (TypeError, ValueError, AttributeError) as error:
        raise SerializationError(
            f"the headers of a record for {topic!r} are not pairs of a string and"
            f" bytes: {error}"
        ) from error
    return tuple(raw)
