"""What can go wrong with a record, a transaction or a producer.

The class says what helps:

- `RetriableError`: it may work another time; the producer has tried for as long as it
  was allowed to.
- `RefusedError`: these records will be refused again as they are.
- `AbortableError`: the transaction must be aborted; the producer goes on.
- `FatalError`: close this producer.

`error_code` is the broker's, or None if it was not the broker who refused.
"""

from __future__ import annotations

from typing import Final

from mpbroker.client.errors import AuthenticationError, ClientError, error_code_of
from mpbroker.protocol.error_code import ErrorCode


class ProducerError(ClientError):
    """Base class of what `Producer` raises and futures fail with."""

    def __init__(self, message: str, error_code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.error_code = error_code


class RetriableError(ProducerError):
    """See the module."""


class RefusedError(ProducerError):
    """See the module."""


class AbortableError(ProducerError):
    """See the module."""


class FatalError(ProducerError):
    """See the module."""


class NetworkError(RetriableError):
    """The connection broke; whether the broker acted on the request is not known."""


class DeliveryTimeoutError(RetriableError):
    """Not acknowledged within delivery.timeout.ms, or no answer within max.block.ms."""


class BufferExhaustedError(DeliveryTimeoutError):
    """buffer.memory was full for max.block.ms: brokers are slower than the caller."""


class RecordTooLargeError(RefusedError):
    """A record above max.request.size, buffer.memory, or the topic's own limit."""


class SerializationError(RefusedError):
    """A key or value that is not bytes, or that its serializer refused."""


class OutOfOrderSequenceError(RefusedError):
    """An earlier batch was lost, so this one could not keep its place."""


class TransactionAbortedError(AbortableError):
    """The record was not sent because its transaction was aborted."""


class ProducerFencedError(FatalError):
    """Another producer with the same transactional.id has taken over."""


class TransactionStateError(ProducerError):
    """The call does not fit the state of the transaction; see `Producer`."""


class ProducerClosedError(ProducerError):
    """The producer is closed, or was, before the record was sent."""


class ProducerForkedError(ProducerClosedError):
    """The producer belongs to the process that this one was forked from."""


_FATAL: Final = frozenset(
    {
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.SASL_AUTHENTICATION_FAILED,
    }
)
_FENCED: Final = frozenset(
    {ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH}
)
_ABORTABLE: Final = frozenset(
    {ErrorCode.TRANSACTION_ABORTABLE, ErrorCode.INVALID_TXN_STATE}
)
_TOO_LARGE: Final = frozenset(
    {ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE}
)

_ADVICE: Final = {
    ErrorCode.MESSAGE_TOO_LARGE: (
        "send smaller records, or raise the topic's max.message.bytes"
    ),
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "create the topic, or see its name",
    ErrorCode.NOT_ENOUGH_REPLICAS: "see min.insync.replicas, and which brokers are up",
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: "give this client WRITE on the topic",
    ErrorCode.PRODUCER_FENCED: (
        "another producer uses this transactional.id; close this one"
    ),
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: (
        "give this client WRITE on the topic, or IDEMPOTENT_WRITE, or set"
        " enable.idempotence=false"
    ),
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER: (
        "records sent after these are written; whether these are, nobody can tell:"
        " read before sending them again"
    ),
    ErrorCode.INVALID_RECORD: "the topic wants keys, or other timestamps",
}


def authentication_failed(error: AuthenticationError) -> FatalError:
    """Return the error for a broker that we cannot use."""
    return FatalError(
        f"{error}; close this producer", ErrorCode.SASL_AUTHENTICATION_FAILED
    )


def error_of(number: int, what: str, message: str | None = None) -> ProducerError:
    """Return the error for a code that an answer brought.

    Args:
        number: the code off the wire.
        what: what was refused, to begin the text with.
        message: the broker's own words, if it has any.
    """
    code = error_code_of(number)
    name = code.name if code == number else f"error code {number}"
    text = f"{what}: {name}"
    if message:
        text += f": {message}"
    if advice := _ADVICE.get(code):
        text += f"; {advice}"
    return _class_of(code)(text, code)


def _class_of(code: ErrorCode) -> type[ProducerError]:
    if code in _FENCED:
        return ProducerFencedError
    if code in _TOO_LARGE:
        return RecordTooLargeError
    if code in _FATAL:
        return FatalError
    if code in _ABORTABLE:
        return AbortableError
    if code == ErrorCode.NETWORK_EXCEPTION:
        return NetworkError
    if code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
        return OutOfOrderSequenceError
    return RetriableError if code.retriable else RefusedError
