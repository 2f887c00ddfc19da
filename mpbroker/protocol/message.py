"""Message: a request or response, defined by a table of fields, types and versions.

    class DeleteRecordsTopic(Struct):
        name: str = field(STRING)
        partitions: list[DeleteRecordsPartition] = array(DeleteRecordsPartition)

    class DeleteRecordsRequest(
        Message, api_key=ApiKey.DELETE_RECORDS, versions=(0, 2), flexible_from=2
    ):
        topics: list[DeleteRecordsTopic] = array(DeleteRecordsTopic)
        timeout_ms: int = field(INT32)

For each version a decoding and an encoding function are generated from the table, when
they are first used (`codec_decode`, `codec_encode`). The constructor of a class is
generated when it is first called. To generate and compile a function takes 1-3 ms; to
import a module of messages compiles nothing, and takes less than 1 ms.

Source: Kafka protocol guide; Kafka's message definition format for the words
"versions", "nullable", "tag", "ignorable" and "default".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self, TypeVar

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.fields import FOREVER, Decoder, Encoder, Struct
from mpbroker.protocol.primitives import Buffer

if TYPE_CHECKING:
    from mpbroker.protocol.api_key import ApiKey

# The most elements that all arrays of a request have together: a topic and a partition
# for each of 131,072, which is more than any client asks for. An empty name is one or
# two bytes of a request, and 58 bytes of a handler's memory. Tagged fields count, too.
# Kafka has a limit for each array (MAX_ARRAY_ELEMENTS in codec_decode.py).
MAX_REQUEST_ELEMENTS: Final = 1 << 18
# The same for requests that name what is to be described, each name for a large part of
# an answer; the coordinator, a single process, executes most of them.
MAX_REQUEST_NAMES: Final = 100_000

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound="Message")


class SizedRegion(Protocol):
    """A region of bytes in a log file, not in memory; see `Message.encode_parts`."""

    @property
    def size_in_bytes(self) -> int: ...


class _Compiled(dict[int, T]):
    """The decoding or encoding functions of one message class, by version.

    A function is compiled when it is first used.
    """

    def __init__(self, message: type[Message]) -> None:
        super().__init__()
        self._message = message

    def __missing__(self, version: int) -> T:
        message = self._message
        if version not in message.valid_versions:
            raise ProtocolError(
                f"{message.__name__} has no version {version}, only "
                f"{message.valid_versions.start}-{message.valid_versions.stop - 1}"
            )
        function = self._compile(message, version, version >= message.flexible_from)
        self[version] = function
        return function

    def _compile(self, message: type[Message], version: int, flexible: bool) -> T:
        raise NotImplementedError


class _Decoders(_Compiled[Decoder[Any]]):
    def _compile(
        self, message: type[Message], version: int, flexible: bool
    ) -> Decoder[Any]:
        # Imported here: a start needs no codec before the first request.
        from mpbroker.protocol.codec import compile_decoder

        return compile_decoder(
            message,
            version,
            flexible=flexible,
            ignores_rest=message.is_request(),
            max_elements=message.max_elements if message.is_request() else None,
        )


class _Encoders(_Compiled[Encoder[Any]]):
    def _compile(
        self, message: type[Message], version: int, flexible: bool
    ) -> Encoder[Any]:
        from mpbroker.protocol.codec import compile_encoder

        return compile_encoder(message, version, flexible=flexible)


class Message(Struct):
    """A request or a response, without its header."""

    api_key: ClassVar[ApiKey]
    valid_versions: ClassVar[range]
    """The versions that can be decoded and encoded."""
    flexible_from: ClassVar[int]
    """The first version with compact lengths and tagged fields."""
    max_elements: ClassVar[int]
    """The most elements that all arrays of a request may have together."""
    decoders: ClassVar[_Decoders]
    """Functions by version. Those of requests bound the elements of all arrays."""
    encoders: ClassVar[_Encoders]

    def __init_subclass__(
        cls,
        *,
        api_key: ApiKey,
        versions: tuple[int, int],
        flexible_from: int | None,
        max_elements: int = MAX_REQUEST_ELEMENTS,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        cls.max_elements = max_elements
        cls.api_key = api_key
        cls.valid_versions = range(versions[0], versions[1] + 1)
        cls.flexible_from = FOREVER if flexible_from is None else flexible_from
        cls.decoders = _Decoders(cls)
        cls.encoders = _Encoders(cls)

    @classmethod
    def is_request(cls) -> bool:
        """Return whether the message is a request: its class's name ends in Request."""
        return cls.__name__.endswith("Request")

    @classmethod
    def decode(cls, version: int, buffer: Buffer, offset: int = 0) -> Self:
        """Read a message that reaches from an offset to the end of a buffer.

        Strings are copied. Bytes and records are views of the buffer, which must not
        change as long as the views are used. Fields that the version does not have get
        their defaults.

        Raises:
            TooManyElementsError: a request has more elements than ``max_elements``.
            ProtocolError: the bytes are malformed, or the version is not valid. Bytes
                behind a request are ignored, as by Kafka: librdkafka (2.16) sends some.
                Behind an answer, or what a log holds, they are refused.
        """
        return cls.decoders[version](buffer, offset)  # type: ignore[no-any-return]

    @classmethod
    def decoder(cls, version: int) -> Decoder[Self]:
        """Return the function that `decode` calls, for callers that use it often."""
        return cls.decoders[version]

    def encode(self, version: int) -> bytes:
        """Return the message as bytes.

        Raises:
            ProtocolError: the version is not valid; a value does not fit its field; or
                the version lacks a field that is set and is not ignorable.
        """
        parts = self.encoders[version](self)
        try:
            return b"".join(parts)
        except TypeError:
            raise ProtocolError(
                f"{type(self).__name__} v{version} holds records that are not bytes: "
                "use encode_parts"
            ) from None

    def encode_parts(self, version: int) -> list[bytes | SizedRegion]:
        """Return the message as bytes, with regions of files between them.

        Records may be any object with a `size_in_bytes`. The object itself is in the
        list, at the place of its bytes; the length field before it has its size.

        Raises:
            ProtocolError: as `encode`.
        """
        parts = self.encoders[version](self)
        try:
            return [b"".join(parts)]
        except TypeError:
            return _join_between_regions(parts)


def _join_between_regions(parts: list[Any]) -> list[bytes | SizedRegion]:
    joined: list[bytes | SizedRegion] = []
    start = 0
    for index, part in enumerate(parts):
        if not isinstance(part, (bytes, bytearray, memoryview)):
            if start < index:
                joined.append(b"".join(parts[start:index]))
            joined.append(part)
            start = index + 1
    if start < len(parts):
        joined.append(b"".join(parts[start:]))
    return joined
