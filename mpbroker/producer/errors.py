"""The errors of records, transactions and producers.

The class of an error says what the caller can do:

- `RetriableError`: try again later; the producer has tried for as long as its settings
  allow.
- `RefusedError`: change the records; as they are, they will be refused again.
- `AbortableError`: abort the transaction, and go on with the producer.
- `FatalError`: close this producer.

`error_code` is the code in the broker's response; it is None if the error is not from a
broker.
"""

from __future__ import annotations

from typing import Final

from mpbroker.client.errors import (
    AuthenticationError,
    ClientError,
    describe_error,
    error_code_of,
)
from mpbroker.protocol.error_code import ErrorCode


class ProducerError(ClientError):
    """The base class of the errors that `Producer` raises and futures fail with."""

    def __init__(self, message: str, error_code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.error_code = error_code


class RetriableError(ProducerError):
    """An error after which the same call may succeed later."""


class RefusedError(ProducerError):
    """An error after which the same records would be refused again."""


class AbortableError(ProducerError):
    """The transaction must be aborted; the producer can be used afterwards."""


class FatalError(ProducerError):
    """The producer cannot be used any more; close it."""


class NetworkError(RetriableError):
    """The connection was lost; the broker may have written the records."""


class DeliveryTimeoutError(RetriableError):
    """No acknowledgement in delivery.timeout.ms, or no response in max.block.ms."""


class BufferExhaustedError(DeliveryTimeoutError):
    """buffer.memory was full for max.block.ms: brokers are slower than the caller.

    In a callback, which cannot wait, `send` raises it when the memory is overdrawn by
    as much again.
    """


class RecordTooLargeError(RefusedError):
    """The record exceeds max.request.size, buffer.memory or the topic's limit."""


class SerializationError(RefusedError):
    """A key or value is not bytes, or its serializer refused it."""


class OutOfOrderSequenceError(RefusedError):
    """An earlier batch was lost, so this one could not be written in order."""


class TransactionAbortedError(AbortableError):
    """The record was not sent, because its transaction was aborted."""


class ProducerFencedError(FatalError):
    """The transaction was open for too long, or another producer has taken over."""


class TransactionStateError(ProducerError):
    """The call does not fit the state of the transaction; see `Producer`."""


class ProducerClosedError(ProducerError):
    """The producer is closed, or was closed before the record was sent."""


class ProducerForkedError(ProducerClosedError):
    """A forked child uses a producer that its parent process made before the fork."""


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

_FENCED_ADVICE: Final = (
    "the transaction was open for longer than transaction.timeout.ms and was aborted,"
    " or another producer uses this transactional.id; close this producer"
)
_ADVICE: Final = {
    ErrorCode.MESSAGE_TOO_LARGE: (
        "send smaller records, or raise the topic's max.message.bytes"
    ),
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "create the topic, or check its name",
    ErrorCode.NOT_ENOUGH_REPLICAS: "see min.insync.replicas, and which brokers run",
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: "give this client WRITE on the topic",
    ErrorCode.PRODUCER_FENCED: _FENCED_ADVICE,
    ErrorCode.INVALID_PRODUCER_EPOCH: _FENCED_ADVICE,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: (
        "give this client WRITE on the topic, or IDEMPOTENT_WRITE, or set"
        " enable.idempotence=false"
    ),
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER: (
        "later records are written; these may be written or not: read the topic before"
        " you send them again"
    ),
    ErrorCode.INVALID_RECORD: "the topic needs keys, or other timestamps",
}


def authentication_failed(error: AuthenticationError) -> RetriableError:
    """Return the error for a broker that refused a login or a certificate."""
    return RetriableError(
        f"{error}; the producer goes on trying", ErrorCode.SASL_AUTHENTICATION_FAILED
    )


def error_of(number: int, what: str, message: str | None = None) -> ProducerError:
    """Return the exception for the error code of a response.

    Args:
        number: the error code.
        what: names the thing that was refused; the exception's text begins with it.
        message: the broker's own words, if the response has any.
    """
    code = error_code_of(number)
    advice = _ADVICE.get(code)
    if advice and not message:
        text = f"{what}: {code.name}"
    else:
        text = f"{what}: {describe_error(number, message)}"
    if advice:
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
